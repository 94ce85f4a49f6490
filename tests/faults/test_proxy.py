"""The fault proxies do what they say, in front of a plain server, Valkey, PostgreSQL and S3."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import boto3
import pytest
import redis
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import ClientError, HTTPClientError
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from batchsvc.db.session import Database
from tests import servers
from tests.faults.proxy import POSTGRES_COMMIT, FaultProxy, Link, Tripwire
from tests.faults.s3_proxy import Rule, S3Proxy, in_front_of_s3
from tests.faults.targets import postgres_target, tcp_target, through


@pytest.fixture
def echo() -> Iterator[FaultProxy]:
    """A proxy before a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        with client, suppress(OSError):
            while data := client.recv(4096):
                client.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener, FaultProxy(("127.0.0.1", listener.getsockname()[1])) as proxy:
        yield proxy
        listener.shutdown(socket.SHUT_RDWR)


def connect(proxy: FaultProxy, timeout: float = 20) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout)


def read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := client.recv(size - len(data))):
        data += more
    return data


def test_in_good_weather_everything_passes(echo: FaultProxy) -> None:
    with connect(echo) as client:
        sent = bytes(range(256)) * 1000
        threading.Thread(target=client.sendall, args=(sent,)).start()
        assert read(client, len(sent)) == sent
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b"", "the end of one side reaches the other"


def test_latency_and_bandwidth_hold_per_direction(echo: FaultProxy) -> None:
    with connect(echo) as client:
        echo.set("up", Link(latency_s=0.3))
        began = time.monotonic()
        client.sendall(b"x")
        assert read(client, 1) == b"x"
        assert time.monotonic() - began >= 0.3
        echo.set("up", Link())
        echo.set("down", Link(bytes_per_s=2000))
        began = time.monotonic()
        client.sendall(b"y" * 1000)
        assert read(client, 1000) == b"y" * 1000
        assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_cut_lets_so_many_bytes_pass(echo: FaultProxy, is_reset: bool) -> None:
    echo.set("down", Link(cut_after_bytes=5, is_reset=is_reset))
    with connect(echo) as client:
        client.sendall(b"0123456789")
        received = b""
        try:
            received = read(client, 10)
        except ConnectionResetError:
            assert is_reset
        else:
            assert received == b"01234"
    echo.heal()
    with connect(echo) as client:
        client.sendall(b"again")
        assert read(client, 5) == b"again"


def test_refused_means_at_once_and_heals_on_the_same_port(echo: FaultProxy) -> None:
    with connect(echo) as client:
        client.sendall(b"a")
        assert read(client, 1) == b"a"
        echo.refuse()
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(echo)
    echo.heal()
    with connect(echo) as client:
        client.sendall(b"b")
        assert read(client, 1) == b"b"


def test_a_black_hole_says_nothing_and_lets_go_of_it_later(echo: FaultProxy) -> None:
    with connect(echo, timeout=0.5) as known:
        known.sendall(b"a")
        assert read(known, 1) == b"a"
        echo.black_hole()
        known.sendall(b"b")
        with pytest.raises(TimeoutError):
            known.recv(1)
        with connect(echo, timeout=0.5) as new:
            new.sendall(b"c")
            with pytest.raises(TimeoutError):
                new.recv(1)
            echo.heal()
            for client, sent in ((known, b"b"), (new, b"c")):
                client.settimeout(20)
                assert read(client, 1) == sent


def test_in_front_of_redis(redis_url: str) -> None:
    with FaultProxy(tcp_target(redis_url)) as proxy:
        client = redis.Redis.from_url(through(redis_url, proxy), socket_timeout=1, retry=None)
        assert client.ping()
        proxy.black_hole()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        proxy.heal()
        proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        proxy.heal()
        assert client.ping()


