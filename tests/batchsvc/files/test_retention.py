"""When content goes: properties of the rules, whatever grace, lease and moment."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.files.retention import LEASES, Kind, Policy, date_of, life_s
from batchsvc.settings import Settings, SettingsError

kinds = st.sampled_from(list(Kind))
moments = st.integers(0, 4 * 10**12)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """What settings let through: a grace of more than four leases."""
    lease_ms = draw(st.integers(1, 3_600_000))
    return Policy(grace_ms=draw(st.integers(4 * lease_ms + 1, 10**10)), lease_ms=lease_ms)


@given(policies(), kinds, moments)
def test_all_is_wiped_within_the_grace_and_the_last_time_after_every_writer(
    policy: Policy, kind: Kind, at_ms: int
) -> None:
    first_ms, last_ms = policy.first_ms(kind, at_ms), policy.last_ms(kind, at_ms)
    assert at_ms <= first_ms <= last_ms <= at_ms + policy.grace_ms
    if kind is not Kind.PLAN:  # of a plan nothing was deleted: it only isn't needed any more
        assert last_ms >= at_ms + LEASES * policy.lease_ms, "a writer that lost its lease may still write before"
    assert not policy.is_overdue(at_ms, last_ms)
    assert policy.is_overdue(at_ms, at_ms + policy.grace_ms + 1)


@given(policies(), kinds, moments, moments)
def test_what_was_deleted_later_is_wiped_later(policy: Policy, kind: Kind, one_ms: int, other_ms: int) -> None:
    early_ms, late_ms = sorted((one_ms, other_ms))
    assert policy.first_ms(kind, early_ms) <= policy.first_ms(kind, late_ms)
    assert policy.last_ms(kind, early_ms) <= policy.last_ms(kind, late_ms)


@given(policies(), moments, st.integers(0, 10**6))
def test_a_failed_attempt_is_made_again_soon_and_never_at_once(policy: Policy, now_ms: int, num_failures: int) -> None:
    assert now_ms < policy.retry_ms(now_ms, num_failures) <= now_ms + 1_200_000
    assert policy.retry_ms(now_ms, num_failures) <= policy.retry_ms(now_ms, num_failures + 1)


lives = st.none() | st.integers(3_600, 10**9)


@given(lives, lives, st.integers(3_600, 10**9))
def test_a_call_decides_before_its_project_and_that_before_the_setting(
    asked_s: int | None, project_s: int | None, setting_s: int
) -> None:
    found = life_s(asked_s, project_s, setting_s)
    assert found == (asked_s if asked_s is not None else project_s if project_s is not None else setting_s)


@given(st.integers(0, 4 * 10**12))
def test_a_date_is_the_day_in_utc(ms: int) -> None:
    assert date_of(ms) == datetime.fromtimestamp(ms / 1000, UTC).date().isoformat()


def test_the_grace_outlasts_all_who_write() -> None:
    needed = {"DATABASE_URL": "sqlite:///x", "REDIS_URL": "redis://localhost"}
    for name in ("BATCHSVC_RETENTION_GRACE", "BATCHSVC_RETENTION_GRACE_S"):
        assert Settings.from_env({**needed, name: "121"}).retention_grace_s == 121
        for wrong in ("120", "0", "-1", "soon"):
            with pytest.raises(SettingsError, match="BATCHSVC_RETENTION_GRACE"):
                Settings.from_env({**needed, name: wrong})
    assert Settings.from_env(needed).retention_grace_s == 86_400
