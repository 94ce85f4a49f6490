"""Rows 42, 52 and 53 on SQLite: a full disk, a writer that keeps the lock, a kill in the middle of the log."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from batchsvc.clock import monotonic_s
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict

Judge = Callable[..., Verdict]
pytestmark = pytest.mark.faults


def database_file(cluster: Cluster) -> Path:
    return Path(cluster.services.database_url.removeprefix("sqlite:///"))


def check_integrity(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_row_42_a_full_disk_under_sqlite(cluster: Cluster, judge: Judge, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.write_text("1000000")
    cluster.env["TEST_SQLITE_PAGES_FILE"] = str(pages)
    cluster.start("control")
    job = cluster.submit(600)
    engine = cluster.start("engine", BATCHSVC_FLUSH_S=0.1)
    cluster.until(lambda: cluster.num_done(job) > 0, "a part counts")
    pages.write_text("1")  # no page more than there are
    cluster.until(lambda: "part.not_written" in engine.text(), "no part fits")
    assert engine.is_alive
    pages.write_text("1000000")
    cluster.wait(job, "completed")
    check_integrity(database_file(cluster))
    assert len(judge(job).output) == 600


def test_row_52_a_writer_that_keeps_the_lock_for_ten_seconds(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    job = cluster.submit(300)
    workers = [cluster.start("engine") for _ in range(2)]
    cluster.until(lambda: cluster.num_done(job) > 20, "parts count")
    connection = sqlite3.connect(database_file(cluster), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    began, done = monotonic_s(), cluster.num_done(job)
    cluster.until(lambda: monotonic_s() - began > 10, "three leases")
    assert cluster.num_done(job) == done, "nobody else writes"
    connection.execute("ROLLBACK")
    connection.close()
    cluster.wait(job, "completed")
    assert all(worker.is_alive for worker in workers)
    assert len(judge(job).output) == 300


@pytest.mark.parametrize("log", ["kept", "lost"])
def test_row_53_killed_in_the_middle_of_the_log(cluster: Cluster, judge: Judge, log: str) -> None:
    """All processes at once, as when a machine goes down; with its log lost, the last commits are gone with it.

    WAL with synchronous=NORMAL promises the first after a crash of processes, and a consistent state after a crash of
    the machine: parts whose rows are gone become orphans, and their lines run again.
    """
    cluster.start("control")
    job = cluster.submit(300)
    for _ in range(2):
        cluster.start("engine")
    cluster.until(lambda: cluster.num_done(job) > 60, "parts count")
    moved = sqlite3.connect(database_file(cluster))
    moved.execute("PRAGMA wal_checkpoint(PASSIVE)")  # what is in the log up to here isn't only there
    moved.close()
    done = cluster.num_done(job)
    cluster.until(lambda: cluster.num_done(job) > done + 20, "and more parts, whose rows are only in the log")
    acknowledged = {part.id for part in cluster.parts(job)}
    cluster.db.dispose()  # or this test's own connections would keep the log alive
    for process in cluster.processes:
        process.kill()
    path = database_file(cluster)
    wal = path.with_name(path.name + "-wal")
    assert wal.exists() and wal.stat().st_size > 0, "there is a log to lose"
    if log == "lost":
        wal.unlink()
        path.with_name(path.name + "-shm").unlink()
    check_integrity(path)
    if log == "kept":
        assert acknowledged <= {part.id for part in cluster.parts(job)}, "what was acknowledged is there"
    cluster.url = ""  # the API is dead too
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine")
    cluster.wait(job, "completed")
    assert len(judge(job, history_was_lost=log == "lost").output) == 300
