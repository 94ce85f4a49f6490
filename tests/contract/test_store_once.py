"""Writes that are made once: conditional, and decided by what is in the store when their answer is lost or an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchsvc.errors import NotFoundError, UnavailableError
from batchsvc.settings import Settings
from batchsvc.store.s3 import MIN_PART_BYTES, BusyError, ObjectStore, OtherVersionError
from tests.faults.s3_proxy import Rule, S3Proxy, in_front_of_s3
from tests.servers import S3Server

DOUBTS = [  # more often than boto3 repeats a call by itself
    Rule(effect="late_error", methods="PUT POST", status=500, code="InternalError", times=4),
    Rule(effect="lost_reply", methods="PUT POST", times=4),
    Rule(effect="late_error", methods="PUT POST", status=200, code="InternalError", times=4),
]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with in_front_of_s3(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def store(proxy: S3Proxy, s3_server: S3Server, bucket: str) -> ObjectStore:
    made = ObjectStore(
        Settings.from_env(
            {
                "DATABASE_URL": "sqlite:///unused.sqlite3",
                "REDIS_URL": "redis://unused",
                "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{proxy.port}",
                "AWS_ACCESS_KEY_ID": s3_server.access_key,
                "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
                "BATCHSVC_BUCKET": bucket,
            }
        )
    )
    made.ensure_bucket()
    return made


def upload(store: ObjectStore, key: str, writer: str) -> tuple[str, list[str], int]:
    data = [b"x" * MIN_PART_BYTES, b"tail"]
    upload_id = store.start_multipart(key, writer=writer)
    etags = [store.upload_part(key, upload_id, number, part) for number, part in enumerate(data, start=1)]
    return upload_id, etags, sum(map(len, data))


def test_a_write_with_a_writer_never_replaces_another(store: ObjectStore) -> None:
    etag = store.put("k", b"one", writer="a")
    assert store.put("k", b"one", writer="a") == etag, "the same write again is no error"
    with pytest.raises(OtherVersionError):
        store.put("k", b"two", writer="b")
    upload_id, etags, size = upload(store, "k", "c")
    with pytest.raises(OtherVersionError):
        store.complete_multipart("k", upload_id, etags, writer="c", size_bytes=size)
    info = store.head("k")
    assert info is not None and (info.writer, info.size_bytes) == ("a", 3)


@pytest.mark.parametrize("doubt", DOUBTS, ids=lambda rule: f"{rule.effect} {rule.status}")
def test_what_was_done_is_done_whatever_was_said(store: ObjectStore, proxy: S3Proxy, doubt: Rule) -> None:
    upload_id, etags, size = upload(store, "big", "w")
    proxy.rules = [Rule(**{name: getattr(doubt, name) for name in ("effect", "methods", "status", "code", "times")})]
    etag = store.complete_multipart("big", upload_id, etags, writer="w", size_bytes=size)
    info = store.head("big")
    assert info is not None and (info.etag, info.size_bytes) == (etag, size)
    assert proxy.rules[0].num_hits >= 1
    if doubt.status != 200:  # a PUT has no body that could tell of an error
        proxy.rules[0].num_hits = 0
        assert store.put("small", b"data", writer="w") == store.put("small", b"data", writer="w")
        assert proxy.rules[0].num_hits >= 1


def test_what_was_not_done_is_an_error(store: ObjectStore, proxy: S3Proxy) -> None:
    upload_id, etags, size = upload(store, "big", "w")
    proxy.rules = [Rule(effect="answer", methods="PUT POST", status=200, code="InternalError")]
    with pytest.raises(UnavailableError):
        store.complete_multipart("big", upload_id, etags, writer="w", size_bytes=size)
    proxy.rules = []
    assert store.head("big") is None
    store.complete_multipart("big", upload_id, etags, writer="w", size_bytes=size)
    store.abort_multipart("big", upload_id)
    with pytest.raises((NotFoundError, OtherVersionError)):
        store.complete_multipart("big", upload_id, etags, writer="somebody else", size_bytes=size)


def test_a_conflict_is_tried_again_and_ends_an_upload(store: ObjectStore, proxy: S3Proxy) -> None:
    upload_id, etags, size = upload(store, "big", "w")
    conflict = Rule(effect="answer", methods="PUT POST", status=409, code="ConditionalRequestConflict", times=3)
    proxy.rules = [conflict]
    assert store.put("small", b"data", writer="w")
    assert conflict.num_hits == 3
    conflict.times = None
    with pytest.raises(BusyError):
        store.put("other", b"data", writer="w")
    with pytest.raises(BusyError):
        store.complete_multipart("big", upload_id, etags, writer="w", size_bytes=size)


def test_a_bucket_that_is_gone_is_no_lost_object(store: ObjectStore, s3_server: S3Server) -> None:
    elsewhere = ObjectStore(
        Settings.from_env(
            {
                "DATABASE_URL": "sqlite:///unused.sqlite3",
                "REDIS_URL": "redis://unused",
                "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
                "AWS_ACCESS_KEY_ID": s3_server.access_key,
                "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
                "BATCHSVC_BUCKET": "never-made",
            }
        )
    )
    with pytest.raises(UnavailableError):
        elsewhere.get("x")
    with pytest.raises(NotFoundError):
        store.get("x")
