"""Checks of single values of a body: each gives the value, or a RequestError that names the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from batchsvc.files.lines import json_type, shown
from engine.errors import RequestError

# fields that change nothing about an answer, whatever they say: labels, bookkeeping, streaming, order among requests
IGNORED = frozenset(
    {
        *("user", "safety_identifier", "metadata", "store", "prompt_cache_retention", "prompt_cache_options"),
        *("stream_options", "stream_interval", "request_id", "session_id", "priority"),
        "guided_decoding_backend",
    }
)
_LONGEST_NAME = 64
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


def allow(body: dict[str, Any], known: frozenset[str], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises RequestError for a field that is neither known here nor ignored, so that nothing is dropped silently.

    `harmless` are fields that clients send and nothing here can do, with the values that ask for nothing special; null
    never does.
    """
    for name in sorted(body.keys() - known - IGNORED):  # sorted: the same refusal for the same body
        if body[name] is None:
            continue
        if name in harmless:
            refuse({name: body[name]}, harmless)
            continue
        near, spelled = _near(name, known), shown(name)[1:-1]
        way_out = f"{near} may be meant." if near else "remove it from the body."
        raise RequestError(
            f"{spelled} is no parameter that is known here: {way_out}", code="unknown_parameter", param=spelled
        )


@lru_cache(maxsize=256)  # the lines of a file make the same mistake
def _near(name: str, known: frozenset[str]) -> str | None:
    found = get_close_matches(name, sorted(known), n=1, cutoff=0.8) if len(name) <= _LONGEST_NAME else ()
    return next(iter(found), None)


def service_tier(body: dict[str, Any]) -> dict[str, Any]:
    """What a unit row carries of a tier that is asked for, so that its answer names one: whichever it was, a batch runs
    in its own, which OpenAI calls "default"."""
    tier = body.get("service_tier")
    if tier is None:
        return {}
    if tier not in SERVICE_TIERS:
        raise wrong("service_tier", f"one of {', '.join(SERVICE_TIERS)}", tier)
    return {"service_tier": "default"}


def integer(body: dict[str, Any], name: str, default: int, *, low: int, high: int = 2**31 - 1) -> int:
    """An integer of `body`, `default` without one."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise wrong(name, f"an integer of {low} or more" if high == 2**31 - 1 else "a 64-bit integer", value)
    return value


def number(body: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    """A finite number of `body`, `default` without one."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise wrong(name, f"a number between {low:g} and {high:g}", value)
    return float(value)


def boolean(body: dict[str, Any], name: str) -> bool:
    """A truth value of `body`, false without one."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return bool(value)


def refuse(body: dict[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises RequestError for a field that isn't supported, unless it asks for nothing special; null never does."""
    for name in sorted(harmless.keys() & body.keys()):  # sorted: the same refusal for the same body
        value = body[name]
        if value is not None and not any(same(value, allowed) for allowed in harmless[name]):
            raise RequestError(
                f"{name}={shown(value)} is not supported here; remove it from the body.",
                code="unsupported_parameter",
                param=name,
            )


def same(value: Any, allowed: Any) -> bool:
    """Whether two JSON values are equal."""
    # Python says True == 1, JSON doesn't
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def wrong(param: str, says: str, value: Any) -> RequestError:
    """The refusal of a value: what its parameter must be, and what it is."""
    kind = shown(value) if isinstance(value, str | int | float) else json_type(value)
    return RequestError(f"{param} must be {says}, not {kind}.", code="invalid_value", param=param)
