"""Checks of single values of a body: each gives the value, or a RequestError that names the parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchsvc.files.lines import json_type, shown
from engine.errors import RequestError


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
