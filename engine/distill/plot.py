"""The loss of a training run as an SVG: each step as a point, their mean over the last ones as a line. Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 860, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 44
_TICKS = 5
_MOST_POINTS = 2000
_KEEPS = 0.95


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of all before each, later ones weighing more."""
    found: list[float] = []
    total = weight = 0.0
    for loss in losses:
        total, weight = total * _KEEPS + loss, weight * _KEEPS + 1
        found.append(total / weight)
    return found


def svg(losses: Sequence[float], title: str) -> str:
    """The whole picture of a run with at least one step."""
    low, high = min(losses), max(losses)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room

    def x(step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(len(losses) - 1, 1)

    def y(loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - loss) / (high - low)

    every = -(-len(losses) // _MOST_POINTS)
    steps = range(0, len(losses), every)
    line = smoothed(losses)
    points = " ".join(f"{x(step):.1f},{y(line[step]):.1f}" for step in steps)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(_TICKS + 1):
        loss = low + (high - low) * tick / _TICKS
        step = round((len(losses) - 1) * tick / _TICKS)
        parts.append(f'<line x1="{_LEFT}" y1="{y(loss):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(loss):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.3g}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{step + 1}</text>')
    parts += [f'<circle cx="{x(step):.1f}" cy="{y(losses[step]):.1f}" r="1.5" fill="#9ecae1"/>' for step in steps]
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>", ""])
