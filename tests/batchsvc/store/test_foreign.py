"""A tenant's bucket: reached at judged addresses and no others, with its own keys, and nothing of them is ever said."""

from __future__ import annotations

import logging
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from batchsvc.egress import Egress, EgressError
from batchsvc.errors import NotFoundError, ServiceError, UnavailableError
from batchsvc.store import foreign
from batchsvc.store.foreign import ForeignBucket, RefusedError
from batchsvc.store.s3 import OtherVersionError
from tests.tenant_store import LOOPBACK, Tenant, dripping, listening

ALLOWED = Egress.parse(LOOPBACK)


def test_a_bucket_of_another_server_is_read_and_written_with_its_own_keys(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the shell says of our own store, or of a proxy, leads nowhere."""
    with listening() as (elsewhere, came):
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, elsewhere)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ours")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ours")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "ours")
        with closing(tenant.opened()) as bucket:
            etag = bucket.put("a/ö b?c#%2e", b"hello")
            found = bucket.head("a/ö b?c#%2e")
            assert found is not None and (found.etag, found.size_bytes) == (etag, 5)
            assert b"".join(bucket.stream("a/ö b?c#%2e", etag=etag)) == b"hello"
            assert bucket.head("none") is None
            upload = bucket.start_multipart("big")
            parts = [bucket.upload_part("big", upload, 1, b"x" * (5 << 20)), bucket.upload_part("big", upload, 2, b"y")]
            bucket.complete_multipart("big", upload, parts)
        assert tenant.get("big") == b"x" * (5 << 20) + b"y" and not came


def test_without_an_endpoint_it_is_aws_and_no_server_that_the_shell_names(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def lookup(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["10.0.0.1"]

    with listening() as (elsewhere, came):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", elsewhere)
        refused = pytest.raises(EgressError, match=r"tenant-.*s3.*amazonaws\.com has no public address")
        with closing(ForeignBucket(tenant.access(endpoint=None), Egress(), lookup)) as bucket, refused:
            bucket.head("a")
        assert not came
    assert asked == [(f"{tenant.bucket}.s3.amazonaws.com", 443)], "refused once, and not tried again"


@pytest.mark.parametrize("allowed", ["", "10.0.0.0/8", "::1"])
def test_an_address_that_nobody_permits_gets_no_byte(tenant: Tenant, allowed: str) -> None:
    with listening() as (endpoint, came):
        with closing(ForeignBucket(tenant.access(endpoint=endpoint), Egress.parse(allowed))) as bucket:
            for call in (lambda: bucket.head("a"), lambda: bucket.put("a", b"x"), lambda: list(bucket.stream("a"))):
                with pytest.raises(EgressError):
                    call()
        assert not came


@pytest.mark.parametrize("answer", [["169.254.169.254"], ["127.0.0.1", "169.254.169.254"], ["::ffff:169.254.169.254"]])
def test_metadata_is_never_asked_not_even_if_its_name_is_permitted(tenant: Tenant, answer: list[str]) -> None:
    with listening() as (endpoint, came):
        named = endpoint.replace("127.0.0.1", "store.example")
        egress = Egress.parse(f"{LOOPBACK},store.example,0.0.0.0/0")
        refused = pytest.raises(EgressError)
        with closing(ForeignBucket(tenant.access(endpoint=named), egress, lambda *_: answer)) as bucket, refused:
            bucket.head("a")
        assert not came


def test_a_name_that_changes_its_mind_is_judged_at_every_connection(tenant: Tenant) -> None:
    """DNS rebinding: what was judged is what is connected to, and the next connection is judged anew."""
    answers = [["127.0.0.1"], ["127.0.0.1"], ["10.9.9.9"]]
    endpoint = tenant.server.endpoint.replace("127.0.0.1", "store.example")
    for number in range(2):
        bucket = ForeignBucket(tenant.access(endpoint=endpoint), ALLOWED, lambda *_: answers.pop(0))
        with closing(bucket):
            bucket.put(f"a{number}", b"x")
            bucket.put(f"a{number}", b"x")  # over the same connection
    last = ForeignBucket(tenant.access(endpoint=endpoint), ALLOWED, lambda *_: answers.pop(0))
    with closing(last), pytest.raises(EgressError, match=r"store\.example has no public address"):
        last.head("a0")
    assert not answers


class _Redirecting(BaseHTTPRequestHandler):
    """Sends every request to another place, as a server may that we don't know."""

    location = ""
    count = 0

    def _redirect(self) -> None:
        type(self).count += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(307)
        self.send_header("Location", self.location)
        self.send_header("x-amz-bucket-region", "eu-west-1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_HEAD = do_POST = _redirect

    def log_message(self, *_: object) -> None:
        pass


def test_a_redirect_leads_nowhere(tenant: Tenant) -> None:
    with listening() as (elsewhere, came):
        handler = type("Redirecting", (_Redirecting,), {"location": f"{elsewhere}/latest/meta-data"})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            access = tenant.access(endpoint=f"http://127.0.0.1:{server.server_address[1]}")
            with closing(ForeignBucket(access, ALLOWED)) as bucket:
                for call in (lambda: bucket.head("a"), lambda: bucket.put("a", b"x"), lambda: list(bucket.stream("a"))):
                    with pytest.raises(ServiceError):
                        call()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        assert handler.count >= 3 and not came


def test_what_a_store_refuses_is_told_from_what_it_can_not_do_now(tenant: Tenant) -> None:
    tenant.put("a", b"x")
    for changes in ({"secret_key": "wrong"}, {"access_key": "nobody"}):
        with closing(ForeignBucket(tenant.access(**changes), ALLOWED)) as bucket:
            for call in (lambda: bucket.head("a"), lambda: bucket.put("a", b""), lambda: list(bucket.stream("a"))):
                with pytest.raises(RefusedError) as refused:
                    call()
                assert f"s3://{tenant.bucket}/a" in refused.value.message
    with closing(tenant.opened()) as bucket:
        with pytest.raises(NotFoundError):
            list(bucket.stream("none"))
        with pytest.raises(OtherVersionError):
            list(bucket.stream("a", etag="0" * 32))
    with closing(ForeignBucket(tenant.access(endpoint="http://127.0.0.1:1"), ALLOWED)) as bucket:
        with pytest.raises(UnavailableError) as silent:
            bucket.head("a")
        assert silent.value.code == "store_unavailable"


def test_no_key_stands_in_an_error_or_a_log(tenant: Tenant, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    access = tenant.access(secret_key="very-secret-1")
    said = [repr(access), str(access)]
    for changed in (access, tenant.access(secret_key="very-secret-1", endpoint="http://127.0.0.1:1")):
        with closing(ForeignBucket(changed, ALLOWED)) as bucket:
            with pytest.raises(ServiceError) as refused:
                bucket.put("a", b"x")
            error: BaseException | None = refused.value
            while error is not None:
                said.append(repr(error))
                error = error.__cause__
    for text in (*said, caplog.text):
        assert "very-secret-1" not in text and access.access_key not in text


def test_a_server_that_ignores_what_it_is_asked_is_noticed(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every server heeds If-Match: what comes names its version itself."""
    tenant.put("a", b"x")
    with closing(tenant.opened()) as bucket:
        client: Any = bucket._client
        asked = client.get_object
        monkeypatch.setattr(client, "get_object", lambda **call: asked(**{**call, "IfMatch": "*"}))
        with pytest.raises(OtherVersionError):
            list(bucket.stream("a", etag="0" * 32))


@pytest.mark.parametrize("status", [b"200 OK", b"500 Internal Server Error", b"404 Not Found"])
def test_an_answer_without_an_end_is_not_read_to_its_end(
    tenant: Tenant, monkeypatch: pytest.MonkeyPatch, status: bytes
) -> None:
    monkeypatch.setattr(foreign, "_MAX_ANSWER_BYTES", 16)
    head = b'HTTP/1.1 %s\r\nETag: "0"\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n%s\r\n' % (status, b"y" * 17)
    with dripping(head) as port:
        access = tenant.access(endpoint=f"http://127.0.0.1:{port}")
        with closing(ForeignBucket(access, ALLOWED)) as bucket, pytest.raises(UnavailableError, match="no end"):
            bucket.put("a", b"x")


def test_headers_that_drip_have_an_end(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_ANSWER_S", 0.5)
    with dripping(b"HTTP/1.1 200 OK\r\nX-A: ") as port:
        access = tenant.access(endpoint=f"http://127.0.0.1:{port}")
        with closing(ForeignBucket(access, ALLOWED)) as bucket, pytest.raises(UnavailableError):
            bucket.head("a")


class _Closing(BaseHTTPRequestHandler):
    """Ends the connection after each answer."""

    protocol_version = "HTTP/1.1"  # an older one doesn't tell clients to go on, and they wait a second for it

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Connection", "close")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_ends_each_connection_costs_no_files(tenant: Tenant) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Closing)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        access = tenant.access(endpoint=f"http://127.0.0.1:{server.server_address[1]}")
        with closing(ForeignBucket(access, ALLOWED)) as bucket:
            for _ in range(60):
                bucket.put("a", b"x")
            assert len(bucket._connections._made) <= foreign._TWINS
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