def test_the_answer_to_a_commit_gets_lost(postgres_url: str) -> None:
    with (
        servers.fresh_database(postgres_url) as url,
        FaultProxy(postgres_target(url)) as proxy,
    ):
        db = Database(through(url, proxy))
        with db.transaction() as session:
            session.execute(text("CREATE TABLE t (n int)"))
        proxy.tripwire = lost = Tripwire(POSTGRES_COMMIT, lambda passes: passes == 2)
        with db.transaction() as session:
            session.execute(text("INSERT INTO t VALUES (1)"))
        with pytest.raises(OperationalError), db.transaction() as session:
            session.execute(text("INSERT INTO t VALUES (2)"))
        assert lost.num_lost == 1
        with db.transaction() as session:
            assert list(session.scalars(text("SELECT n FROM t ORDER BY n"))) == [1, 2], "what was told is done"
        db.dispose()


@pytest.fixture
def s3(s3_server: servers.S3Server, bucket: str) -> Iterator[tuple[S3Proxy, BaseClient]]:
    with in_front_of_s3(s3_server.endpoint) as proxy:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{proxy.port}",
            aws_access_key_id=s3_server.access_key,
            aws_secret_access_key=s3_server.secret_key,
            region_name="us-east-1",
            config=Config(
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
                proxies={},
                response_checksum_validation="when_required",
            ),
        )
        client.create_bucket(Bucket=bucket)
        yield proxy, client
        client.close()


def test_a_store_answers_badly_and_recovers(s3: tuple[S3Proxy, BaseClient], bucket: str) -> None:
    proxy, client = s3

    def put(key: str, data: bytes = b"0123456789" * 100) -> None:
        client.put_object(Bucket=bucket, Key=key, Body=data)

    def get(key: str) -> bytes:
        return client.get_object(Bucket=bucket, Key=key)["Body"].read()

    put("whole")
    assert get("whole") == b"0123456789" * 100, "good weather"
    for status, code in ((503, "SlowDown"), (409, "ConditionalRequestConflict"), (507, "InsufficientStorage")):
        proxy.rules = [Rule(effect="answer", methods="PUT", status=status, code=code)]
        with pytest.raises(ClientError) as refused:
            put("refused")
        assert refused.value.response["Error"]["Code"] == code
        with pytest.raises(client.exceptions.NoSuchKey):
            get("refused")
    for effect in ("late_error", "lost_reply"):
        proxy.rules = [Rule(effect=effect, methods="PUT", status=500, code="InternalError")]
        with pytest.raises((ClientError, HTTPClientError)):
            put(effect)
        assert get(effect) == b"0123456789" * 100, "the write went through"
    proxy.rules = [Rule(effect="truncate", methods="GET")]
    with pytest.raises(HTTPClientError):
        get("whole")
    proxy.rules = [Rule(effect="corrupt", methods="GET", pattern="whole", times=1)]
    damaged, again = get("whole"), get("whole")
    assert damaged != again == b"0123456789" * 100 and len(damaged) == len(again)


def test_errors_come_as_often_as_asked_and_the_same_with_the_same_seed(s3_server: servers.S3Server) -> None:
    def draws(seed: int) -> list[bool]:
        with in_front_of_s3(s3_server.endpoint, seed) as proxy:
            proxy.rules = [Rule(effect="answer", probability=0.3)]
            return [proxy.pick("GET", "/b/k") is not None for _ in range(1000)]

    assert draws(7) == draws(7) != draws(8)
    assert 200 < sum(draws(7)) < 400


def test_an_error_in_a_200_of_complete(s3: tuple[S3Proxy, BaseClient], bucket: str) -> None:
    proxy, client = s3
    upload = client.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    etag = client.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=1, Body=b"x" * 10)["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    proxy.rules = [Rule(effect="answer", methods="POST", pattern="uploadId=", status=200, code="InternalError")]
    with pytest.raises(ClientError):
        client.complete_multipart_upload(Bucket=bucket, Key="k", UploadId=upload, MultipartUpload=parts)
    proxy.heal()
    client.complete_multipart_upload(Bucket=bucket, Key="k", UploadId=upload, MultipartUpload=parts)
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x" * 10
