"""Row 76: a backup is made while workers work, and restored elsewhere; the batch goes on, what is missing is found."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from batchsvc.backup.making import HOLD_S
from batchsvc.backup.vault import Vault
from batchsvc.batches import collection_queries
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.db.session import database_now_ms
from tests import servers
from tests.faults import judge as judging
from tests.faults.cluster import LIVENESS_S, Cluster, Job
from tests.faults.judge import Verdict

Judge = Callable[..., Verdict]
pytestmark = pytest.mark.faults
LINES = 200
_MAIN = [sys.executable, "-P", "-c", "from batchsvc.cli import main; main()"]


def batchsvc(cluster: Cluster, *words: object, code: int = 0) -> str:
    """A command of an operator, in a process of its own. Returns what it printed."""
    env = {**os.environ, **cluster.env}
    done = subprocess.run(
        [*_MAIN, *map(str, words)], env=env, capture_output=True, text=True, timeout=LIVENESS_S, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def elsewhere(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Path], Cluster]]:
    """Restores a backup into a fresh database and a fresh bucket, and gives the cluster there."""
    with ExitStack() as stack:

        def restore(source: Path) -> Cluster:
            if cluster.db.is_sqlite:
                url = f"sqlite:///{tmp_path / secrets.token_hex(4)}.sqlite3"
            else:
                url = stack.enter_context(servers.fresh_database(request.getfixturevalue("postgres_url")))
            bucket = "t" + secrets.token_hex(8)
            env = {"DATABASE_URL": url, "BATCHSVC_BUCKET": bucket}
            cluster.env |= env
            said = json.loads(batchsvc(cluster, "restore", source, "--from-env", "--json"))
            assert said["unfinished_batches"] >= 1
            cluster.wipe_redis()
            made = cluster.with_services(database_url=url, bucket=bucket)
            stack.callback(made.store._client.delete_bucket, Bucket=bucket)
            stack.callback(made.close)
            made.key, made.project_id = cluster.key, cluster.project_id
            return made

        yield restore


def adopt(there: Cluster, job: Job) -> Job:
    """A batch of the backup, in the cluster that was restored from it."""
    return there.adopt(job.id, job.lines, job.canary)


@pytest.mark.parametrize(
    "database_url", [pytest.param("sqlite", marks=pytest.mark.quick_faults), "postgresql"], indirect=True
)
def test_row_76_a_backup_in_mid_batch_is_finished_elsewhere(
    cluster: Cluster, judge: Judge, elsewhere: Callable[[Path], Cluster], tmp_path: Path
) -> None:
    cluster.start("control")
    workers = [cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=40) for _ in range(2)]  # slower than a command
    job = cluster.submit(LINES)
    cluster.until(lambda: cluster.num_done(job) > LINES // 10, "some of it is done")
    said = json.loads(batchsvc(cluster, "backup", tmp_path / "b", "--from-env", "--json"))
    assert said["num_missing"] == 0
    assert all(worker.is_alive for worker in workers), "nobody is held up"
    cluster.start("engine")
    cluster.wait(job, "completed")
    judge(job)
    for process in cluster.alive():
        process.kill()
    there = elsewhere(tmp_path / "b")
    moved = adopt(there, job)
    before = there.num_done(moved)
    assert LINES // 10 < before < LINES, "it is as it was at the backup"
    assert not any(unit.crash_count for unit in there.units(moved)), "nobody's engine has crashed"
    there.start("control")
    there.start("engine")
    there.wait(moved, "completed")
    verdict = judging.judge(there, moved, history_was_lost=True)
    assert len(verdict.output) == LINES
    assert sum(verdict.runs.values()) == LINES - before, "what counted isn't run again"
    auditor = Auditor(there.settings.database_url, there.store)
    report = auditor.everything()
    auditor.close()
    assert not report.num_differences, [str(difference) for difference in report.differences]


def test_row_76_what_the_store_had_lost_is_said_and_run_again(
    cluster: Cluster, elsewhere: Callable[[Path], Cluster], tmp_path: Path
) -> None:
    cluster.start("control")
    engine = cluster.start("engine")
    job = cluster.submit(60)
    cluster.until(lambda: len(cluster.parts(job)) > 2, "parts count")
    engine.kill()
    lost = cluster.parts(job)[0]
    cluster.store.delete([lost.s3_key])
    told = batchsvc(cluster, "backup", tmp_path / "b", "--from-env", code=1)
    assert f"had lost 1 objects that the database names (the first: {lost.s3_key})" in told
    for process in cluster.alive():
        process.kill()
    there = elsewhere(tmp_path / "b")
    moved = adopt(there, job)
    there.start("control")
    there.start("engine")
    there.wait(moved, "completed")
    verdict = judging.judge(there, moved, history_was_lost=True, counts_may_fall=True)
    assert len(verdict.output) == 60


def test_row_76_a_backup_that_is_killed_holds_nothing_for_long(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start("control")
    engine = cluster.start("engine")
    job = cluster.submit(60)
    cluster.until(lambda: cluster.num_done(job) > 10, "there is something to copy")
    engine.kill()
    env = {**os.environ, **cluster.env}
    words = [*_MAIN, "backup", str(tmp_path / "b"), "--from-env"]
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    cluster.until(lambda: holds(cluster) or process.poll() is not None, "the collection is held")
    os.kill(process.pid, signal.SIGSTOP)
    held = holds(cluster)
    assert held, "it was stopped while it held the collection"
    process.kill()
    process.communicate()
    with cluster.db.reading() as session:
        left_ms = held[0].until_ms - database_now_ms(session)
    assert 0 < left_ms <= HOLD_S * 1000, "and it ends by itself"
    assert not Vault(tmp_path / "b").finished()
    refused = batchsvc(cluster, "restore", tmp_path / "b", "--from-env", code=1)
    assert "never finished" in refused
    assert json.loads(batchsvc(cluster, "backup", tmp_path / "b", "--from-env", "--json"))["num_missing"] == 0
    assert len(Vault(tmp_path / "b").finished()) == 1 and not Vault(tmp_path / "b").unfinished()
    assert not list((tmp_path / "b").glob(".*")), "nor is a copy of the database left"


def holds(cluster: Cluster) -> list[collection_queries.Hold]:
    with cluster.db.reading() as session:
        return collection_queries.holds(session)
