"""Calendar months in UTC: what belongs to one, as a half-open interval of milliseconds. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from batchsvc.errors import InvalidRequestError

_FORM = re.compile(r"(\d{4})-(0[1-9]|1[0-2])", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True, order=True)
class Month:
    """`2026-01`: from its first millisecond, inclusive, to the next month's first, exclusive."""

    year: int
    month: int

    @classmethod
    def parse(cls, text: str) -> Month:
        """Raises InvalidRequestError for anything but a month from 1970 on, such as 2026-01."""
        found = _FORM.fullmatch(text)
        if found is None or not 1970 <= int(found[1]) < 9999:
            raise InvalidRequestError(f"A month is written as 2026-01, not {text!r}.", param="month")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of(cls, ms: int) -> Month:
        """The month that a time belongs to."""
        moment = _EPOCH + ms * _MS
        return cls(moment.year, moment.month)

    def __str__(self) -> str:
        return f"{self.year:04d}-{self.month:02d}"

    @property
    def next(self) -> Month:
        return Month(self.year + self.month // 12, self.month % 12 + 1)

    @property
    def start_ms(self) -> int:
        return (datetime(self.year, self.month, 1, tzinfo=UTC) - _EPOCH) // _MS

    @property
    def end_ms(self) -> int:
        """Exclusive: the first millisecond of the next month."""
        return self.next.start_ms

    @property
    def first_day(self) -> date:
        return date(self.year, self.month, 1)

    @property
    def last_day(self) -> date:
        return self.next.first_day - timedelta(days=1)


def day_of(ms: int) -> date:
    """The UTC day that a time belongs to."""
    return (_EPOCH + ms * _MS).date()


def iso_time(ms: int) -> str:
    """`2026-01-31T23:59:59.999Z`."""
    return (_EPOCH + ms * _MS).strftime("%Y-%m-%dT%H:%M:%S.") + f"{ms % 1000:03d}Z"
