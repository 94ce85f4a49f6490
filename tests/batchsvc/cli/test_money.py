"""The operator's commands about money, on a real database; and the exit code of a batch that went over budget."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchsvc.cli import main
from batchsvc.cli.exits import Exit
from batchsvc.cli.outcome import exit_of
from batchsvc.settings import Settings
from tests.batchsvc.batches.door import Door

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def door(settings: Settings) -> Iterator[Door]:
    made = Door(settings)
    yield made
    made.close()


@pytest.fixture
def batchsvc(door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `batchsvc ... --from-env`; gives exit code, standard output and standard error."""
    monkeypatch.setenv("DATABASE_URL", door.settings.database_url)
    monkeypatch.setenv("REDIS_URL", door.settings.redis_url)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchsvc", *arguments, "--from-env"])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_prices_are_imported_listed_and_set(batchsvc: Command, tmp_path: Path) -> None:
    book = tmp_path / "book.json"
    book.write_text('{"models": {"m": {"standard": {"input": 20, "cached_input": 5, "output": 80}}}}')
    code, out, _ = batchsvc("prices", "import", str(book), "--json")
    assert code == 0 and json.loads(out)["models"]["m"]["standard"]["output"] == 80
    version = json.loads(out)["version"]
    prices = ("--input", "0.008", "--cached-input", "0", "--output", "1")
    code, out, _ = batchsvc("prices", "set", "m", "batch_24h", *prices, "--from", "2999-01-01")
    assert code == 0 and f"Version {version + 1} of the price book is in force from 2999" in out
    code, out, _ = batchsvc("prices", "list", "--version", str(version + 1))
    assert code == 0 and "$0.008" in out and "$1.00" in out
    code, out, _ = batchsvc("prices", "list", "--json")
    assert json.loads(out)["version"] == version, "the later one isn't in force yet"
    code, _, err = batchsvc("prices", "set", "m", "batch_24h", *prices[:4], "--output", "-1")
    assert code == Exit.USAGE and "--output can't be '-1'" in err
    book.write_text('{"models": {"m": {"standard": {"input": -20, "cached_input": 5, "output": 80}}}}')
    code, _, err = batchsvc("prices", "import", str(book))
    assert code != 0 and "input of m, standard" in err
    book.write_text("[]")
    assert batchsvc("prices", "import", str(book))[0] == Exit.REFUSED
    assert batchsvc("prices", "list", "--version", "77")[0] != 0


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_movements_are_posted_once_a_key(batchsvc: Command) -> None:
    for kind in ("topup", "payment", "credit"):
        code, out, _ = batchsvc(kind, "p", "12.50", "--reason", "why", "--key", "k", "--json")
        made = json.loads(out)
        assert code == 0 and (made["kind"], made["amount_nanos"], made["is_new"]) == (kind, 12_500_000_000, True)
        code, out, _ = batchsvc(kind, "p", "12.50", "--reason", "why", "--key", "k")
        assert code == 0 and "changed nothing" in out
        code, _, err = batchsvc(kind, "p", "13", "--reason", "why", "--key", "k")
        assert code != 0 and "use a new key" in err
    code, _, err = batchsvc("refund", "p", "1", "--reason", "why", "--key", "k", "--batch", "batch_x")
    assert code != 0 and "more than batch_x was charged" in err
    assert batchsvc("topup", "p", "1", "--reason", "why")[0] == Exit.USAGE, (
        "without a key it can't be told from a retry"
    )
    assert batchsvc("topup", "nobody", "1", "--reason", "why", "--key", "k")[0] != 0
    assert batchsvc("topup", "p", "-1", "--reason", "why", "--key", "k2")[0] != 0


def test_a_batch_over_its_budget_has_an_exit_code_of_its_own() -> None:
    counts = {"total": 10, "completed": 7, "failed": 3}
    done = {"id": "b", "status": "completed", "request_counts": counts}
    assert exit_of(done | {"lines_over_budget": 0}, "3") == Exit.OK
    assert exit_of(done | {"lines_over_budget": 3}, "3") == Exit.ENDED_EARLY
    refused = {"status": "failed", "errors": {"data": [{"code": "budget_exceeded"}]}}
    assert exit_of(refused, None) == Exit.ENDED_EARLY
