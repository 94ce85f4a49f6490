"""A sweep of pool ratios as an SVG: tokens a second, and the time between tokens, over the number of prefill hosts.

Pure text, no library, like engine/quality/plot.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 960, 380
_TOP, _BOTTOM, _PANEL, _LEFT, _GAP = 56, 52, 370, 70, 100
_SPLIT, _POOL = "#1f77b4", "#d62728"
_TICKS = 4


def svg(found: Mapping[str, Any]) -> str:
    """The whole picture of a sweep (engine/split/sweep.py)."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        *_panel(found, _LEFT, "output_tps", "Output tokens a second"),
        *_panel(found, _LEFT + _PANEL + _GAP, "gap_p99_ms", "99 % of gaps between tokens below, ms"),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _panel(found: Mapping[str, Any], left: int, name: str, title: str) -> Iterator[str]:
    """One figure over the ratios, and the one pool's beside it as a line."""
    rows: Sequence[Mapping[str, Any]] = found["two_pools"]
    pool = float(found["one_pool"][name])
    most = max([pool, *(float(row[name]) for row in rows)]) * 1.05 or 1.0
    bottom = _HEIGHT - _BOTTOM

    count = int(found["hosts"])

    def x(hosts: int) -> float:
        return left + _PANEL * hosts / count

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * value / most

    yield _text(left, 30, title, size=14)
    for tick in range(_TICKS + 1):
        value = most * tick / _TICKS
        yield _line(left, y(value), left + _PANEL, y(value))
        yield _text(left - 6, y(value) + 4, f"{value:,.3g}", anchor="end")
    for hosts in range(1, count):
        yield _text(x(hosts), bottom + 18, str(hosts), anchor="middle")
    yield _text(left + _PANEL / 2, bottom + 38, f"prefill hosts of {count}", anchor="middle")
    yield _line(left, y(pool), left + _PANEL, y(pool), color=_POOL, width=2)
    yield _text(left + _PANEL, y(pool) - 6, "one pool", anchor="end", color=_POOL)
    points = " ".join(f"{x(row['prefill_hosts']):.1f},{y(float(row[name])):.1f}" for row in rows)
    yield f'<polyline points="{points}" fill="none" stroke="{_SPLIT}" stroke-width="2"/>'
    for row in rows:
        yield f'<circle cx="{x(row["prefill_hosts"]):.1f}" cy="{y(float(row[name])):.1f}" r="4" fill="{_SPLIT}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, *, color: str = "#dddddd", width: int = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", color: str = "black") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )
