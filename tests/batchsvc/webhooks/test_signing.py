"""Signatures that the official client verifies, back-off, breaker and the shares of a limit."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import InvalidWebhookSignatureError
from openai.types.webhooks import BatchCompletedWebhookEvent

from batchsvc.webhooks import retry, signing
from batchsvc.webhooks.alerts import Spent, alerts
from batchsvc.webhooks.events import EventType, body_of, sample_data
from tests.receiver import Received


def received(
    secrets: list[str], at_s: int, kind: str = "batch.completed", data: dict[str, Any] | None = None
) -> Received:
    body = body_of("evt_1", kind, 1_700_000_000_999, data or {"id": "batch_1"})
    return Received("/", signing.headers("evt_1", at_s, body, secrets), body)


def test_the_official_client_verifies_and_reads_it() -> None:
    secret = signing.new_secret()
    event = received([secret], int(time.time())).unwrap(secret)
    assert isinstance(event, BatchCompletedWebhookEvent)
    assert (event.id, event.object, event.created_at, event.data.id) == ("evt_1", "event", 1_700_000_000, "batch_1")
    for kind in EventType:
        read = received([secret], int(time.time()), kind, sample_data(kind)).unwrap(secret)
        assert read.type == kind, "the client takes our own types too"


def test_while_a_secret_is_replaced_both_verify_and_no_third() -> None:
    new, old = signing.new_secret(), signing.new_secret()
    got = received([new, old], int(time.time()))
    assert got.unwrap(new).id == got.unwrap(old).id == "evt_1"
    with pytest.raises(InvalidWebhookSignatureError):
        got.unwrap(signing.new_secret())
    with pytest.raises(InvalidWebhookSignatureError, match="too old"):
        received([new], int(time.time()) - 301).unwrap(new)
    changed = Received("/", got.headers, got.body.replace(b"batch_1", b"batch_2"))
    with pytest.raises(InvalidWebhookSignatureError):
        changed.unwrap(new)


def test_a_hint_tells_little_of_a_secret() -> None:
    secret = signing.new_secret()
    assert len(set(signing.hint(secret).removeprefix("whsec_...")) - set(secret)) == 0
    assert len(signing.hint(secret)) == len("whsec_...") + 4


@given(now=st.integers(0, 2**45), chance=st.floats(0, 1))
def test_each_wait_is_longer_and_then_it_is_given_up(now: int, chance: float) -> None:
    due = [retry.next_due_ms(attempts, now, chance) for attempts in range(1, retry.MAX_ATTEMPTS + 2)]
    assert due[-2:] == [None, None]
    waits = [time_ms - now for time_ms in due[:-2] if time_ms is not None]
    assert len(waits) == retry.MAX_ATTEMPTS - 1 and waits == sorted(set(waits)) and waits[0] >= 5_000
    assert sum(waits) < 3 * 86_400_000


@given(failures=st.integers(0, 10**9), now=st.integers(0, 2**45))
def test_the_breaker_opens_after_failures_in_a_row_for_an_hour_at_most(failures: int, now: int) -> None:
    until = retry.open_until_ms(failures, now)
    if failures < 5:
        assert until == 0
    else:
        assert now + 30_000 <= until <= now + 3_600_000
        assert until <= retry.open_until_ms(failures + 1, now)


@given(
    spent=st.integers(-(10**18), 10**18),
    limit=st.integers(-5, 10**18),
    percents=st.lists(st.integers(1, 100), max_size=5),
)
def test_every_share_that_is_reached_is_told_once(spent: int, limit: int, percents: list[int]) -> None:
    asked = Spent(project_id="p", subject="p", limit="budget", month="2026-01", spent_nanos=spent, limit_nanos=limit)
    told = list(alerts(asked, percents))
    assert len({alert.key for alert in told}) == len(told)
    reached = {percent for percent in percents if limit > 0 and Fraction(spent, limit) >= Fraction(percent, 100)}
    assert {alert.data["percent"] for alert in told} == reached
