"""A question about usage or costs, checked, and the buckets of its answer: pure, no database.

Buckets are whole minutes, hours or days of UTC, so no bucket is shorter or longer for a change of clocks. The first
and the last are cut where the question begins and ends, and say so: two questions that meet count nothing twice.
Buckets without usage are there, empty; what hasn't begun yet isn't.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from batchsvc.errors import InvalidRequestError

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400
_END_OF_TIME_S = 253_402_300_800  # the year 10000: who is beyond it sends milliseconds
_METADATA = re.compile(r'metadata\.[^\x00-\x1f"\\]{1,64}')  # no quotes: SQLite's JSON paths can't escape them
_PAGE = re.compile(r"page_[A-Za-z0-9_-]{32}")


class Kind(StrEnum):
    """What a question is about: its route, and the object of a result."""

    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    COSTS = "costs"


@dataclass(frozen=True, slots=True)
class Width:
    """A width of buckets: in seconds, and how many a page has by default and at most."""

    seconds: int
    default: int
    most: int


_USAGE_WIDTHS = {
    "1m": Width(MINUTE_S, 60, 1_440),
    "1h": Width(HOUR_S, 24, 168),
    "1d": Width(DAY_S, 7, 31),
}
WIDTHS = {Kind.COMPLETIONS: _USAGE_WIDTHS, Kind.EMBEDDINGS: _USAGE_WIDTHS, Kind.COSTS: {"1d": Width(DAY_S, 7, 180)}}

_COMMON = ("project_id", "user_id", "api_key_id", "model")
# extensions, but for the tier of completions; so is metadata.<key>
_OWN = ("service_tier", "batch_id", "price_version")
GROUPS = {
    Kind.COMPLETIONS: (*_COMMON, "batch", "api_source", *_OWN),
    Kind.EMBEDDINGS: (*_COMMON, *_OWN),
    Kind.COSTS: (*_COMMON, "line_item", "api_source", *_OWN),
}
FILTERS = {
    Kind.COMPLETIONS: ("project_ids", "user_ids", "api_key_ids", "models", "batch_ids"),
    Kind.EMBEDDINGS: ("project_ids", "user_ids", "api_key_ids", "models", "batch_ids"),
    Kind.COSTS: ("project_ids", "api_key_ids", "models", "batch_ids", "line_items"),
}
_SINGLE = ("start_time", "end_time", "bucket_width", "limit", "page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a caller wants to know. Times are seconds of the epoch, `end_s` exclusive; None means up to now."""

    kind: Kind
    start_s: int
    end_s: int | None
    width: Width
    limit: int
    group_by: tuple[str, ...]
    filters: Mapping[str, tuple[str, ...]]
    batch: bool | None
    page: str | None

    @property
    def fingerprint(self) -> str:
        """What stays the same from page to page."""
        parts = (self.kind, self.start_s, self.end_s, self.width.seconds, self.group_by, self.filters, self.batch)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def by_line_item(self) -> bool:
        """Whether costs have to be taken apart by kind of token."""
        return "line_item" in self.group_by or "line_items" in self.filters


@dataclass(frozen=True, slots=True)
class Bucket:
    """Seconds of the epoch, the end exclusive."""

    start_s: int
    end_s: int


@dataclass(frozen=True, slots=True)
class Page:
    """The buckets of one page, in order, and the name of the next page."""

    buckets: tuple[Bucket, ...]
    next_page: str | None


