"""The object store against a real S3 server: what our protocol relies on."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from batchsvc.errors import NotFoundError, UnavailableError
from batchsvc.settings import Settings
from batchsvc.store.s3 import MIN_PART_BYTES, ObjectStore
from tests.servers import S3Server


@pytest.fixture(scope="module")
def store(s3_server: S3Server) -> ObjectStore:
    made = ObjectStore(_settings(s3_server))
    made.ensure_bucket()
    made.ensure_bucket()  # again is no error
    return made


def _settings(server: S3Server, **changes: str) -> Settings:
    return Settings.from_env(
        {
            "DATABASE_URL": "sqlite:///unused.sqlite3",
            "REDIS_URL": "redis://unused",
            "AWS_ENDPOINT_URL_S3": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "BATCHSVC_BUCKET": "store-test",
            **changes,
        }
    )


def test_put_get_head_delete(store: ObjectStore) -> None:
    etag = store.put("a/b", b"hello")
    info = store.head("a/b")
    assert info is not None
    assert (info.size_bytes, info.etag) == (5, etag)
    assert store.get("a/b") == b"hello"
    assert store.put("a/empty", b"")
    assert store.get("a/empty") == b""
    assert sorted(key for key, _ in store.list_keys("a/")) == ["a/b", "a/empty"]
    assert all(modified_ms > 1_600_000_000_000 for _, modified_ms in store.list_keys("a/"))
    store.delete(["a/b", "a/empty", "a/never-was"])
    assert store.head("a/b") is None
    assert list(store.list_keys("a/")) == []
    with pytest.raises(NotFoundError):
        store.get("a/b")


def test_ranges(store: ObjectStore) -> None:
    data = bytes(range(256)) * 1000
    store.put("ranges", data)
    for start, end in ((0, None), (0, 1), (255, 70_000), (len(data) - 1, None), (5, 5), (0, len(data) + 999)):
        pieces = list(store.stream("ranges", start=start, end=end, chunk=4096))
        assert b"".join(pieces) == data[start:end]
        assert all(len(piece) <= 4096 for piece in pieces)
    assert list(store.stream("ranges", start=len(data))) == []


def test_a_read_is_of_one_version(store: ObjectStore) -> None:
    first = store.put("versions", b"first")
    assert b"".join(store.stream("versions", etag=first)) == b"first"
    store.put("versions", b"other")
    with pytest.raises(UnavailableError, match=r"PreconditionFailed|412"):
        list(store.stream("versions", etag=first))


def test_multipart(store: ObjectStore) -> None:
    upload = store.start_multipart("big")
    parts = [b"x" * MIN_PART_BYTES, b"y" * MIN_PART_BYTES, b"tail"]
    etags = [store.upload_part("big", upload, number, part) for number, part in enumerate(parts, start=1)]
    assert store.head("big") is None  # nothing is there before the parts are joined
    etag = store.complete_multipart("big", upload, etags)
    info = store.head("big")
    assert info is not None
    assert (info.size_bytes, info.etag) == (sum(map(len, parts)), etag)
    assert b"".join(store.stream("big", start=2 * MIN_PART_BYTES - 2)) == b"yytail"
    assert store.get("big") == b"".join(parts)


def test_a_part_has_a_type(s3_server: S3Server) -> None:
    """SeaweedFS would compress it else, and take three times as long to store it, ten times to read it."""
    types: list[str | None] = []

    class Noted(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            types.append(self.headers["Content-Type"])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("ETag", '"noted"')
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Noted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        noting = ObjectStore(_settings(s3_server, AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{server.server_port}"))
        assert noting.upload_part("big", "upload", 1, b"text " * 100) == "noted"
        server.shutdown()
    assert types == ["binary/octet-stream"]


def test_a_small_part_before_the_last_is_refused(store: ObjectStore) -> None:
    upload = store.start_multipart("small")
    etags = [store.upload_part("small", upload, number, b"few") for number in (1, 2)]
    with pytest.raises(UnavailableError, match="EntityTooSmall"):
        store.complete_multipart("small", upload, etags)
    store.abort_multipart("small", upload)
    store.abort_multipart("small", upload)  # again is no error
    assert store.head("small") is None


def test_a_wrong_key_and_a_dead_server_are_one_sentence(s3_server: S3Server) -> None:
    wrong = ObjectStore(_settings(s3_server, AWS_SECRET_ACCESS_KEY="wrong" * 8))
    with pytest.raises(UnavailableError) as refused:
        wrong.put("x", b"")
    assert "wrong" not in refused.value.message
    with pytest.raises(UnavailableError, match="doesn't answer"):
        ObjectStore(_settings(s3_server, AWS_ENDPOINT_URL_S3="http://127.0.0.1:9")).get("x")


@pytest.mark.parametrize("cuts", [1, 3, 1000])
def test_a_read_that_breaks_off_goes_on_where_it_stopped(store: ObjectStore, s3_server: S3Server, cuts: int) -> None:
    data = b"".join(number.to_bytes(4, "big") for number in range(500_000))
    store.put("cut", data)
    with _cutting_proxy(s3_server.ports["s3"], cuts) as (proxy, left):
        far = ObjectStore(_settings(s3_server, AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{proxy}"))
        if cuts < 1000:
            assert b"".join(far.stream("cut", chunk=65_536)) == data
            assert left == [0], "the relay has cut as often as it was told to"
        else:  # every answer is cut before a byte of the body: it ends with an error, never with less
            with pytest.raises(UnavailableError):
                list(far.stream("cut", chunk=65_536))


@contextmanager
def _cutting_proxy(port: int, cuts: int) -> Iterator[tuple[int, list[int]]]:
    """A relay that cuts its first `cuts` answers: 300 kB into the body, or before the body if it never stops."""
    left = [cuts]
    listener = socket.create_server(("127.0.0.1", 0))

    def relay(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            quota = None
            if left[0] > 0:
                left[0] -= 1
                quota = 300_000 if cuts < 1000 else 0
            _copy(server, client, quota)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=relay, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1], left
    finally:
        listener.close()


def _copy(source: socket.socket, sink: socket.socket, body_quota: int | None = None) -> None:
    """Copy until the end, or until the head and `body_quota` bytes of the body have passed; then cut both."""
    passed = b""
    head_bytes: int | None = None
    sent = 0
    try:
        while piece := source.recv(65_536):
            if body_quota is not None:
                if head_bytes is None:
                    passed += piece
                    if found := re.search(rb"\r\n\r\n", passed):
                        head_bytes = found.end()
                if head_bytes is not None and sent + len(piece) > head_bytes + body_quota:
                    sink.sendall(piece[: head_bytes + body_quota - sent])
                    break
            sink.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
