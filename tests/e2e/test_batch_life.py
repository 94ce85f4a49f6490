"""A file through the whole service: results in input order, each line once, and a bill that is the sum of its lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import text

from batchsvc.db.session import Database, database_now_ms
from tests.e2e.conftest import BATCHSVC, Result, Stack, line, read_lines, wait_for, write_lines

Run = Callable[..., Result]


def test_results_come_in_input_order_and_the_bill_is_their_sum(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows: list[Any] = [line(i, stack.model) for i in range(12)]
    rows[3] = line(3, stack.model, temperature=-1)
    rows[7] = line(7, stack.model, messages=[{"role": "user", "content": "long " * 5000}])
    rows[9] = b'{"custom_id": "r9"'
    source = write_lines(tmp_path / "mixed.jsonl", rows)
    os.chdir(tmp_path)
    ran = stack_cli("run", source, "--skip-invalid")
    assert ran.code == 3, ran.err
    assert "12: 9 answered, 3 failed" in ran.out
    assert "at the batch price (at the standard price $" in ran.out
    results = read_lines(tmp_path / "mixed.results.jsonl")
    assert not list(tmp_path.glob("*.partial"))
    assert [row["line"] for row in results] == list(range(1, 13))
    assert [row["custom_id"] for row in results] == [None if i == 9 else f"r{i}" for i in range(12)]
    batch = stack_cli("list", "--limit", "1", "--json").json["data"][0]
    _check_bill(stack, batch, results)


def test_parquet_runs_like_jsonl(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows = [line(i, stack.model) for i in range(5)]
    columns = {"custom_id": [row["custom_id"] for row in rows], "body": [json.dumps(row["body"]) for row in rows]}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    ran = stack_cli("run", tmp_path / "in.parquet", "-o", tmp_path / "out.jsonl")
    assert ran.code == 0, ran.err
    assert [row["custom_id"] for row in read_lines(tmp_path / "out.jsonl")] == [row["custom_id"] for row in rows]


def test_a_killed_engine_worker_costs_nothing_but_time(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows = [line(i, stack.model, max_tokens=5 * (i + 1), ignore_eos=True) for i in range(40)]  # they end one by one
    source = write_lines(tmp_path / "in.jsonl", rows)
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--json", *stack.flags]
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    run = subprocess.Popen([*BATCHSVC, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with run:
        wait_for(lambda: _completed(stack_cli, rows) >= 5, "five finished lines")
        pid = _engine_pid(stack_cli)
        os.kill(pid, signal.SIGKILL)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    batch, results = json.loads(out), read_lines(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in results] == [row["custom_id"] for row in rows]
    _check_bill(stack, batch, results)
    wait_for(lambda: stack_cli("status", "--json").code == 0, "all processes ready again")
    assert _engine_pid(stack_cli) != pid
    with Database(stack.directory.database_url).reading() as session:
        epoch = session.execute(
            text("SELECT MAX(epoch) FROM units WHERE batch_id = :id"), {"id": batch["id"]}
        ).scalar_one()
    assert epoch == 2, "the supervisor frees the leases of the dead worker, and only once"


def test_without_a_name_the_same_input_runs_anew_once_it_is_finished(
    stack: Stack, stack_cli: Run, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(0, stack.model)])
    first, second = (stack_cli("run", source, "-o", tmp_path / "out", "--json").json["id"] for _ in range(2))
    assert first != second


def test_identical_requests_run_once_and_are_answered_each(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows = [{**line(1000, stack.model, temperature=0), "custom_id": f"same{i}"} for i in range(4)]
    before = _starts(stack)
    ran = stack_cli("run", write_lines(tmp_path / "in.jsonl", rows), "-o", tmp_path / "out.jsonl")
    assert ran.code == 0, ran.err
    assert _starts(stack) - before == 1
    texts = Counter(
        row["response"]["body"]["choices"][0]["message"]["content"] for row in read_lines(tmp_path / "out.jsonl")
    )
    assert list(texts.values()) == [4]


def _check_bill(stack: Stack, batch: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """The lines' usage and cost add up to the batch's and to the ledger's."""
    usages = [
        row["response"]["body"]["usage"] for row in results if row["response"] and row["response"]["status_code"] == 200
    ]
    usage = batch["usage"]
    assert batch["request_counts"]["completed"] == len(usages)
    assert batch["request_counts"]["failed"] == len(results) - len(usages)
    assert usage["input_tokens"] == sum(u["prompt_tokens"] for u in usages)
    assert usage["output_tokens"] == sum(u["completion_tokens"] for u in usages)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert usage["input_tokens_details"]["cached_tokens"] == cached
    cost = sum(u["cost_nanos"] for u in usages)
    assert usage["cost_nanos"] == cost > 0
    with Database(stack.directory.database_url).reading() as session:
        posted = session.execute(
            text(
                "SELECT e.account, SUM(e.amount_nanos) FROM ledger_entries e JOIN ledger_transactions t "
                "ON t.id = e.transaction_id WHERE t.batch_id = :id GROUP BY e.account"
            ),
            {"id": batch["id"]},
        ).all()
    accounts = {account.split(":")[0]: amount for account, amount in posted}
    assert accounts["revenue"] == cost
    assert accounts["reserved"] == 0
    assert sum(accounts.values()) == 0


