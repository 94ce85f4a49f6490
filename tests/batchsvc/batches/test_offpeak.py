"""The night against a slow, obvious oracle: the wall clock read minute by minute, through changes of the clocks."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches.offpeak import Night, NightClock
from batchsvc.settings import Settings, SettingsError

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca"]

zones = st.sampled_from(ZONES).map(ZoneInfo)
times = st.integers(0, 24 * 60 - 1).map(lambda minute: time(minute // 60, minute % 60))
nights = st.builds(lambda ends, zone: Night(begin=ends[0], end=ends[1], zone=zone), st.tuples(times, times), zones)
some_nights = nights.filter(lambda night: night.begin != night.end)
moments = st.integers(
    int(datetime(2024, 1, 1, tzinfo=UTC).timestamp() * 1000), int(datetime(2030, 1, 1, tzinfo=UTC).timestamp() * 1000)
)


def on(text: str, zone: str, fold: int = 0) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp() * 1000)


def berlin(hours: str) -> Night:
    begin, end = hours.split("-")
    return Night(begin=time.fromisoformat(begin), end=time.fromisoformat(end), zone=ZoneInfo("Europe/Berlin"))


def is_calm(moment_ms: int, zone: object) -> bool:
    """Whether no clock change is within two days: then the wall clock alone decides."""
    around = (datetime.fromtimestamp(moment_ms / 1000, zone) + timedelta(hours=h) for h in range(-60, 61, 6))
    return len({moment.utcoffset() for moment in around}) == 1


@given(some_nights, moments)
def test_the_next_opening_is_open_and_nothing_before_it_is(night: Night, now: int) -> None:
    opens = night.next_open_ms(now)
    assert opens >= now
    assert night.is_open(opens) and night.next_open_ms(opens) == opens
    assert night.is_open(now) == (opens == now)
    for step in range(1, 20):
        between = now + (opens - now) * step // 20
        assert between == opens or not night.is_open(between)


@given(some_nights, moments)
def test_without_a_clock_change_the_wall_clock_decides(night: Night, now: int) -> None:
    if not is_calm(now, night.zone):
        return
    assert night.begin is not None
    at = datetime.fromtimestamp(now / 1000, night.zone).time()
    is_inside = night.begin <= at < night.end if night.begin < night.end else at >= night.begin or at < night.end
    assert night.is_open(now) == is_inside


@given(some_nights, moments)
def test_a_week_has_seven_nights_of_their_length(night: Night, now: int) -> None:
    """Over a week the open time is seven nights', but for the hour or two that a clock change takes or gives."""
    assert night.begin is not None
    minutes = [t.hour * 60 + t.minute for t in (night.begin, night.end)]
    length = (minutes[1] - minutes[0]) % (24 * 60)
    step = 15
    seen = sum(night.is_open(now + k * step * MINUTE_MS) for k in range(7 * 24 * 60 // step)) * step
    assert abs(seen - 7 * length) <= 2 * 60 + 14 * step


def test_over_midnight() -> None:
    night = berlin("22:00-06:00")
    assert not night.is_open(on("2026-11-29T21:59", "Europe/Berlin"))
    assert night.is_open(on("2026-11-29T22:00", "Europe/Berlin"))
    assert night.is_open(on("2026-11-30T00:00", "Europe/Berlin"))
    assert night.is_open(on("2026-11-30T05:59", "Europe/Berlin"))
    assert not night.is_open(on("2026-11-30T06:00", "Europe/Berlin"))
    noon = on("2026-11-30T12:00", "Europe/Berlin")
    assert night.next_open_ms(noon) == on("2026-11-30T22:00", "Europe/Berlin")
    assert night.label(night.next_open_ms(noon)) == "22:00"


def test_inside_one_day() -> None:
    night = berlin("01:00-05:30")
    assert night.next_open_ms(on("2026-06-01T05:30", "Europe/Berlin")) == on("2026-06-02T01:00", "Europe/Berlin")


@pytest.mark.parametrize(("day", "hours"), [("2026-03-28", 7), ("2026-10-24", 9), ("2026-06-01", 8)])
def test_a_night_with_a_clock_change_is_an_hour_shorter_or_longer(day: str, hours: int) -> None:
    night = berlin("22:00-06:00")
    opens = on(f"{day}T22:00", "Europe/Berlin")
    assert not night.is_open(opens - 1) and night.is_open(opens)
    assert night.is_open(opens + hours * HOUR_MS - 1) and not night.is_open(opens + hours * HOUR_MS)


def test_a_time_that_occurs_twice_opens_once() -> None:
    night = berlin("02:30-02:45")
    first, second = (on("2026-10-25T02:30", "Europe/Berlin", fold) for fold in (0, 1))
    assert second - first == HOUR_MS
    assert night.is_open(first) and not night.is_open(second)


def test_a_time_that_is_left_out_counts_by_the_offset_before() -> None:
    night = berlin("02:30-02:45")
    assert night.next_open_ms(on("2026-03-29T00:00", "Europe/Berlin")) == on("2026-03-29T03:30", "Europe/Berlin")


def test_a_night_that_a_clock_change_swallows_is_the_next_one() -> None:
    """02:30 becomes 03:30 that day, which is after the end."""
    night = berlin("02:30-03:15")
    assert night.next_open_ms(on("2026-03-29T00:00", "Europe/Berlin")) == on("2026-03-30T02:30", "Europe/Berlin")


def test_without_hours_it_is_always_night() -> None:
    night = Night.from_settings(settings())
    assert night.is_always and night.is_open(5) and night.next_open_ms(5) == 5


def test_settings_name_the_night() -> None:
    night = Night.from_settings(settings(BATCHSVC_OFFPEAK="22:00-06:00", BATCHSVC_TIMEZONE="Europe/Berlin"))
    assert night == berlin("22:00-06:00") and not night.is_always


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BATCHSVC_OFFPEAK", "22-6"),
        ("BATCHSVC_OFFPEAK", "22:00-22:00"),
        ("BATCHSVC_OFFPEAK", "25:00-06:00"),
        ("BATCHSVC_TIMEZONE", "Mars/Olympus"),
        ("BATCHSVC_TIMEZONE", "../../etc/passwd"),
        ("BATCHSVC_WINDOWS", "1y"),
        ("BATCHSVC_WINDOWS", "0h"),
        ("BATCHSVC_WINDOWS", "24h,"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name} can't be used: .*such as"):
        settings(**{name: value})


def settings(**variables: str) -> Settings:
    return Settings.from_env({"DATABASE_URL": "sqlite:///x", "REDIS_URL": "redis://x", **variables})


spans = st.integers(0, 30 * 24 * HOUR_MS)


@given(some_nights, moments, spans, st.none() | st.integers(-5 * 24 * HOUR_MS, 10 * 24 * HOUR_MS))
def test_a_clock_that_runs_by_night_agrees_with_itself(night: Night, now: int, work: int, late_in: int | None) -> None:
    clock = NightClock(night, None if late_in is None else now + late_in)
    ends = clock.after_ms(now, work)
    assert ends >= now + work and abs(clock.worked_ms(now, ends) - work) < 1
    assert clock.worked_ms(now, now + work) <= work
    if late_in is not None and late_in <= 0:
        assert ends == now + work, "late work runs at any time"


@given(some_nights, moments, st.integers(0, 5 * 24 * 60))
def test_a_night_clock_counts_the_minutes_of_the_night(night: Night, now: int, minutes: int) -> None:
    until = now + minutes * MINUTE_MS
    oracle = sum(night.is_open(now + step * 10 * MINUTE_MS) for step in range(minutes // 10)) * 10 * MINUTE_MS
    nights = 2 * (minutes / 1440 + 2)  # each begin and end may fall between two looks
    assert abs(NightClock(night).worked_ms(now, until) - oracle) <= nights * 10 * MINUTE_MS


def test_without_a_night_a_night_clock_always_runs() -> None:
    assert NightClock(Night()).after_ms(5, 10) == 15 and NightClock(Night()).worked_ms(5, 15) == 10
