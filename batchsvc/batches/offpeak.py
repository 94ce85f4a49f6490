"""The night: when work may run that has time, by the wall clock of one time zone. Pure: no clock, no database.

A night is the span from its begin on one local day to its end on that day or, over midnight, on the next. Where the
clocks change, times are read as RFC 5545 reads them: one that occurs twice is its first occurrence, one that is left
out counts by the offset before the gap. So a night may be an hour longer or shorter, and never opens twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Protocol
from zoneinfo import ZoneInfo

_DAY = timedelta(days=1)
_NEVER_MS = 1 << 62
_LOOK_AHEAD_DAYS = 8  # where a gap swallows a night, it is the next one that opens


class NightSettings(Protocol):
    """What the settings say of the night."""

    @property
    def offpeak(self) -> str | None: ...
    @property
    def timezone(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Night:
    """Off-peak hours. Without them (`begin` None) it is always night: work runs when it comes."""

    begin: time | None = None
    end: time = time(0)
    zone: tzinfo = UTC

    @classmethod
    def from_settings(cls, settings: NightSettings) -> Night:
        """The night of a deployment; the settings have checked its form."""
        if not settings.offpeak:
            return cls()
        begin, end = (time.fromisoformat(text) for text in settings.offpeak.split("-"))
        return cls(begin=begin, end=end, zone=ZoneInfo(settings.timezone))

    @property
    def is_always(self) -> bool:
        """Whether there is no day that work has to wait for the end of."""
        return self.begin is None

    def is_open(self, now_ms: int) -> bool:
        """Whether it is night now."""
        return self.next_open_ms(now_ms) == now_ms

    def next_open_ms(self, now_ms: int) -> int:
        """The first moment from now on at which it is night: now, if it is."""
        return now_ms if self.begin is None else self.next_span_ms(now_ms)[0]

    def next_span_ms(self, now_ms: int) -> tuple[int, int]:
        """Begin and end of the night that is, or else comes next; what has passed of it is left out."""
        if self.begin is None:
            return now_ms, _NEVER_MS
        today = datetime.fromtimestamp(now_ms / 1000, self.zone).date()
        for days in range(-2, _LOOK_AHEAD_DAYS):
            opens_ms, closes_ms = self._span(self.begin, today + days * _DAY)
            if now_ms < closes_ms and opens_ms < closes_ms:
                return max(now_ms, opens_ms), closes_ms
        raise AssertionError("no time zone leaves out a night for a week")

    def label(self, moment_ms: int) -> str:
        """A moment as people of the zone say it, such as "22:00"."""
        return datetime.fromtimestamp(moment_ms / 1000, self.zone).strftime("%H:%M")

    def _span(self, begin: time, day: date) -> tuple[int, int]:
        """The half-open interval of the night that begins on `day`."""
        last = day if self.end > begin else day + _DAY
        return self._ms(day, begin), self._ms(last, self.end)

    def _ms(self, day: date, at: time) -> int:
        return round(datetime.combine(day, at, self.zone).timestamp() * 1000)


@dataclass(frozen=True, slots=True, kw_only=False)
class NightClock:
    """A clock that runs by night, and from `late_ms` on at any time: a WorkClock of batches/estimate.py."""

    night: Night
    late_ms: int | None = None

    def worked_ms(self, since_ms: float, until_ms: float) -> float:
        """How much of a span it was night, or late."""
        worked = 0.0
        for opens_ms, closes_ms in self._spans(round(since_ms)):
            if opens_ms >= until_ms:
                break
            worked += min(closes_ms, until_ms) - opens_ms
        return worked

    def after_ms(self, since_ms: float, work_ms: float) -> float:
        """When so much of the night has passed."""
        for opens_ms, closes_ms in self._spans(round(since_ms)):
            if closes_ms - opens_ms >= work_ms:
                return opens_ms + work_ms
            work_ms -= closes_ms - opens_ms
        raise AssertionError("there is always another night")

    def _spans(self, from_ms: int) -> Iterator[tuple[int, int]]:
        late_ms = _NEVER_MS if self.late_ms is None else self.late_ms
        while from_ms < late_ms:
            opens_ms, closes_ms = self.night.next_span_ms(from_ms)
            if opens_ms < late_ms:
                yield opens_ms, min(closes_ms, late_ms)
            from_ms = closes_ms
        yield max(from_ms, late_ms) if from_ms < _NEVER_MS else late_ms, _NEVER_MS