def parse(kind: Kind, given: Sequence[tuple[str, str]]) -> Question:
    """The question that these arguments of a URL ask. Raises InvalidRequestError, which names the argument."""
    single: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    known = (*_SINGLE, *(("batch",) if kind == Kind.COMPLETIONS else ()))
    for key, value in given:
        name = key.removesuffix("[]")
        if name == "group_by" or name in FILTERS[kind]:
            # names of line items have commas, and others may: only the short form without brackets is split at them
            is_one = key != name or name == "line_items"
            arrays.setdefault(name, []).extend([value] if is_one else value.split(","))
        elif key not in known:
            raise _invalid(key, f"Unknown parameter: '{key}'.", code="unknown_parameter")
        elif key in single:
            raise _invalid(key, f"{key} is given twice.")
        else:
            single[key] = value
    if "start_time" not in single:
        raise _invalid("start_time", "Missing required parameter: 'start_time'.", code="missing_required_parameter")
    start_s, end_s = _time("start_time", single["start_time"]), None
    if "end_time" in single:
        end_s = _time("end_time", single["end_time"])
        if end_s <= start_s:
            raise _invalid("end_time", "end_time must be later than start_time.")
    width = _width(kind, single.get("bucket_width", "1d"))
    return Question(
        kind=kind,
        start_s=start_s,
        end_s=end_s,
        width=width,
        limit=_limit(single.get("limit"), width),
        group_by=_groups(kind, arrays.pop("group_by", [])),
        filters={name: tuple(sorted(set(values))) for name, values in sorted(arrays.items())},
        batch=_boolean("batch", single.get("batch")),
        page=single.get("page"),
    )


def page_of(question: Question, now_s: int) -> Page:
    """The buckets that a question's page has. Raises InvalidRequestError for a page of another question."""
    width = question.width.seconds
    running_end_s = now_s // width * width + width
    end_s = running_end_s if question.end_s is None else min(question.end_s, running_end_s)
    at = question.start_s if question.page is None else _page_start(question, end_s)
    buckets: list[Bucket] = []
    while at < end_s and len(buckets) < question.limit:
        until = min(at // width * width + width, end_s)
        buckets.append(Bucket(at, until))
        at = until
    return Page(tuple(buckets), _page_name(question, at) if at < end_s else None)


def spans(start_ms: int, end_ms: int, width_ms: int) -> Iterator[tuple[bool, int, int]]:
    """Cuts a time into (whole hours?, start, end): whole hours are read from the rollup, the rest from usage rows."""
    hour = HOUR_S * 1000
    first, last = -(-start_ms // hour) * hour, end_ms // hour * hour
    if width_ms < hour or first >= last:
        cuts = [(False, start_ms, end_ms)]
    else:
        cuts = [(False, start_ms, first), (True, first, last), (False, last, end_ms)]
    yield from ((whole, begin, end) for whole, begin, end in cuts if begin < end)


def _page_name(question: Question, start_s: int) -> str:
    digest = bytes.fromhex(question.fingerprint)[:16]
    return "page_" + base64.urlsafe_b64encode(start_s.to_bytes(8, "big") + digest).decode()


def _page_start(question: Question, end_s: int) -> int:
    assert question.page is not None, "the caller has looked"
    if _PAGE.fullmatch(question.page):
        start_s = int.from_bytes(base64.urlsafe_b64decode(question.page.removeprefix("page_"))[:8], "big")
        if question.start_s < start_s < end_s and _page_name(question, start_s) == question.page:
            return start_s
    raise _invalid("page", "page is unknown: it is the next_page of an answer, with the same other parameters.")


def _time(name: str, text: str) -> int:
    found = _integer(text)
    if found is None or found > _END_OF_TIME_S:
        raise _invalid(name, f"{name} must be a Unix time in whole seconds.")
    return found


def _width(kind: Kind, text: str) -> Width:
    widths = WIDTHS[kind]
    if text not in widths:
        raise _invalid("bucket_width", f"bucket_width must be {' or '.join(widths)}.")
    return widths[text]


def _limit(text: str | None, width: Width) -> int:
    if text is None:
        return width.default
    found = _integer(text)
    if found is None or not 1 <= found <= width.most:
        raise _invalid("limit", f"limit must be 1 to {width.most} buckets of this width.")
    return found


def _groups(kind: Kind, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in GROUPS[kind] and not _METADATA.fullmatch(name):
            known = ", ".join(GROUPS[kind])
            raise _invalid("group_by", f"group_by can't be {name[:80]!r}: it takes {known} and metadata.<key>.")
    return tuple(dict.fromkeys(names))


def _boolean(name: str, text: str | None) -> bool | None:
    if text is None:
        return None
    if text not in ("true", "false"):
        raise _invalid(name, f"{name} must be true or false.")
    return text == "true"


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def _invalid(param: str, message: str, *, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(message, code=code, param=param)
