"""The arithmetic of an audit: lines, sums and differences. Pure, and shared with nothing that writes them.

A difference names a line by its number alone: it is logged and kept, and what users sent must not be.

A cost is a fraction, rounded half to even by Python itself; sums are integers. What was written by other code is read
back here by rules of this file's own, so that a mistake there can't hide behind the same mistake here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

MOST_SHOWN = 1_000  # differences that are kept; all are counted
_NO_AMOUNTS = frozenset({"created_ms", "entries"})  # numbers of the ledger that are no money
NUMBERS = ("ok", "failed", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos", "standard_nanos")
_PAGE_BITS = 256


@dataclass(frozen=True, slots=True)
class Difference:
    """A place whose number isn't what it should be."""

    place: str
    number: str
    stored: int | str | None
    added_up: int | str | None

    def __str__(self) -> str:
        off = ""
        if isinstance(self.stored, int) and isinstance(self.added_up, int):
            off = f", off by {self.stored - self.added_up:+d}"
        return f"{self.place}: {self.number} is {self.stored}, but adds up to {self.added_up}{off}"

    def as_json(self) -> dict[str, Any]:
        return {"place": self.place, "number": self.number, "stored": self.stored, "added_up": self.added_up}


@dataclass(slots=True)
class Report:
    """What an audit has found so far."""

    differences: list[Difference] = field(default_factory=list)
    num_differences: int = 0
    unreconciled_nanos: int = 0  # by how much the amount is off that is off most
    notes: list[str] = field(default_factory=list)
    batches: int = 0
    lines: int = 0
    parts: int = 0
    invoices: int = 0

    def compare(self, place: str, number: str, stored: int | str | None, added_up: int | str | None) -> None:
        """Notes a difference, if there is one."""
        if type(stored) is type(added_up) and stored == added_up:
            return
        self.num_differences += 1
        if "nanos" in number or ("ledger" in place and number not in _NO_AMOUNTS):
            was, is_ = (value if isinstance(value, int) else 0 for value in (stored, added_up))
            self.unreconciled_nanos = max(self.unreconciled_nanos, abs(was - is_))
        if len(self.differences) < MOST_SHOWN:
            self.differences.append(Difference(place, number, stored, added_up))

    def note(self, sentence: str) -> None:
        """Says why something wasn't added up."""
        if len(self.notes) < MOST_SHOWN:
            self.notes.append(sentence)

    def as_json(self) -> dict[str, Any]:
        return {
            "object": "reconciliation",
            "is_equal": not self.num_differences,
            "num_differences": self.num_differences,
            "unreconciled_nanos": self.unreconciled_nanos,
            "differences": [difference.as_json() for difference in self.differences],
            "notes": self.notes,
            "batches": self.batches,
            "lines": self.lines,
            "parts": self.parts,
            "invoices": self.invoices,
        }


def cost(rates: Mapping[str, int], input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Nano-dollars of one line: one fraction, rounded once."""
    uncached = input_tokens - cached_tokens
    millionths = uncached * rates["input"] + cached_tokens * rates["cached_input"] + output_tokens * rates["output"]
    return round(Fraction(millionths, 1_000_000))


def share(tokens: int, rate_nanos: int) -> int:
    """Nano-dollars of tokens of one kind."""
    return round(Fraction(tokens * rate_nanos, 1_000_000))


@dataclass(slots=True)
class Sums:
    """Lines added up."""

    ok: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nanos: int = 0
    standard_nanos: int = 0

    def number(self, name: str) -> int:
        return int(getattr(self, name))


class LineNumbers:
    """A set of line numbers that takes about a bit a line."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}

    def add(self, number: int) -> bool:
        """False: it was there."""
        page, bit = divmod(number, _PAGE_BITS)
        had = self._pages.get(page, 0)
        self._pages[page] = had | 1 << bit
        return not had >> bit & 1


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a text that comes in pieces; only one of them is held."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a batch has pinned, by kind of token: its own rates, and those of the standard tier."""

    own: Mapping[str, int]
    standard: Mapping[str, int]
    by_model: Mapping[str, Prices] | None = None  # instead of these, if each line names its model

    def of(self, model: str | None) -> Prices:
        """What a line that ran on this model was to be paid by."""
        return self if self.by_model is None else self.by_model[model or ""]


def add_output_line(report: Report, place: str, text: bytes, prices: Prices, sums: Sums) -> int:
    """Adds a line of an output file and checks it by itself. Returns its line number."""
    row = json.loads(text)
    number = row["line"]
    body = row["response"]["body"]
    _add_usage(report, f"{place} line {number}", body["usage"], prices.of(body.get("model")), sums)
    sums.ok += 1
    return int(number)


def add_part_line(report: Report, place: str, text: bytes, prices: Prices, sums: Sums) -> int:
    """Adds a line of a part's object and checks it by itself. Returns its line number."""
    head = json.loads(text)
    number, row = head["line"], head["row"]
    where = f"{place} line {number}"
    names = NUMBERS[2:]
    if not head["ok"]:
        for name in names:
            report.compare(where, f"{name} of a line that failed", head[name], 0)
        sums.failed += 1
        return int(number)
    own = Sums()
    body = row["response"]["body"]
    _add_usage(report, where, body["usage"], prices.of(body.get("model")), own)
    for name in names:
        report.compare(where, f"{name} at its head", head[name], own.number(name))
        setattr(sums, name, sums.number(name) + head[name])
    sums.ok += 1
    return int(number)


def _add_usage(report: Report, where: str, usage: Mapping[str, Any], prices: Prices, sums: Sums) -> None:
    found = _tokens(usage)
    for name, count in zip(NUMBERS[2:5], found, strict=True):
        setattr(sums, name, sums.number(name) + count)
    report.compare(where, "total_tokens", usage["total_tokens"], found[0] + found[2])
    report.compare(where, "cost_nanos", usage["cost_nanos"], cost(prices.own, *found))
    if found[1] > found[0]:
        report.compare(where, "cached_tokens beyond its input", found[1], found[0])
    sums.cost_nanos += usage["cost_nanos"]
    sums.standard_nanos += cost(prices.standard, *found)


def _tokens(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Input, cached and output tokens, as chat and text completions, embeddings and responses name them."""
    match usage:
        case {
            "prompt_tokens": asked,
            "prompt_tokens_details": {"cached_tokens": reused},
            "completion_tokens": answered,
        }:
            return asked, reused, answered
        case {"prompt_tokens": asked, "prompt_tokens_details": {"cached_tokens": reused}}:  # embeddings answer in none
            return asked, reused, 0
        case {"input_tokens": asked, "input_tokens_details": {"cached_tokens": reused}, "output_tokens": answered}:
            return asked, reused, answered
    raise ValueError(f"A usage of no known shape: {', '.join(usage)}.")
