"""Waiting for results that go to S3: until they are there, or somebody has to do something about it."""

from __future__ import annotations

from typing import Any

import pytest

from batchsvc.cli import exporting
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError


def batch(state: str, error: str | None = None, attempts: int = 0) -> dict[str, Any]:
    export = {"uri": "s3://b/out/batch_1/", "state": state, "error": error, "attempts": attempts}
    return {"id": "batch_1", "status": "completed", "output_s3": export}


class Looks:
    """A batch as it is from look to look."""

    def __init__(self, *looks: dict[str, Any]) -> None:
        self.looks = list(looks)

    def batch(self, batch_id: str) -> dict[str, Any]:
        assert batch_id == "batch_1"
        return self.looks.pop(0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_POLL_S", 0.0)


def test_it_waits_until_the_results_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    looks = Looks(batch("pending"), batch("pending", "No.", 1), batch("pending", "No.", 2), batch("done", None, 3))
    assert exporting.wait_for_export(looks, batch("pending"), Console(as_json=False)) == batch("done", None, 3)
    assert capsys.readouterr().err.count("aren't in s3://b/out/batch_1/ yet: No.") == 1 and not looks.looks
    nowhere = {"id": "batch_2", "status": "completed"}
    assert exporting.wait_for_export(Looks(), nowhere, Console(as_json=False)) == nowhere


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (batch("failed", "The results are gone.", 1), "The results are gone. It was given up"),
        (batch("pending", "No.", 3), "No. The server goes on trying"),
    ],
)
def test_it_says_what_does_not_get_there(last: dict[str, Any], says: str) -> None:
    with pytest.raises(CommandError) as failed:
        exporting.wait_for_export(Looks(last), batch("pending"), Console(as_json=False))
    assert says in failed.value.message and "batchsvc results batch_1 -o FILE" in failed.value.message


def test_it_is_shown_in_a_line() -> None:
    assert exporting.shown(batch("pending", "No.", 1)) == "s3://b/out/batch_1/ (pending: No.)"
    assert exporting.shown(batch("done")) == "s3://b/out/batch_1/ (done)"
    assert exporting.shown({"id": "b", "output_s3": None}) is exporting.shown({"id": "b"}) is None
