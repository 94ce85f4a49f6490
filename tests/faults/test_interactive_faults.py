"""Rows 78 to 84: interactive calls whose worker, API or Redis is killed, stopped or lied to.

Every call ends in bounded time, whole or with an error; what isn't whole isn't billed; and batches go on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil
import pytest
import redis
from sqlalchemy import func, select

from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, UsageRow
from batchsvc.interactive import wire
from tests.faults.cluster import MODEL, Cluster, Process
from tests.faults.judge import judge
from tests.faults.own_valkey import OwnValkey

pytestmark = pytest.mark.faults
BAD_CALL = orjson.dumps(
    {"id": "c", "api": "a", "prompt_ids": [1], "params": [], "seed": 1, "salt": "s", "streams": True}
)
JUNK = (b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"id": 1}', b'["grown"]', b'["taken", 1, 2]', b"[" * 99, BAD_CALL)


@dataclass
class Call:
    """One call on a thread of its own, read as it comes."""

    url: str
    key: str
    body: dict[str, Any]
    status: int = 0
    retry_after: str | None = None
    text: str = ""
    error: str | None = None
    is_broken: bool = False  # the connection was cut
    num_events: int = 0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def refusal(self) -> tuple[int, str | None, str | None]:
        """Status, when to try again, and code."""
        return self.status, self.retry_after, self.error

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.error is None and not self.is_broken

    def wait(self, timeout_s: float = 60) -> None:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the call hangs"

    def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        is_done = not self.body.get("stream")
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/chat/completions", json=self.body, headers=headers, timeout=120, trust_env=False
            ) as answer:
                self.status, self.retry_after = answer.status_code, answer.headers.get("retry-after")
                if self.status != 200 or is_done:
                    self._read(orjson.loads(answer.read()))
                else:
                    for line in answer.iter_lines():
                        is_done = is_done or line == "data: [DONE]"
                        if line.startswith("data: {"):
                            self.num_events += 1
                            self._read(orjson.loads(line.removeprefix("data: ")))
        except httpx.HTTPError:
            self.is_broken = True
        self.is_broken = self.is_broken or (self.status == 200 and self.error is None and not is_done)

    def _read(self, said: dict[str, Any]) -> None:
        if "error" in said:
            self.error = said["error"]["code"]
        for choice in said.get("choices", ()):
            self.text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def start_call(cluster: Cluster, *, tokens: int = 400, stream: bool = True, **body: Any) -> Call:
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    return Call(cluster.url, cluster.key, asked | body)


def takes_calls(cluster: Cluster) -> bool:
    call = start_call(cluster, tokens=1, stream=False)
    call.wait()
    return call.is_whole


def num_billed(cluster: Cluster) -> int:
    """How many calls are in the books, the same in usage and ledger."""
    with cluster.db.reading() as session:
        used = session.scalar(select(func.count()).select_from(UsageRow).where(UsageRow.batch_id == ""))
        posted = session.scalar(
            select(func.count()).select_from(LedgerTransaction).where(LedgerTransaction.kind == "call")
        )
        total = session.scalar(select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0)))
    assert used == posted and total == 0
    return int(used or 0)


def told(cluster: Cluster) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in cluster.witness.read_bytes().split(b"\n")[:-1]]


def num_ended(cluster: Cluster) -> int:
    """How many calls an engine has ended, by itself or because it was told to."""
    return sum(entry["event"] == "end" and entry["id"].startswith("call_") for entry in told(cluster))


def tokens_of_calls(cluster: Cluster) -> Counter[str]:
    """What engines have generated for each call."""
    found: Counter[str] = Counter()
    for entry in told(cluster):
        found.update({name: n for name, n in entry.get("tokens", {}).items() if name.startswith("call_")})
    return found


def at_work(cluster: Cluster, **changes: Any) -> Process:
    """An API and a worker that takes calls and says 100 tokens a second."""
    cluster.serve()
    worker = cluster.start("engine", **({"BATCHSVC_FAKE_TOKENS_PER_S": 100} | changes))
    cluster.until(lambda: takes_calls(cluster), "calls are answered")
    return worker


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[OwnValkey]:
    server = OwnValkey(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def lonely(cluster: Cluster, valkey: OwnValkey) -> Iterator[Cluster]:
    """A cluster with that Valkey to itself."""
    with closing(cluster.with_services(redis_url=valkey.url)) as own:
        yield own
        own.show_logs()


@pytest.mark.quick_faults
def test_row_78_the_worker_is_killed_in_the_middle_of_calls(cluster: Cluster) -> None:
    worker = at_work(cluster)
    billed = num_billed(cluster)
    streamed, whole = start_call(cluster), start_call(cluster, stream=False)
    cluster.until(lambda: streamed.num_events > 3, "text comes")
    worker.kill()
    for call in (streamed, whole):
        call.wait()
        assert call.error == "worker_lost"
    assert streamed.status == 200 and whole.refusal == (503, "5", "worker_lost")
    assert num_billed(cluster) == billed, "what was lost costs nothing"
    refused = start_call(cluster, tokens=1)
    refused.wait()
    assert refused.refusal == (503, "5", "no_worker")
    cluster.start("engine")
    cluster.until(lambda: takes_calls(cluster), "another worker takes calls")


def test_row_79_the_api_is_killed_in_the_middle_of_calls(cluster: Cluster) -> None:
    at_work(cluster, BATCHSVC_FAKE_TOKENS_PER_S=30)
    (api,) = cluster.alive("api")
    billed, ends = num_billed(cluster), num_ended(cluster)
    call = start_call(cluster, tokens=450)
    cluster.until(lambda: call.num_events > 3, "text comes")
    api.kill()
    call.wait()
    assert call.is_broken
    cluster.until(lambda: num_ended(cluster) > ends, "the worker gives it up", timeout_s=60)
    assert max(tokens_of_calls(cluster).values()) < 450, "before it was whole"
    cluster.serve()
    cluster.until(lambda: takes_calls(cluster), "another API passes calls on")
    assert num_billed(cluster) == billed + 1, "the last one, and not the one that was cut"


def test_row_80_redis_is_killed_in_the_middle_of_calls(lonely: Cluster, valkey: OwnValkey) -> None:
    at_work(lonely)
    lonely.start("control")
    billed = num_billed(lonely)
    call = start_call(lonely)
    lonely.until(lambda: call.num_events > 3, "text comes")
    job = lonely.submit(40)
    valkey.kill()
    call.wait()
    assert call.error == "worker_lost"
    refused = start_call(lonely, tokens=1)
    refused.wait()
    assert refused.refusal == (503, "5", "queue_unavailable")
    lonely.wait(job, "completed")  # batches need no Redis
    assert num_billed(lonely) == billed
    valkey.start()
    lonely.until(lambda: takes_calls(lonely), "calls go on")
    judge(lonely, job)


def test_row_81_redis_is_wiped_again_and_again(cluster: Cluster) -> None:
    at_work(cluster, BATCHSVC_FAKE_TOKENS_PER_S=400)
    billed, calls = num_billed(cluster), []
    for _ in range(12):
        calls += [start_call(cluster, tokens=cluster.rng.randint(1, 200), stream=cluster.rng.random() < 0.5)]
        time.sleep(cluster.rng.uniform(0.05, 0.3))
        cluster.wipe_redis()
    for call in calls:
        call.wait()
        assert call.is_whole or call.error in ("worker_lost", "no_worker"), (call.status, call.error)
    assert num_billed(cluster) == billed + sum(call.is_whole for call in calls)
    cluster.until(lambda: takes_calls(cluster), "calls go on")


def test_row_82_a_worker_that_stands_still_is_missed_and_comes_back(cluster: Cluster) -> None:
    worker = at_work(cluster)
    billed = num_billed(cluster)
    call = start_call(cluster, tokens=450)
    cluster.until(lambda: call.num_events > 3, "text comes")
    cluster.stop(worker)
    call.wait()
    assert call.error == "worker_lost"
    worker.resume()
    cluster.until(lambda: takes_calls(cluster), "it takes calls again")
    assert num_billed(cluster) == billed + 1


def test_row_83_messages_that_nobody_sent_harm_nobody(cluster: Cluster) -> None:
    worker = at_work(cluster)
    with redis.Redis.from_url(cluster.services.redis_url) as client:
        calls = wire.calls_of(cluster.model.digest)
        news = [name.decode() for name in client.keys(wire.news_of("*"))]
        assert len(news) == 1
        for junk in JUNK:
            client.xadd(calls, {wire.FIELD: junk})
            client.xadd(news[0], {wire.FIELD: junk})
        client.xadd(calls, {b"other": b"field"})
        client.xadd(news[0], {b"other": b"field"})
        client.delete(wire.ready_of(cluster.model.digest))
    cluster.until(lambda: takes_calls(cluster), "calls go on")
    assert worker.is_alive and len(cluster.alive("api")) == 1


async def _knock(
    cluster: Cluster, count: int, measure: Callable[[], int]
) -> tuple[Counter[tuple[int, str | None, str | None]], int]:
    """How so many calls are refused, on a connection each, all open before any is sent; and the most measured."""
    port = int(cluster.url.rpartition(":")[2])
    data = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {cluster.key}\r\n"
    sent = f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in opened:
        writer.write(sent)
    found: Counter[tuple[int, str | None, str | None]] = Counter()
    most = measure()
    for number, (reader, writer) in enumerate(opened):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        said = orjson.loads(await reader.readexactly(int(headers["content-length"])))
        found[int(first.split()[1]), headers.get("retry-after"), said.get("error", {}).get("code")] += 1
        most = max(most, measure()) if number % 20 == 0 else most
        writer.close()
    return found, most


def test_row_84_a_thousand_connections_at_once(cluster: Cluster) -> None:
    """All are told to come back, because a few have the slots, and the memory stays what it was."""
    api = cluster.serve(BATCHSVC_INTERACTIVE_MAX=16)
    worker = cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=20, BATCHSVC_MAX_RUNNING=16)
    cluster.until(lambda: takes_calls(cluster), "calls are answered")
    inside = [start_call(cluster, tokens=450) for _ in range(16)]
    cluster.until(lambda: all(call.num_events for call in inside), "all slots are in use")
    process = psutil.Process(api.pid)
    before = process.memory_info().rss
    refused, most = asyncio.run(_knock(cluster, 1_000, lambda: process.memory_info().rss))
    assert refused == {(429, "1", "too_many_calls"): 1_000}
    assert most - before < 64 * 2**20, f"{(most - before) / 2**20:.0f} MiB more"
    worker.kill()
    for call in inside:
        call.wait()
        assert call.error == "worker_lost", "none of them had ended before"
    refused, _ = asyncio.run(_knock(cluster, 8, lambda: 0))
    assert refused == {(503, "5", "no_worker"): 8}, "with all workers gone each is told to come back"
    cluster.start("engine")
    cluster.until(lambda: takes_calls(cluster), "the slots are free again")
