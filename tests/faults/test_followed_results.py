"""A reader who follows results through the API while everything under it is killed, damaged and started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import orjson
import pytest

from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]


class Reader(threading.Thread):
    """Asks, takes whole lines, and goes on behind the last one, whatever breaks off."""

    def __init__(self, cluster: Cluster, job: Job, order: str) -> None:
        super().__init__(daemon=True)
        self.numbers: list[int] = []
        self._cluster, self._job, self._order = cluster, job, order
        self.start()

    def run(self) -> None:
        headers, after, status = {"Authorization": f"Bearer {self._cluster.key}"}, "", ""
        while True:
            count = len(self.numbers)
            params = {"order": self._order, "limit": 17} | ({"after": after} if after else {})
            try:
                with self._cluster.http.stream(
                    "GET", f"{self._cluster.url}/v1/batches/{self._job.id}/results", params=params, headers=headers
                ) as answer:
                    status = answer.headers.get("x-batch-status", "") if answer.status_code == 200 else ""
                    rest = b""
                    for chunk in answer.iter_bytes() if answer.status_code == 200 else ():
                        *whole, rest = (rest + chunk).split(b"\n")
                        for line in map(orjson.loads, whole):
                            self.numbers.append(line["line"])
                            after = line["cursor"]
            except httpx.HTTPError:
                status = ""
            if len(self.numbers) == count:
                if status in ("completed", "cancelled", "expired"):
                    return
                time.sleep(0.1)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_a_reader_gets_each_line_once(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=300)
    job = cluster.submit(200, max_tokens=8)
    readers = [Reader(cluster, job, order) for order in ("completion", "input")]
    for share in (20, 60, 100, 140):
        cluster.until(lambda share=share: cluster.num_done(job) >= share, f"{share} lines")
        cluster.alive("engine")[0].kill()
        cluster.alive("api")[0].kill()
        cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=300)
        cluster.serve()
        if share == 60:
            cluster.store.delete([cluster.parts(job)[0].s3_key])  # some reader has its lines, or not
    cluster.wait(job, "completed")
    for reader in readers:
        reader.join(60)
        assert not reader.is_alive()
        assert sorted(reader.numbers) == list(range(1, 201)), "each line once, none lost"
    assert readers[1].numbers == list(range(1, 201))
    judge(job, counts_may_fall=True)
