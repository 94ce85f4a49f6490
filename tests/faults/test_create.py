"""Rows 1 to 5: the API dies around a commit, and calls that arrive again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from sqlalchemy import func, select

from batchsvc.batches.tables import Batch
from batchsvc.files.tables import File
from batchsvc.store import keys
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]


def num_rows(cluster: Cluster, table: type[Batch] | type[File]) -> int:
    with cluster.db.reading() as session:
        return int(session.scalar(select(func.count()).select_from(table)) or 0)


def run_to_the_end(cluster: Cluster) -> None:
    for role in ("control", "engine"):
        if not cluster.alive(role):
            cluster.start(role)


@pytest.mark.quick_faults
def test_row_01_api_killed_after_the_last_byte_of_an_upload(cluster: Cluster, judge: Judge) -> None:
    lines = cluster.lines(20)
    api = cluster.serve(failpoints="file.stored=kill")
    with pytest.raises(httpx.HTTPError):
        cluster.upload(lines)
    api.died()
    assert len(list(cluster.store.list_keys(keys.INPUTS))) == 1
    assert num_rows(cluster, File) == 0
    cluster.serve()
    answer = cluster.create(cluster.upload(lines))
    assert num_rows(cluster, File) == 1
    assert len(list(cluster.store.list_keys(keys.INPUTS))) == 2, "one is an orphan, which the judge wants collected"
    job = cluster.adopt(answer.json()["id"], lines)
    run_to_the_end(cluster)
    cluster.wait(job, "completed")
    judge(job)


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "first-call"}, {"x-stainless-retry-count": "1"}])
@pytest.mark.parametrize("failpoint", ["batch.created", "batch.hinted"])
def test_row_02_api_killed_between_commit_and_answer(
    cluster: Cluster, judge: Judge, failpoint: str, headers: dict[str, str]
) -> None:
    lines = cluster.lines(20)
    cluster.serve()
    file_id = cluster.upload(lines)
    api = cluster.serve(failpoints=f"{failpoint}=kill")
    with pytest.raises(httpx.HTTPError):
        cluster.create(file_id, headers={**headers, "x-stainless-retry-count": "0"})
    api.died()
    cluster.serve()
    again = cluster.create(file_id, headers=headers)
    assert again.status_code == 200, again.text
    assert num_rows(cluster, Batch) == 1
    job = cluster.adopt(again.json()["id"], lines)
    run_to_the_end(cluster)
    cluster.wait(job, "completed")
    judge(job)


@pytest.mark.quick_faults
def test_row_03_api_killed_between_commit_and_hint(cluster: Cluster, judge: Judge) -> None:
    lines = cluster.lines(20)
    run_to_the_end(cluster)
    cluster.serve()
    file_id = cluster.upload(lines)
    api = cluster.serve(failpoints="batch.created=kill")
    with pytest.raises(httpx.HTTPError):
        cluster.create(file_id)
    api.died()
    with cluster.db.reading() as session:
        batch_id = session.scalars(select(Batch.id)).one()
    cluster.until(lambda: cluster.batch(batch_id).status == "completed", "the reaper starts what nobody asked for")
    cluster.serve()
    judge(cluster.adopt(batch_id, lines))


def test_row_04_one_key_for_two_calls(cluster: Cluster, judge: Judge) -> None:
    lines, key = cluster.lines(20), {"Idempotency-Key": "k1"}
    file_id = cluster.upload(lines)
    first = cluster.create(file_id, headers=key)
    job = cluster.adopt(first.json()["id"], lines)
    for other in ({"metadata": {"a": "b"}}, {"on_invalid": "skip"}, {"name": "x"}):
        refused = cluster.create(file_id, headers=key, **other)
        assert refused.status_code in (409, 422), refused.text
        assert "Idempotency-Key" in refused.json()["error"]["message"]
    assert num_rows(cluster, Batch) == 1
    assert cluster.create(file_id, headers=key).json()["id"] == job.id
    run_to_the_end(cluster)
    cluster.wait(job, "completed")
    later = cluster.create(file_id, headers=key)
    assert (later.status_code, later.json()["id"]) == (200, job.id), "the key still means the first call"
    judge(job)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_05_twenty_creates_at_once_with_one_key(cluster: Cluster, judge: Judge) -> None:
    lines = cluster.lines(20)
    file_id = cluster.upload(lines)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: cluster.create(file_id, headers={"Idempotency-Key": "same"}), range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1, "twenty equal answers"
    assert num_rows(cluster, Batch) == 1
    job = cluster.adopt(answers[0].json()["id"], lines)
    run_to_the_end(cluster)
    cluster.wait(job, "completed")
    judge(job)