def _completed(stack_cli: Run, rows: list[dict[str, Any]]) -> int:
    made = stack_cli("list", "--limit", "1", "--json").json["data"]
    if not made:  # the run is still uploading
        return -1
    (batch,) = made
    counts = batch["request_counts"]
    return int(counts["completed"]) if counts["total"] == len(rows) and batch["status"] == "in_progress" else -1


def _engine_pid(stack_cli: Run) -> int:
    processes = stack_cli("status", "--json").json["processes"]
    return next(int(process["pid"]) for process in processes if "engine" in process["name"])


def _starts(stack: Stack) -> int:
    return sum(row["event"] == "start" for row in read_lines(stack.witness))


@pytest.mark.parametrize("verb", ["continue", "retry"])
def test_the_rest_of_a_cancelled_batch_completes_it(stack: Stack, stack_cli: Run, tmp_path: Path, verb: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(i, stack.model) for i in range(6)])
    with _standing_still(stack, _engine_pid(stack_cli)):
        first = stack_cli("submit", source, "--name", f"rest to {verb}").out.split()[0]
        assert "batchsvc resume" in stack_cli("pause", first).out
        wait_for(lambda: stack_cli("show", first, "--json").json["waiting_for"] == "paused", "it is paused")
        assert "not paused" in stack_cli("resume", first).out
        assert stack_cli("cancel", first, "--json").json["status"] == "cancelled"
    second = stack_cli(verb, first).out.split()[0]
    followed = stack_cli("results", second, "--follow", "-o", tmp_path / "followed.jsonl")
    assert followed.code == 0, followed.err
    assert sorted(row["line"] for row in read_lines(tmp_path / "followed.jsonl")) == list(range(1, 7))
    merged = stack_cli("results", second, "--merged", "-o", tmp_path / "all.jsonl")
    assert merged.code == 0, merged.err
    rows = read_lines(tmp_path / "all.jsonl")
    assert [(row["line"], row["custom_id"]) for row in rows] == [(i + 1, f"r{i}") for i in range(6)]
    assert all(row["response"]["status_code"] == 200 and row["error"] is None for row in rows)
    plain = stack_cli("results", first, "-o", tmp_path / "first.jsonl")
    assert plain.code == 5, plain.err
    assert {row["error"]["code"] for row in read_lines(tmp_path / "first.jsonl")} == {"batch_cancelled"}


@contextmanager
def _standing_still(stack: Stack, pid: int) -> Iterator[None]:
    """An engine that is stopped while it doesn't write: SQLite would wait for it."""
    database = Database(stack.directory.database_url)
    try:
        with database.transaction() as session:
            database_now_ms(session)
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it stands still")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        database.dispose()
