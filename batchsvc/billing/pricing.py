"""The price book as data, and the most that a line can cost: pure, no database.

A book is a version and, for each model (or "default", for models loaded by path) and tier, three integer rates in
nano-dollars per million tokens. A version is never changed; another price is another version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from batchsvc.errors import InvalidRequestError
from batchsvc.money import Rates, line_cost_nanos

DEFAULT_MODEL = "default"
STANDARD_TIER = "standard"
KINDS = ("input", "cached_input", "output")
_MODEL_CHARS, _TIER_CHARS = 255, 32
_MOST_RATE = 10**15  # a dollar a token


@dataclass(frozen=True, slots=True)
class PriceBook:
    """All rates of one version, by (model, tier)."""

    version: int
    rates: Mapping[tuple[str, str], Rates]


def shipped_book() -> PriceBook:
    """The book that comes with the package."""
    return parse_book(json.loads(resources.files("batchsvc.billing").joinpath("prices.json").read_bytes()))


def parse_book(data: Any) -> PriceBook:
    """A checked book. Raises InvalidRequestError (code `invalid_price`) that names the first wrong rate."""
    try:
        version, models = data["version"], data["models"]
        _check(type(version) is int and 1 <= version < 2**31, "the version", "an integer of 1 or more", version)
        _check(bool(models), "models", "at least one", models)
        rates = {
            (_name(model, _MODEL_CHARS), _name(tier, _TIER_CHARS)): _parse_rates(f"{model}, {tier}", row)
            for model, tiers in models.items()
            for tier, row in tiers.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidRequestError(
            "A price book needs `version` and `models`: {model: {tier: {input, cached_input, output}}}.",
            code="invalid_price",
        ) from error
    return PriceBook(version, rates)


def _parse_rates(where: str, row: Mapping[str, Any]) -> Rates:
    for kind in KINDS:
        value = row.get(kind)
        ok = type(value) is int and 0 <= value <= _MOST_RATE
        _check(ok, f"{kind} of {where}", "an integer of 0 or more nano-dollars per million tokens", value)
    for name in row.keys() - set(KINDS):
        _check(False, f"{name} of {where}", f"left out: the kinds are {', '.join(KINDS)}", row[name])
    return Rates(**{kind: row[kind] for kind in KINDS})


def as_json(book: PriceBook) -> dict[str, dict[str, dict[str, int]]]:
    """The rates in the form that `parse_book` reads."""
    models: dict[str, dict[str, dict[str, int]]] = {}
    for (model, tier), rates in book.rates.items():
        models.setdefault(model, {})[tier] = {kind: getattr(rates, kind) for kind in KINDS}
    return models


def _name(text: str, most: int) -> str:
    _check(text.isprintable() and 0 < len(text) <= most, "a name", f"1 to {most} printable characters", text)
    return text


def _check(ok: bool, what: str, says: str, value: object) -> None:
    if not ok:
        raise InvalidRequestError(
            f"The price book is wrong: {what} must be {says}, not {value!r}.", code="invalid_price"
        )


def most_nanos(rates: Rates, *, input_tokens: int, planned_cached_tokens: int, max_tokens: int) -> int:
    """The most that a line can cost when it is delivered with at least its planned cached tokens.

    Cost is linear in the cached tokens and rounding is monotone, so the maximum lies at one of the two ends; the
    second matters only in a book whose cached input is dearer than input.
    """
    return max(
        line_cost_nanos(rates, input_tokens=input_tokens, cached_tokens=cached, output_tokens=max_tokens)
        for cached in (planned_cached_tokens, input_tokens)
    )
