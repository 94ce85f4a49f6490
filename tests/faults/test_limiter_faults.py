"""Row 67: the store of the rate limiter is lost in a burst. Each API process keeps the limit, and no call fails. And
what one API process knows of a key, the other knows too."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from batchsvc.accounts import service as accounts
from tests.faults.cluster import Cluster
from tests.faults.own_valkey import OwnValkey
from tests.faults.proxy import FaultProxy

pytestmark = pytest.mark.faults
LIMIT = 60


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[OwnValkey]:
    server = OwnValkey(tmp_path)
    server.start()
    yield server
    server.kill()


class Burst:
    """Calls of one key to two API processes, as many as are asked for, side by side."""

    def __init__(self, cluster: Cluster, urls: list[str]) -> None:
        self.passed: Counter[str] = Counter()
        self.began_s = time.monotonic()
        self._cluster, self._urls = cluster, urls

    def __call__(self, key: str, count: int) -> Counter[int]:
        """Statuses of so many calls to each process."""

        def call(url: str) -> int:
            answer = self._cluster.http.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            self.passed[url] += answer.status_code == 200
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1 and answer.headers["x-ratelimit-limit-requests"]
            return answer.status_code

        with ThreadPoolExecutor(8) as pool:
            return Counter(pool.map(call, self._urls * count))

    @property
    def refilled(self) -> int:
        """Requests that a full minute's bucket has gained since the burst began."""
        return int((time.monotonic() - self.began_s) * LIMIT / 60) + 1


def _kill(valkey: OwnValkey, _proxy: FaultProxy) -> None:
    valkey.kill()


def _make_deaf(_valkey: OwnValkey, proxy: FaultProxy) -> None:
    proxy.black_hole()


@pytest.mark.parametrize(
    "lose", [pytest.param(_kill, marks=pytest.mark.quick_faults), pytest.param(_make_deaf)], ids=["killed", "deaf"]
)
def test_row_67_the_limiter_loses_its_store(
    cluster: Cluster, valkey: OwnValkey, lose: Callable[[OwnValkey, FaultProxy], None]
) -> None:
    host, port = "127.0.0.1", int(valkey.url.rpartition(":")[2].partition("/")[0])
    with FaultProxy((host, port)) as proxy:
        urls = []
        for _ in range(2):
            url = valkey.url.replace(f":{port}/", f":{proxy.port}/")
            cluster.serve(REDIS_URL=url, BATCHSVC_REQUESTS_PER_MINUTE=LIMIT)
            urls.append(cluster.url)
        burst = Burst(cluster, urls)
        assert burst(cluster.key, 20) == {200: 40}
        assert burst(cluster.key, 20)[200] <= 20 + burst.refilled, "both count in one bucket"
        lose(valkey, proxy)
        said = burst(cluster.key, 60)
        assert set(said) <= {200, 429}, f"no call fails: {said}"
        for url in urls:
            assert burst.passed[url] <= LIMIT + burst.refilled, "a process has the limit, not none"
        proxy.heal()
        if lose is _kill:
            valkey.start()
        _, fresh = cluster.add_project("after")
        cluster.until(lambda: _is_shared(cluster, urls), "both count in one bucket again")
        burst = Burst(cluster, urls)
        assert burst(fresh, 50)[200] <= LIMIT + burst.refilled
    assert "Traceback" not in "".join(process.text() for process in cluster.processes)


@pytest.mark.quick_faults
def test_a_key_that_one_process_revokes_is_refused_by_the_other_from_its_next_call_on(cluster: Cluster) -> None:
    urls = []
    for _ in range(2):
        cluster.serve()
        urls.append(cluster.url)
    project_id, key = cluster.add_project("leaver")
    with cluster.db.transaction() as session:
        key_id = accounts.list_keys(session, project_id)[0].id
        _, admin = accounts.create_key(session, cluster.project_id, "boss", is_admin=True)
    cluster.secrets.append(admin)

    def status(method: str, url: str, secret: str) -> int:
        return cluster.http.request(method, url, headers={"Authorization": f"Bearer {secret}"}).status_code

    assert [status("GET", f"{url}/v1/models", key) for url in urls * 2] == [200] * 4, "both know it well"
    assert status("DELETE", f"{urls[0]}/v1/admin/keys/{key_id}", admin) == 200
    assert [status("GET", f"{url}/v1/models", key) for url in (urls[1], urls[0])] == [401, 401]


def _is_shared(cluster: Cluster, urls: list[str]) -> bool:
    """Whether what a new key asks of one process is seen by the other."""
    _, key = cluster.add_project("look")
    headers = {"Authorization": f"Bearer {key}"}
    left = [
        int(httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).headers["x-ratelimit-remaining-requests"])
        for url in urls
    ]
    return left == [LIMIT - 1, LIMIT - 2]
