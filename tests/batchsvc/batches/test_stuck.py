"""Why a batch doesn't move and what to type next, by tables."""

from __future__ import annotations

from typing import Any

import pytest

from batchsvc.batches.lifecycle import Status
from batchsvc.batches.stuck import Facts, Holder, find


def facts(status: Status = Status.IN_PROGRESS, **values: Any) -> Facts:
    return Facts(id="batch_1", project="proj_1", status=status, model="m", **values)


@pytest.mark.parametrize(
    ("given", "reason", "following"),
    [
        (facts(pause_reason="broken"), "it is paused: broken", "batchsvc batches resume batch_1"),
        (
            facts(is_own_pause=True),
            "its project has paused it",
            "batchsvc resume batch_1 (with a key of its project)",
        ),
        (facts(is_own_pause=True, pause_reason="by us"), "it is paused: by us", "batchsvc batches resume batch_1"),
        (
            facts(has_quota=False),
            "its project's unfinished batches hold all of its quota",
            "batchsvc admin project proj_1 --quota N",
        ),
        (
            facts(has_budget=False),
            "its project has no budget or balance left for it",
            "batchsvc admin project proj_1 --budget DOLLARS, or batchsvc topup proj_1 DOLLARS",
        ),
        (facts(hold_model="", hold_reason="why"), "claims are paused: why", "batchsvc claims resume"),
        (facts(hold_model="m", hold_reason="why"), "claims are paused: why", "batchsvc claims resume --model m"),
        (facts(lacking="m", ready=1), "no worker serves m", "batchsvc models load m"),
        (facts(lacking="m, n", ready=1), "no worker serves m, n", "batchsvc models load m"),
        (
            facts(lacking="m", drained=["gpu-1"], ready=1),
            "the workers of m are drained: gpu-1",
            "batchsvc workers undrain gpu-1",
        ),
        (
            facts(suspects=2, ready=2),
            "2 units ended engines, so they run alone, one after the other",
            "batchsvc quarantine list batch_1",
        ),
        (
            facts(overdue_s=61.0),
            "its deadline has passed, and no control worker has ended it",
            "batchsvc doctor",
        ),
        (
            facts(unattended_s=61.0),
            "all of its lines are done, and no control worker puts them together",
            "batchsvc doctor",
        ),
        (
            facts(leased=3, holders=[Holder("w1", 1, True), Holder("w2", 2, True)], moved_s=600.0),
            "w2 has 2 of its units and has finished nothing of them for 10 minutes",
            "batchsvc top, batchsvc logs engine, then batchsvc workers drain w2",
        ),
        (
            facts(ready=3, moved_s=660.0),
            "other batches have been served before it for 11 minutes",
            "batchsvc workers list, batchsvc admin project proj_1 --weight N",
        ),
        (facts(Status.VALIDATING, unattended_s=61.0), "no control worker plans it", "batchsvc doctor"),
        (
            facts(Status.VALIDATING, is_store_away=True),
            "the store of its input can't be read",
            "batchsvc admin stores list",
        ),
        (
            facts(Status.FINALIZING, fin_attempts=3),
            "its results can't be put together (attempt 3)",
            "batchsvc logs control",
        ),
        (
            facts(Status.CANCELLING, unattended_s=61.0),
            "no control worker puts its results together",
            "batchsvc doctor",
        ),
    ],
)
def test_what_is_stuck_says_why_and_what_next(given: Facts, reason: str, following: str) -> None:
    found = find(given, 600.0)
    assert found == (reason, following, True)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (facts(later="off-peak, from 22:00 on"), "it runs off-peak, from 22:00 on"),
        (facts(lacking="m", in_turn="its turn: W serves n now, and m after it"), "it waits for its turn"),
        (facts(leased=1, holders=[Holder("w", 1, False)]), "w has it and is silent"),
        (facts(delayed=2), "some of its work failed and is tried again soon"),
    ],
)
def test_what_goes_on_by_itself_is_told_but_not_listed(given: Facts, reason: str) -> None:
    found = find(given, 600.0)
    assert found is not None and found.reason.startswith(reason) and not found.is_stuck


@pytest.mark.parametrize(
    "given",
    [
        facts(ready=3, leased=1, moved_s=599.0),
        facts(ready=3, leased=1, holders=[Holder("w", 1, True)], lacking="m"),
        facts(Status.VALIDATING),
        facts(Status.VALIDATING, unattended_s=59.0),
        facts(Status.FINALIZING, fin_attempts=2),
        facts(overdue_s=59.0),
    ],
)
def test_what_moves_has_no_reason(given: Facts) -> None:
    assert find(given, 600.0) is None
