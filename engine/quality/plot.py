"""A quality report as an SVG: the mean KL of each row beside its limit, and the tails. Pure text, no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
_WIDTH, _LABELS, _BARS, _GAP, _TAIL = 1120, 310, 290, 90, 390
_ROW, _TOP, _BOTTOM, _LEAST_HEIGHT = 26, 56, 44, 240
_FLOOR = 1e-5
"""The least KL that is drawn; what is below lies on it."""

Scale = Callable[[float], float]


def svg(report: Mapping[str, Any]) -> str:
    """The whole picture of a report with at least one row."""
    rows = report["rows"]
    height = max(len(rows) * _ROW, _LEAST_HEIGHT)
    most = max([_FLOOR * 10, *(value for row in rows for value in _values(row))])
    decades = range(round(math.log10(_FLOOR)), math.ceil(math.log10(most)) + 1)
    low, high = 10.0 ** decades[0], 10.0 ** decades[-1]
    left, right = _LABELS, _LABELS + _BARS + _GAP
    of_kl = _log_scale(low, high, left, left + _BARS)
    of_tail = _log_scale(low, high, _TOP + height, _TOP)
    shares = [0.5, 0.1, 0.01, 0.001]
    of_share = _log_scale(shares[0], 1 / max(max(row["tokens"] for row in rows), 2000), right, right + _TAIL)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_TOP + height + _BOTTOM}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        _text(left, 24, "Mean KL in nats; | is the limit", size=14),
        _text(right, 24, "KL that a share of positions exceeds", size=14),
        *_grid(decades, of_kl, of_tail, height, right),
        *(_share_tick(share, of_share(share), height) for share in shares),
    ]
    for number, row in enumerate(rows):
        color = _COLORS[number % len(_COLORS)]
        dash = "" if number < len(_COLORS) else ' stroke-dasharray="5 3"'
        parts += _bar(row, _TOP + number * _ROW, color, of_kl)
        points = " ".join(f"{of_share(share):.1f},{of_tail(kl):.1f}" for share, kl in _tail(row))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
    return "\n".join([*parts, "</svg>", ""])


def _values(row: Mapping[str, Any]) -> Iterator[float]:
    yield from (kl for _, kl in _tail(row))
    yield row["kl"] or 0.0
    yield row["limit"]["kl"] if row["limit"] else 0.0


def _tail(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(share, KL), the largest of all as that of one position."""
    points = ((point["share"] or 1 / row["tokens"], point["kl"]) for point in row["kl_tail"])
    known = sorted(((share, kl) for share, kl in points if kl is not None), reverse=True)
    return [point for point in known if point[0] >= 1 / row["tokens"]]


def _log_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Pixels of a value between two others, by decades; what is outside lies on the edge."""
    span = math.log(high / low)

    def of(value: float) -> float:
        share = math.log(max(value, 1e-300) / low) / span
        return start + (end - start) * min(max(share, 0.0), 1.0)

    return of


def _grid(decades: Sequence[int], of_kl: Scale, of_tail: Scale, height: int, right: int) -> Iterator[str]:
    for power in decades:
        name = f"{10.0**power:g}"
        x, y = of_kl(10.0**power), of_tail(10.0**power)
        yield _line(x, _TOP, x, _TOP + height)
        yield _text(x, _TOP + height + 18, name, anchor="middle")
        yield _line(right, y, right + _TAIL, y)
        yield _text(right - 6, y + 4, name, anchor="end")


def _share_tick(share: float, x: float, height: int) -> str:
    tick = _text(x, _TOP + height + 18, f"{100 * share:g} %", anchor="middle")
    return _line(x, _TOP, x, _TOP + height) + tick


def _bar(row: Mapping[str, Any], y: int, color: str, of_kl: Scale) -> Iterator[str]:
    name = f"{row['model']}: {row['weight_format']}, KV {row['kv_format']}"
    kl = row["kl"]
    end = of_kl(_FLOOR if kl is None else kl)
    middle = y + _ROW // 2
    yield _text(_LABELS - 8, middle + 4, name if len(name) <= 46 else f"…{name[-45:]}", anchor="end", color=color)
    yield f'<rect x="{_LABELS}" y="{y + 4}" width="{end - _LABELS:.1f}" height="{_ROW - 8}" fill="{color}"/>'
    if row["limit"]:
        x = of_kl(row["limit"]["kl"])
        yield _line(x, y + 1, x, y + _ROW - 1, color="black", width=2)
        end = max(end, x)
    verdict = "" if row["verdict"] == "unquantized" else f" {row['verdict']}"
    yield _text(end + 5, middle + 4, ("not a number" if kl is None else f"{kl:.2g}") + verdict, size=11)


def _line(x1: float, y1: float, x2: float, y2: float, *, color: str = "#dddddd", width: int = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", color: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )
