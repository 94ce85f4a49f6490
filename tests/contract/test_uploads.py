"""Uploads and downloads as bytes on the wire: forms, limits, ranges, broken connections, memory."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
import pytest
from fastapi.testclient import TestClient
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from batchsvc.app import create_app
from batchsvc.db.session import Database
from batchsvc.store import keys
from batchsvc.store.s3 import MIN_PART_BYTES
from tests.contract.conftest import Api
from tests.contract.test_http import envelope
from tests.dispatchers import NullDispatcher
from tests.servers import S3Server, fresh_database

LINE = b'{"custom_id":"1"}\n'
T = TypeVar("T")


def post(api: Api, content: bytes | Iterator[bytes], boundary: str = "B") -> httpx.Response:
    kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
    return api.call("POST", "/v1/files", content=content, headers=kind)


def form(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """A body with boundary B of parts (header parameters, content)."""
    body = b"".join(
        f"--B\r\nContent-Disposition: form-data; {header}\r\n\r\n".encode() + content + b"\r\n"
        for header, content in parts
    )
    return body + (b"--B--\r\n" if end else b"")


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="a.jsonl"', LINE)
ANCHOR = ('name="expires_after[anchor]"', b"created_at")
SECONDS = "expires_after[seconds]"


def test_fields_come_in_any_order(api: Api) -> None:
    for parts in ((PURPOSE, FILE), (FILE, PURPOSE)):
        made = post(api, form(*parts)).json()
        assert (made["bytes"], made["filename"]) == (len(LINE), "a.jsonl")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (form(FILE), "purpose"),
        (form(PURPOSE), "file"),
        (form(PURPOSE, ('name="other"; filename="a.jsonl"', LINE)), "file"),
        (form(PURPOSE, FILE, FILE), "file"),
        (form(PURPOSE, ('name="file"; filename="a.txt"', LINE)), "file"),
        (form(PURPOSE, ('name="file"; filename=".."', LINE)), "file"),
        (form(('name="purpose"', b"vision"), FILE), "purpose"),
        (form(('name="purpose"', b"x" * 5000), FILE), None),
        (form(PURPOSE, FILE, end=False), None),
        (form(*[PURPOSE] * 20), None),
        (form(PURPOSE, FILE, ANCHOR, ('name="expires_after[seconds]"', b"00003600" + b"0" * 20)), SECONDS),
        (form(PURPOSE, FILE, ANCHOR, ('name="expires_after[seconds]"', b"")), SECONDS),
        (b"--B\r\nbroken", None),
        (b"", None),
        (b"no form at all", None),
    ],
    ids=range(15),
)
def test_a_wrong_form_is_refused_and_leaves_nothing(api: Api, body: bytes, param: str | None) -> None:
    assert envelope(post(api, body), 400)["param"] == param
    assert list(api.store.list_keys(f"in/{api.project_id}/")) == []
    assert api.call("GET", "/v1/files").json()["data"] == []


def test_a_body_that_is_no_form(api: Api) -> None:
    envelope(api.call("POST", "/v1/files", json={"purpose": "batch"}), 400)
    envelope(api.call("POST", "/v1/files", headers={"content-type": "multipart/form-data"}), 400)
    envelope(post(api, form(PURPOSE, FILE), boundary="C" * 9), 400)
    envelope(post(api, form(PURPOSE, FILE), boundary="C" * 9000), 400)


def test_a_name_is_metadata_and_nothing_else(api: Api) -> None:
    for raw, kept in (
        ("../../etc/passwd.jsonl", "passwd.jsonl"),
        ("C:\\Users\\x\\a.jsonl", "a.jsonl"),
        ("a\tb\x7f.jsonl", "ab.jsonl"),
        ("é" * 300 + ".jsonl", "é" * 124 + ".jsonl"),
        ("ü; x=\u2028.JSONL", "ü; x=.JSONL"),
    ):
        made = post(api, form(PURPOSE, (f'name="file"; filename="{raw}"', LINE))).json()
        assert made["filename"] == kept
        content = api.call("GET", f"/v1/files/{made['id']}/content")
        assert content.content == LINE
        assert "\n" not in content.headers["content-disposition"]
        assert content.headers["content-disposition"].startswith("attachment; filename=")
        assert keys.input_file(api.project_id, made["id"]) in [key for key, _ in api.store.list_keys("in/")]


@pytest.mark.parametrize("name", ["a.parquet", "a.CSV", "a.tsv", "a.ndjson", "a.jsonl.gz", "a.csv.zst", "a.gz"])
def test_names_of_other_formats_are_taken(api: Api, name: str) -> None:
    made = post(api, form(PURPOSE, (f'name="file"; filename="{name}"', LINE))).json()
    assert made["filename"] == name, "what is in it is told by its bytes, when a batch reads it"


def test_a_file_of_several_parts_and_the_limit(api: Api) -> None:
    limit = api.settings.max_input_bytes
    block = os.urandom(1 << 20)
    digest = hashlib.sha256(block * (limit >> 20)).hexdigest()

    def body(size_bytes: int) -> Iterator[bytes]:
        head, tail = form(PURPOSE, ('name="file"; filename="big.jsonl"', b""), end=False), b"\r\n--B--\r\n"
        yield head[:-2]
        while size_bytes > 0:
            yield block[:size_bytes]
            size_bytes -= len(block)
        yield tail

    made = post(api, body(limit)).json()
    assert made["bytes"] == limit > 4 * MIN_PART_BYTES
    assert made["sha256"] == digest
    received = hashlib.sha256()
    with httpx.stream(
        "GET",
        f"{api.url}/v1/files/{made['id']}/content",
        headers={"Authorization": f"Bearer {api.key}"},
        trust_env=False,
        timeout=60,
    ) as answer:
        assert answer.headers["content-length"] == str(limit)
        for piece in answer.iter_raw():
            received.update(piece)
    assert received.hexdigest() == digest
    assert envelope(post(api, body(limit + 1)), 413)["code"] == "file_too_large"
    assert len(list(api.store.list_keys(f"in/{api.project_id}/"))) == 1


def test_ranges(api: Api) -> None:
    data = bytes(range(200))
    made = api.call("POST", "/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"}).json()
    path = f"/v1/files/{made['id']}/content"
    for asked, first, last in (
        ("0-0", 0, 0),
        ("10-19", 10, 19),
        ("190-", 190, 199),
        ("-5", 195, 199),
        ("50-999", 50, 199),
        ("150-" + "9" * 5000, 150, 199),
        ("-" + "9" * 5000, 0, 199),
    ):
        answer = api.call("GET", path, headers={"range": f"bytes={asked}"})
        assert answer.status_code == 206
        assert answer.content == data[first : last + 1]
        assert answer.headers["content-range"] == f"bytes {first}-{last}/200"
        assert answer.headers["content-length"] == str(last + 1 - first)
    for ignored in ("bytes=5-4", "lines=1-2", "bytes=1-2,4-5", "bytes=-"):
        answer = api.call("GET", path, headers={"range": ignored})
        assert (answer.status_code, answer.content) == (200, data)
    beyond = api.call("GET", path, headers={"range": "bytes=200-"})
    assert beyond.headers["content-range"] == "bytes */200"
    assert envelope(beyond, 416)["code"] == "range_not_satisfiable"


def test_an_empty_file_is_stored_and_read(api: Api) -> None:
    made = api.call("POST", "/v1/files", files={"file": ("a.jsonl", b"")}, data={"purpose": "batch"}).json()
    assert made["bytes"] == 0
    content = api.call("GET", f"/v1/files/{made['id']}/content")
    assert (content.status_code, content.content, content.headers["content-length"]) == (200, b"", "0")


def test_bytes_that_are_lost_are_an_error(api: Api) -> None:
    made = api.call("POST", "/v1/files", files={"file": ("a.jsonl", LINE)}, data={"purpose": "batch"}).json()
    api.store.delete([keys.input_file(api.project_id, made["id"])])
    error = envelope(api.call("GET", f"/v1/files/{made['id']}/content"), 503)
    assert error["code"] == "content_missing" and "in/" not in error["message"]


class LostAnswers:
    """A database whose commits are done, and then answered by nobody."""

    def __init__(self, db: Database, *, is_dead: bool = False) -> None:
        self._db, self._is_dead, self._has_failed = db, is_dead, False

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        with self._db.transaction() as session:
            yield session
        self._has_failed = True
        raise OperationalError("COMMIT", {}, Exception("connection lost"))

    def run(self, work: Callable[[Session], T]) -> T:
        with self.transaction() as session:
            return work(session)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        if self._is_dead and self._has_failed:
            raise OperationalError("BEGIN", {}, Exception("no connection"))
        with self._db.reading() as session:
            yield session


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_file_whose_commit_was_not_answered_keeps_its_bytes(api: Api, is_dead: bool) -> None:
    app = create_app(api.settings, NullDispatcher())
    app.state.context = replace(app.state.context, db=LostAnswers(api.db, is_dead=is_dead))
    client = TestClient(app, raise_server_exceptions=False)
    headers = {"Authorization": f"Bearer {api.key}"}
    answer = client.post("/v1/files", headers=headers, files={"file": ("a.jsonl", LINE)}, data={"purpose": "batch"})
    assert answer.status_code >= 500
    (found,) = api.call("GET", "/v1/files").json()["data"]
    assert api.call("GET", f"/v1/files/{found['id']}/content").content == LINE


def test_a_client_that_goes_away_leaves_nothing(api: Api) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.key}\r\nContent-Length: 20000000\r\n"
        client.sendall(f"{head}Content-Type: multipart/form-data; boundary=B\r\n\r\n".encode())
        client.sendall(form(PURPOSE, ('name="file"; filename="a.jsonl"', b"x" * 10_000_000), end=False))
    deadline = time.monotonic() + 30
    uploads = api.store._client.list_multipart_uploads  # what is begun and not ended is seen by S3 alone
    while any(api.project_id in u["Key"] for u in uploads(Bucket=api.store.bucket).get("Uploads", [])):
        assert time.monotonic() < deadline, "the unfinished upload is still there"
        time.sleep(0.1)
    assert list(api.store.list_keys(f"in/{api.project_id}/")) == []


def test_a_length_over_the_limit_is_refused_before_the_body(api: Api) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.key}\r\n"
        head += f"Content-Length: {2 * api.settings.max_input_bytes}\r\nExpect: 100-continue\r\n"
        client.sendall(f"{head}Content-Type: multipart/form-data; boundary=B\r\n\r\n".encode())
        assert client.recv(65_536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(("path", "key", "status"), [("/v1/files", "sk-wrong", 401), ("/v1/responses", "", 413)])
def test_a_client_that_sends_all_before_it_reads_sees_why_it_is_refused(
    api: Api, path: str, key: str, status: int
) -> None:
    """Closing the connection under such a client would cost it the answer: it sees a reset instead."""
    connection = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer {key or api.key}", "Content-Type": "application/json"}
    connection.request("POST", path, body=b" " * (20 << 20), headers=headers)
    assert connection.getresponse().status == status
    connection.close()


@pytest.mark.slow
def test_a_large_upload_leaves_memory_flat(
    tmp_path: Path, redis_url: str, s3_server: S3Server, postgres_url: str
) -> None:
    """200 MB through an API process of its own, which may grow by a few parts and no more."""
    with fresh_database(postgres_url) as database_url, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        env = {
            **os.environ,
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_BUCKET": "memory-test",
            "BATCHSVC_PORT": str(port),
        }
        server = subprocess.Popen([sys.executable, "-P", "-m", "batchsvc.app"], env=env, cwd=tmp_path)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx.get(f"{url}/livez", trust_env=False)
                    break
                except httpx.HTTPError:
                    assert server.poll() is None and time.monotonic() < deadline
                    time.sleep(0.1)
            from batchsvc.accounts import service as accounts
            from batchsvc.db.session import Database

            database = Database(database_url)
            with database.transaction() as session:
                key = accounts.create_key(session, accounts.create_project(session, "p").id, "k")[1]
            database.dispose()
            process, block = psutil.Process(server.pid), os.urandom(1 << 20)
            peaks: list[int] = []

            def body(blocks: int) -> Iterator[bytes]:
                yield form(PURPOSE, ('name="file"; filename="big.jsonl"', b""), end=False)[:-2]
                for _ in range(blocks):
                    yield block
                    peaks.append(process.memory_info().rss)
                yield b"\r\n--B--\r\n"

            headers = {
                "Authorization": f"Bearer {key}",
                "content-type": "multipart/form-data; boundary=B",
            }
            for blocks in (20, 200):  # the first warms up: clients and pools are made once
                before = process.memory_info().rss
                peaks.clear()
                answer = httpx.post(
                    f"{url}/v1/files", content=body(blocks), headers=headers, trust_env=False, timeout=300
                )
                assert answer.json()["bytes"] == blocks << 20
            assert max(peaks) - before < 64 << 20, f"grew by {(max(peaks) - before) >> 20} MiB"
        finally:
            server.terminate()
            assert server.wait(30) is not None
