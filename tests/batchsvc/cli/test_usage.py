"""`batchsvc usage` and `costs` on a real database: groups, files that can be added up, and refusals in a sentence."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import structlog
from sqlalchemy import insert

from batchsvc.accounts import service as accounts
from batchsvc.billing import focus
from batchsvc.billing import service as billing
from batchsvc.billing.tables import UsageRow
from batchsvc.cli import main
from batchsvc.db import migrate
from batchsvc.db.session import Database, database_now_ms
from batchsvc.money import Rates, line_cost_nanos
from tests.dispatchers import NullDispatcher
from tests.serving import serving

DAY_MS = 86_400_000
RATES = Rates(input=10_000_000, cached_input=2_500_000, output=40_000_000)
Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def rows(database_url: str) -> list[dict[str, Any]]:
    """Two projects, two models, three days up to now."""
    migrate.upgrade(database_url)
    database = Database(database_url)
    made = []
    with database.transaction() as session:
        billing.seed_prices(session)
        projects = [accounts.create_project(session, name).id for name in ("first", "second")]
        now = database_now_ms(session)
        for number in range(12):
            tokens = {"input_tokens": 37 + number, "cached_tokens": 16, "output_tokens": number}
            made.append(
                {
                    "part_id": f"part{number}",
                    "project_id": projects[number % 2],
                    "api_key_id": "key",
                    "batch_id": f"batch_{number}",
                    "model": ("smollm2-135m", "other")[number % 3 == 0],
                    "tier": "batch_24h",
                    "endpoint": "/v1/embeddings" if number == 5 else "/v1/chat/completions",
                    "price_version": 1,
                    "created_ms": now - number % 3 * DAY_MS,
                    "requests": 1,
                    "cost_nanos": line_cost_nanos(RATES, **tokens),
                    **tokens,
                }
            )
        session.execute(insert(UsageRow), made)
    database.dispose()
    return made


@pytest.fixture
def command(
    database_url: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs `batchsvc ... --from-env`; gives exit code, standard output and standard error."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    from_day = ("--from", str(_day(min(row["created_ms"] for row in rows))))

    def run(*arguments: str, where: tuple[str, ...] = ("--from-env",), when: tuple[str, ...] = from_day) -> Any:
        monkeypatch.setattr(sys, "argv", ["batchsvc", *arguments, *when, *where])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def _day(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms // 1000, UTC).date().isoformat()


def test_the_same_sums_by_any_group_in_csv_parquet_and_json(
    command: Command, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    total = {name: sum(row[name] for row in rows) for name in ("requests", "input_tokens", "cost_nanos")}
    for by in ("model", "project,model", "key", "batch", "day", "day,model", "tier", "metadata.team"):
        code, out, _ = command("usage", "--by", by, "--csv", "-")
        found = list(csv.DictReader(io.StringIO(out)))
        assert code == 0 and list(found[0])[: by.count(",") + 1] == by.split(",")
        assert {name: sum(int(row[name]) for row in found) for name in total} == total
        code, _, said = command("costs", "--by", by, "--parquet", str(tmp_path / "costs.parquet"))
        table = pq.read_table(tmp_path / "costs.parquet")
        assert code == 0 and str(tmp_path) in said
        assert str(table.schema.field("amount_nanos").type) == "int64"
        assert sum(table["amount_nanos"].to_pylist()) == total["cost_nanos"]
        code, out, _ = command("costs", "--by", by, "--json")
        page = json.loads(out)
        results = [result for bucket in page["data"] for result in bucket["results"]]
        assert code == 0 and page["object"] == "page" and not page["has_more"]
        assert sum(result["amount_nanos"] for result in results) == total["cost_nanos"]
    code, out, _ = command("costs", "--by", "item", "--csv", "-")
    items = {row["item"]: int(row["amount_nanos"]) for row in csv.DictReader(io.StringIO(out))}
    assert items["smollm2-135m, batch_24h, output_tokens"] == 40 * sum(
        row["output_tokens"] for row in rows if row["model"] == "smollm2-135m"
    )
    assert sum(items.values()) == total["cost_nanos"]


def test_the_table_has_a_bar_for_each_row_and_a_total(command: Command, rows: list[dict[str, Any]]) -> None:
    code, out, _ = command("usage", "--by", "day")
    lines = out.splitlines()
    assert code == 0 and lines[0].endswith("(UTC)")
    assert lines[1].split() == ["day", "requests", "input", "tokens", "cached", "tokens", "output", "tokens", "cost"]
    days = sorted({_day(row["created_ms"]) for row in rows})
    assert [line.split()[0] for line in lines[2:]] == [*days, "total"]
    bars = [line.count("█") for line in lines[2:-1]]
    costs = [sum(row["cost_nanos"] for row in rows if _day(row["created_ms"]) == day) for day in days]
    assert bars[costs.index(max(costs))] == 24 and 0 < min(bars) < 24
    assert f"{sum(row['input_tokens'] for row in rows):,}" in lines[-1]
    code, out, _ = command("costs", "--by", "project", when=("--month", "1999-01"))
    assert (code, out) == (0, "Nothing was used from 1999-01-01 to 1999-01-31 (UTC).\n")


def test_focus_adds_up_and_names_projects(command: Command, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    code, out, said = command("costs", "--focus", str(tmp_path / "focus.csv"), "--seller", "Ours")
    assert (code, out) == (0, "") and "focus.csv" in said
    with (tmp_path / "focus.csv").open(encoding="utf-8", newline="") as file:
        charges = list(csv.DictReader(file))
    assert tuple(charges[0]) == focus.COLUMNS
    billed = sum((Decimal(charge["BilledCost"]) for charge in charges), Decimal())
    assert billed * 10**9 == sum(row["cost_nanos"] for row in rows)
    assert {charge["BillingAccountName"] for charge in charges} == {"first", "second"}
    assert {charge["ResourceId"] for charge in charges} == {row["batch_id"] for row in rows}
    assert {charge["ProviderName"] for charge in charges} == {"Ours"}


def test_a_server_says_what_the_database_says(
    command: Command, settings: Any, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    database = Database(settings.database_url)
    with database.transaction() as session:
        admin, plain = (
            accounts.create_key(session, rows[0]["project_id"], "k", is_admin=is_admin)[1] for is_admin in (True, False)
        )
    database.dispose()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # its lines aren't the command's
    with serving(settings, NullDispatcher()) as url:
        for arguments in (
            ("usage", "--by", "day,model"),
            ("costs", "--by", "item,metadata.x y&z"),
            ("costs", "--json"),
        ):
            there = command(*arguments, where=("--url", url, "--api-key", admin))
            assert there[0] == 0 and there == command(*arguments)
        code, _, said = command("costs", where=("--url", url, "--api-key", plain))
        assert code == 1 and "admin key" in said


def test_wrong_questions_end_in_one_sentence(command: Command, tmp_path: Path) -> None:
    for arguments, when, code, says in (
        (("usage", "--by", "item"), (), 2, "--by can't be 'item'"),
        (("costs", "--by", "colour"), (), 2, "metadata.KEY"),
        (("costs", "--by", "metadata."), (), 2, "--by can't be 'metadata.'"),
        (("costs", "--by", ""), (), 2, "--by can't be ''"),
        (("costs",), ("--month", "2026-13"), 2, "--month can't be '2026-13'"),
        (("costs",), ("--month", "2026-11", "--from", "2026-11-01"), 2, "not both"),
        (("costs",), ("--to", "2026-11-01"), 2, "--to needs --from"),
        (("costs",), ("--from", "yesterday"), 2, "--from can't be 'yesterday'"),
        (("costs",), ("--from", "2026-11-02", "--to", "2026-11-01"), 2, "before the first"),
        (("costs", "--csv", str(tmp_path / "no" / "file")), (), 1, "can't be written"),
        (("costs", "--csv", "-", "--json"), (), 2, "name a file"),
    ):
        found, out, said = command(*arguments, when=when)
        assert (found, out) == (code, "") and says in said and said.count("\n") == 1, said
