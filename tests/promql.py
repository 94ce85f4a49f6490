"""A small Prometheus for tests: keeps scrapes of /metrics with their times, and evaluates an expression over them.

The parser is the Rust one of Prometheus' own grammar (promql-parser); evaluated is the part of the language that our
rules use: selectors, ranges, `max_over_time`, `increase` and `rate` (the growth over the samples in the range, resets
counted, without extrapolation to its edges), `time`, aggregations with `by`, arithmetic, comparisons, `and`, `or`,
`unless`. Anything else raises, so that no rule is believed that wasn't understood.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = float | Vector

_LOOK_BACK_S = 300.0
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else float("nan"),
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": sum, "max": max, "min": min, "count": len, "avg": lambda values: sum(values) / len(values),
}  # fmt: skip


@dataclass
class Prometheus:
    """Samples by series: name and labels, the name as `__name__`. None marks a series that its target shows no more."""

    series: dict[Labels, list[tuple[float, float | None]]] = field(default_factory=dict)

    def take(self, text: str | None, at_s: float, **target: str) -> None:
        """A scrape at this time; None: the target didn't answer. `target` are its labels, as `job` and `instance`."""
        seen = {self._add({"__name__": "up", **target}, at_s, float(text is not None))}
        for family in text_string_to_metric_families(text or ""):
            for sample in family.samples:
                seen.add(self._add({"__name__": sample.name, **sample.labels, **target}, at_s, sample.value))
        for labels in self.series.keys() - seen:
            if target.items() <= dict(labels).items():
                self.series[labels].append((at_s, None))

    def query(self, expr: str, at_s: float) -> Vector:
        """What an expression gives at a time; empty means that an alert with it doesn't fire."""
        value = self._value(promql.parse(expr), at_s)
        return value if isinstance(value, dict) else {frozenset(): value}

    def _add(self, labels: Mapping[str, str], at_s: float, value: float) -> Labels:
        key = frozenset(labels.items())
        self.series.setdefault(key, []).append((at_s, value))
        return key

    def _value(self, node: Any, at_s: float) -> Value:
        match type(node).__name__:
            case "NumberLiteral":
                return float(node.val)
            case "ParenExpr":
                return self._value(node.expr, at_s)
            case "VectorSelector":
                return {
                    _unnamed(labels): value
                    for labels, samples in self._selected(node)
                    if (value := _last(samples, at_s - _LOOK_BACK_S, at_s)) is not None
                }
            case "Call":
                return self._call(node, at_s)
            case "AggregateExpr":
                return self._aggregate(node, at_s)
            case "BinaryExpr":
                return _binary(node, self._value(node.lhs, at_s), self._value(node.rhs, at_s))
            case kind:
                raise NotImplementedError(kind)

    def _selected(self, selector: Any) -> Iterator[tuple[Labels, list[tuple[float, float | None]]]]:
        for labels, samples in self.series.items():
            own = dict(labels)
            if own["__name__"] == selector.name and all(
                _matches(own.get(one.name, ""), one) for one in selector.matchers.matchers
            ):
                yield labels, samples

    def _call(self, node: Any, at_s: float) -> Value:
        if node.func.name == "time":
            return float(at_s)
        if node.func.name not in ("increase", "rate", "max_over_time"):
            raise NotImplementedError(node.func.name)
        (matrix,) = node.args
        range_s = matrix.range.total_seconds()
        divisor = range_s if node.func.name == "rate" else 1.0
        over: Callable[[list[float]], float | None] = _most if node.func.name == "max_over_time" else _growth
        found = {
            _unnamed(labels): over(
                [value for at, value in samples if value is not None and at_s - range_s <= at <= at_s]
            )
            for labels, samples in self._selected(matrix.vector_selector)
        }
        return {labels: value / divisor for labels, value in found.items() if value is not None}

    def _aggregate(self, node: Any, at_s: float) -> Value:
        vector = self._value(node.expr, at_s)
        assert isinstance(vector, dict)
        if node.modifier is not None and node.modifier.type != promql.AggModifierType.By:
            raise NotImplementedError(str(node.modifier.type))
        kept = set(node.modifier.labels) if node.modifier else set()
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(frozenset(pair for pair in labels if pair[0] in kept), []).append(value)
        return {labels: float(_AGGREGATES[str(node.op)](values)) for labels, values in groups.items()}


def names_in(expr: str) -> set[str]:
    """The metrics that an expression reads."""
    return set(_names(promql.parse(expr)))


def _names(node: Any) -> Iterator[str]:
    match type(node).__name__:
        case "VectorSelector":
            yield node.name
        case "MatrixSelector":
            yield node.vector_selector.name
        case "Call":
            for argument in node.args:
                yield from _names(argument)
        case "AggregateExpr" | "ParenExpr":
            yield from _names(node.expr)
        case "BinaryExpr":
            yield from _names(node.lhs)
            yield from _names(node.rhs)
        case "NumberLiteral":
            return
        case kind:
            raise NotImplementedError(kind)


def _binary(node: Any, left: Value, right: Value) -> Value:
    sign = str(node.op)
    if isinstance(left, dict) and isinstance(right, dict):
        if sign == "and":
            return {labels: value for labels, value in left.items() if labels in right}
        if sign == "or":
            return {**right, **left}
        if sign == "unless":
            return {labels: value for labels, value in left.items() if labels not in right}
    pairs: list[tuple[Labels, float, float]] = []
    match left, right:
        case dict(), dict():
            pairs = [(labels, value, right[labels]) for labels, value in left.items() if labels in right]
        case dict(), float():
            pairs = [(labels, value, right) for labels, value in left.items()]
        case float(), dict():
            pairs = [(labels, left, value) for labels, value in right.items()]
        case float(), float():
            pairs = [(frozenset(), left, right)]
    if sign in _COMPARISONS:  # of a scalar and a vector, what is kept is the vector's value
        shown = [(labels, b if isinstance(left, float) else a, a, b) for labels, a, b in pairs]
        return {labels: value for labels, value, a, b in shown if _COMPARISONS[sign](a, b)}
    return {labels: _ARITHMETIC[sign](a, b) for labels, a, b in pairs}


def _matches(value: str, matcher: Any) -> bool:
    match str(matcher.op).rpartition(".")[2]:
        case "Equal":
            return bool(value == matcher.value)
        case "NotEqual":
            return bool(value != matcher.value)
        case "Re":
            return re.fullmatch(matcher.value, value) is not None
        case "NotRe":
            return re.fullmatch(matcher.value, value) is None
        case kind:
            raise NotImplementedError(kind)


def _unnamed(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != "__name__")


def _last(samples: list[tuple[float, float | None]], since_s: float, until_s: float) -> float | None:
    found = [value for at_s, value in samples if since_s < at_s <= until_s]
    return found[-1] if found else None


def _most(values: list[float]) -> float | None:
    return max(values, default=None)


def _growth(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    return sum(after - before if after >= before else after for before, after in itertools.pairwise(values))
