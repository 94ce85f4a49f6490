"""What the supervisor reads from the log of a process that ended."""

from __future__ import annotations

import pytest

from batchsvc.stack.supervisor import reason_in


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['{"event": "started", "level": "info"}', "The model x can't be loaded."], "The model x can't be loaded."),
        (['{"event": "address in use", "level": "error"}', '{"event": "bye", "level": "info"}'], "address in use"),
        (['{"event": "bye", "level": "info"}'], ""),
        (["7"], ""),
        ([], ""),
    ],
)
def test_the_reason_is_a_sentence_not_a_log_event(lines: list[str], reason: str) -> None:
    assert reason_in(lines) == reason
