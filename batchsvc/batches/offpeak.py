"""The night: when work may run that has time, by the wall clock of one time zone. Pure: no clock, no database.

A night is the span from its begin on one local day to its end on that day or, over midnight, on the next. Where the
clocks change, times are read as RFC 5545 reads them: one that occurs twice is its first occurrence, one that is left
out counts by the offset before the gap. So a night may be an hour longer or shorter, and never opens twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Protocol
from zoneinfo import ZoneInfo

_DAY = timedelta(days=1)
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
        if self.begin is None:
            return now_ms
        today = datetime.fromtimestamp(now_ms / 1000, self.zone).date()
        for days in range(-2, _LOOK_AHEAD_DAYS):
            opens_ms, closes_ms = self._span(self.begin, today + days * _DAY)
            if now_ms < closes_ms and opens_ms < closes_ms:
                return max(now_ms, opens_ms)
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
