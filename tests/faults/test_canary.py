"""Deleted content is gone: words that stood in prompts, custom_ids, answers, metadata and names of files are nowhere
in bucket, database, Redis or logs once the grace is over; what was counted and billed is still there, and adds up."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
import zstandard
from sqlalchemy import select, text, update

from batchsvc.batches.reconcile_run import Auditor
from batchsvc.batches.tables import Batch
from batchsvc.billing.tables import LedgerEntry, UsageRow
from batchsvc.errors import NotFoundError
from batchsvc.files.tables import File, Purge, Upload
from batchsvc.store import keys
from batchsvc.tables import metadata
from tests.faults.cluster import MODEL, Cluster

pytestmark = pytest.mark.faults
CHAT = "/v1/chat/completions"
KINDS = ("prompt", "custom_id", "answer", "metadata", "filename", "parameter", "twice", "piece")
COUNTED = (
    "id",
    "status",
    "total",
    "completed",
    "failed",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_nanos",
)
SOON = {"BATCHSVC_LEASE_S": 2, "BATCHSVC_RETENTION_GRACE": 9}


class Canaries:
    """One word a kind of place, so that a find tells where it came from."""

    def __init__(self) -> None:
        self.words = {kind: f"canary{kind.replace('_', '')}{secrets.token_hex(6)}" for kind in KINDS}

    def __getitem__(self, kind: str) -> str:
        return self.words[kind]

    def within(self, data: bytes) -> set[str]:
        return {kind for kind, word in self.words.items() if word.encode() in data}


def requests(canaries: Canaries, first: int, count: int) -> list[dict[str, Any]]:
    """Requests that must answer with a canary."""
    schema = {"type": "object", "properties": {"a": {"const": canaries["answer"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}}
    return [
        {
            "custom_id": f"{canaries['custom_id']}-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": MODEL,
                "messages": [
                    {
                        "role": "user",
                        "content": f"Number {number} is what I ask for.\n{canaries['prompt']} stays the same.",
                    }
                ],
                "max_tokens": 200,
                "temperature": 0,
                "response_format": form,
            },
        }
        for number in range(first, first + count)
    ]


def upload(cluster: Cluster, lines: list[dict[str, Any]], name: str) -> str:
    data = b"\n".join(orjson.dumps(line) for line in lines) + b"\n"
    form = {"files": {"file": (f"{name}.jsonl", data)}, "data": {"purpose": "batch"}}
    return str(_ok(cluster.call("POST", "/v1/files", **form))["id"])


def _ok(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


# ---- where words could be


def bucket_texts(cluster: Cluster) -> Iterator[bytes]:
    for key, _ in cluster.store.list_keys(""):
        yield key.encode()
        try:
            data = cluster.store.get(key)
        except NotFoundError:  # what has ended is taken away meanwhile
            continue
        yield data
        with contextlib.suppress(zstandard.ZstdError):
            yield zstandard.ZstdDecompressor().decompressobj().decompress(data)


def database_texts(cluster: Cluster) -> Iterator[bytes]:
    with cluster.db.reading() as session:
        for table in metadata.sorted_tables:
            for row in session.execute(text(f"SELECT * FROM {table.name}")):
                yield repr(tuple(row)).encode()
    if cluster.db.is_sqlite:
        path = Path(cluster.settings.database_url.removeprefix("sqlite:///"))
        for end in ("", "-wal"):
            log = path.with_name(path.name + end)
            yield log.read_bytes() if log.exists() else b""


def redis_texts(cluster: Cluster) -> Iterator[bytes]:
    with redis.Redis.from_url(cluster.services.redis_url) as client:
        for key in client.scan_iter("*"):
            kind = client.type(key)
            read = {
                b"string": lambda key=key: client.get(key),
                b"list": lambda key=key: client.lrange(key, 0, -1),
                b"hash": lambda key=key: client.hgetall(key),
                b"set": lambda key=key: client.smembers(key),
                b"zset": lambda key=key: client.zrange(key, 0, -1, withscores=True),
                b"stream": lambda key=key: client.xrange(key),
            }[kind]
            yield key + repr(read()).encode()


def log_texts(cluster: Cluster) -> Iterator[bytes]:
    for process in cluster.processes:
        yield process.text().encode()


def found(canaries: Canaries, texts: Iterator[bytes]) -> set[str]:
    return set[str]().union(*(canaries.within(data) for data in texts))


# ---- what has to stay


def counted(cluster: Cluster) -> dict[str, Any]:
    with cluster.db.reading() as session:
        batches = {row.id: [getattr(row, name) for name in COUNTED] for row in session.scalars(select(Batch))}
        usage = sorted((row.part_id, row.output_tokens, row.cost_nanos) for row in session.scalars(select(UsageRow)))
        ledger = sorted((row.account, row.amount_nanos) for row in session.scalars(select(LedgerEntry)))
        sizes = {row.id: row.size_bytes for row in session.scalars(select(File))}
    return {"batches": batches, "usage": usage, "ledger": ledger, "sizes": sizes}


def is_purged(cluster: Cluster) -> bool:
    with cluster.db.reading() as session:
        return not session.scalars(select(Purge.subject_id).where(Purge.purged_ms.is_(None)).limit(1)).all()


@pytest.mark.parametrize(
    "database_url", [pytest.param("sqlite", marks=pytest.mark.quick_faults), "postgresql"], indirect=True
)
def test_no_word_of_deleted_content_is_left_anywhere(cluster: Cluster) -> None:
    canaries = Canaries()
    cluster.env |= {name: str(value) for name, value in SOON.items()}
    cluster.serve()
    control = cluster.start("control")
    cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=0)

    # a batch of an uploaded file, with lines that can't be run, and a quote of the same file
    lines = requests(canaries, 1, 30)
    lines[7]["body"]["reasoning_effort"] = canaries["parameter"]
    lines[8]["body"]["temperature"] = canaries["parameter"]
    file_id = upload(cluster, lines, canaries["filename"])
    quoted = {"input_file_id": file_id, "on_invalid": "skip"}
    quote_id = str(_ok(cluster.call("POST", "/v1/batches/quote", json=quoted))["id"])
    labels = {"metadata": {"who": canaries["metadata"]}, "name": canaries["metadata"], "on_invalid": "skip"}
    named = {"headers": {"Idempotency-Key": "night-1"}}
    uploaded = str(_ok(cluster.create(file_id, **labels, **named))["id"])
    # one that comes in its call, one of Anthropic's, and one that is refused, with the reasons kept
    inline_body = {"requests": requests(canaries, 1, 6), "endpoint": CHAT, "completion_window": "24h", **labels}
    inline = str(_ok(cluster.call("POST", "/v1/batches", json=inline_body))["id"])
    params = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": canaries["prompt"]}]}
    asked = [{"custom_id": canaries["custom_id"], "params": params}]
    messages = str(_ok(cluster.call("POST", "/v1/messages/batches", json={"requests": asked}))["id"])
    twice = [line | {"custom_id": canaries["twice"]} for line in requests(canaries, 1, 2)]
    refused = str(_ok(cluster.create(upload(cluster, twice, canaries["filename"])))["id"])
    # a file that came in parts, and an upload that nobody completes
    begun = {"bytes": 99, "filename": f"{canaries['filename']}.jsonl", "mime_type": "", "purpose": "batch"}
    in_parts = begun | {"bytes": len(canaries["piece"])}
    whole_id = str(_ok(cluster.call("POST", "/v1/uploads", json=in_parts))["id"])
    piece = {"files": {"data": ("p", canaries["piece"].encode())}}
    part_id = str(_ok(cluster.call("POST", f"/v1/uploads/{whole_id}/parts", **piece))["id"])
    joined = _ok(cluster.call("POST", f"/v1/uploads/{whole_id}/complete", json={"part_ids": [part_id]}))["file"]["id"]
    upload_id = str(_ok(cluster.call("POST", "/v1/uploads", json=begun))["id"])
    _ok(cluster.call("POST", f"/v1/uploads/{upload_id}/parts", **piece))
    cluster.store.put(
        keys.upload_part(cluster.project_id, upload_id, "upart_of_a_dead_api"), canaries["piece"].encode()
    )
    cluster.store.start_multipart(keys.upload_part(cluster.project_id, upload_id, "upart_half"))

    batch_ids = (uploaded, inline, messages, refused)
    cluster.until(lambda: all(cluster.batch(one).ended_ms for one in batch_ids), "all batches have ended")
    cluster.until(lambda: _quote(cluster, quote_id)["status"] != "queued", "the quote is planned")
    assert [cluster.batch(one).status for one in batch_ids] == ["completed", "completed", "completed", "failed"]
    batch = cluster.batch(uploaded)
    assert batch.failed >= 1 and batch.completed >= 28 and batch.cost_nanos > 0

    # the search finds what is there
    assert found(canaries, bucket_texts(cluster)) >= {"prompt", "custom_id", "answer", "piece", "twice"}
    assert found(canaries, database_texts(cluster)) >= {"metadata", "filename", "prompt", "twice"}
    before = counted(cluster)

    for batch_id in (uploaded, inline, refused):
        _ok(cluster.call("DELETE", f"/v1/batches/{batch_id}?input=true"))
    _ok(cluster.call("DELETE", f"/v1/messages/batches/{messages}"))
    _ok(cluster.call("DELETE", f"/v1/files/{joined}"))
    control.kill()  # in the middle of whatever it does
    with cluster.db.transaction() as session:
        session.execute(update(Upload).where(Upload.id == upload_id).values(expires_ms=1))
    cluster.start("control")
    cluster.until(lambda: _status(cluster, upload_id) == "expired" and is_purged(cluster), "all is wiped")
    with cluster.db.reading() as session:
        assert len(session.scalars(select(Purge.subject_id)).all()) >= 10, "each thing has its purge"
    cluster.until(lambda: not found(canaries, database_texts(cluster)), "SQLite's log is cut off too", 20)

    for where in (bucket_texts, database_texts, redis_texts, log_texts):
        assert not found(canaries, where(cluster)), where.__name__
    assert {key for key, _ in cluster.store.list_keys("") if key != keys.PROBE} == set(), "nor what can't be read"
    assert list(cluster.store.list_uploads("")) == []
    assert counted(cluster) == before
    with contextlib.closing(Auditor(cluster.settings.database_url, cluster.store)) as auditor:
        report = auditor.everything()
    assert report.num_differences == 0, report.differences
    assert sum("was deleted on" in note for note in report.notes) >= 3
    told = _ok(cluster.call("GET", f"/v1/batches/{uploaded}/explanation"))
    assert told["cost_nanos"] == batch.cost_nanos and "The batch was deleted on" in told["gone"][0]
    again = _ok(cluster.create(file_id, **labels, **named))
    assert (again["id"], again["metadata"]) == (uploaded, None), "a call that comes again begins nothing"


def _quote(cluster: Cluster, quote_id: str) -> dict[str, Any]:
    return _ok(cluster.call("GET", f"/v1/batches/quote/{quote_id}"))


def _status(cluster: Cluster, upload_id: str) -> str:
    with cluster.db.reading() as session:
        return session.get_one(Upload, upload_id).status
