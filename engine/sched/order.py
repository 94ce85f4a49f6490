"""Plans the order of one window: folds duplicates, walks the prefix tree, prices its sharing, cuts units.

1. Prompts are sorted by their token bytes. Token ids are big-endian, so byte order is token order, and the sorted
   list is a depth-first walk of the prefix tree: whoever shares most with a prompt stands next to it.
2. Equal prompts with equal fold keys become one row. A row never has more lines than a unit.
3. Where two neighbours share less than one granule the list falls into groups, and groups are laid out by decode
   tokens per prompt token, most first: long answers start early and later prefills fill the steps beside them.
   This can't change a price: prompts of different groups share less than a granule, which counts as nothing.
4. The order is cut into units, where neighbours share least.

The planned cached tokens of a row are what a perfect cache would hold of it: the longest prefix it shares with any
earlier row, but never its last token, in whole granules; a further row of a fold group is a duplicate and has its
whole prompt cached. Inside a group any earlier row means the row before, because
sharing only falls with distance in a sorted list. Memory beyond the input is a few hundred bytes a row. This module
plans one window; it does not know lengths of answers, engines, files or money.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GRANULE_TOKENS = 16
"""Cached tokens are counted in whole granules, whatever block size an engine has."""

TOKEN_BYTES = 4

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One request to run. `members` are the input indices it answers; the first one is billed
    `planned_cached_tokens`, each further one has its whole prompt cached."""

    members: tuple[int, ...]
    planned_cached_tokens: int


class PrefixUse(NamedTuple):
    """A prefix that ends a unit, and how many later units of the window begin with it."""

    depth_tokens: int
    digest_hex: str
    later_units: int


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Rows in plan order; `units` are consecutive slices of them; `prefix_uses` has one list a unit, deepest first."""

    rows: list[PlannedRow]
    units: list[slice]
    prefix_uses: list[list[PrefixUse]]


def plan_window(
    prompts: Sequence[bytes],
    fold_keys: Sequence[bytes | None],
    max_tokens: Sequence[int],
    *,
    unit_lines: int,
    unit_tokens: int,
) -> WindowPlan:
    """Plans requests given as big-endian uint32 token bytes.

    Requests with equal prompts and equal fold keys (not None) are one row. `unit_lines` bounds the lines of a unit,
    `unit_tokens` the prompt and output tokens of its rows; a row larger than that is a unit of its own.
    """
    if not len(prompts) == len(fold_keys) == len(max_tokens):
        raise ValueError("prompts, fold_keys and max_tokens must have the same length.")
    if unit_lines < 1 or unit_tokens < 1:
        raise ValueError("unit_lines and unit_tokens must be at least 1.")
    rows = _by_density(_sorted_rows(prompts, fold_keys, unit_lines), prompts, max_tokens)
    units = _cut(rows, prompts, max_tokens, unit_lines, unit_tokens)
    planned = [PlannedRow(row.members, _planned_cached_tokens(row, prompts)) for row in rows]
    return WindowPlan(planned, units, _prefix_uses(rows, units, prompts))


def common_prefix_tokens(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix of two token byte strings, in tokens."""
    size = min(len(a), len(b)) // TOKEN_BYTES
    differs = np.frombuffer(a, np.uint32, size) != np.frombuffer(b, np.uint32, size)
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


class _Row(NamedTuple):
    """`shared_tokens` with the row before it in sorted order; `is_repeat`: a further piece of a fold group."""

    members: tuple[int, ...]
    shared_tokens: int
    is_repeat: bool


def _num_tokens(prompt: bytes) -> int:
    return len(prompt) // TOKEN_BYTES


def _whole_granules(tokens: int) -> int:
    return tokens - tokens % GRANULE_TOKENS


def _sorted_rows(prompts: Sequence[bytes], fold_keys: Sequence[bytes | None], unit_lines: int) -> list[_Row]:
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    rows: list[_Row] = []
    start = 0
    while start < len(order):
        prompt, end = prompts[order[start]], start + 1
        while end < len(order) and prompts[order[end]] == prompt:
            end += 1
        shared = common_prefix_tokens(prompts[order[start - 1]], prompt) if start else 0
        for members in _fold(order[start:end], fold_keys):
            for first in range(0, len(members), unit_lines):
                rows.append(_Row(tuple(members[first : first + unit_lines]), shared, first > 0))
                shared = _num_tokens(prompt)
        start = end
    return rows


def _fold(same_prompt: Sequence[int], fold_keys: Sequence[bytes | None]) -> list[list[int]]:
    """Groups indices of one prompt by fold key, in order of first appearance; None stays alone."""
    folds: dict[bytes | int, list[int]] = {}
    for index in same_prompt:
        key = fold_keys[index]
        folds.setdefault(index if key is None else key, []).append(index)
    return list(folds.values())


def _by_density(rows: list[_Row], prompts: Sequence[bytes], max_tokens: Sequence[int]) -> list[_Row]:
    """Whole groups by decode tokens per computed prompt token, most first; ties stay in sorted order."""
    groups: list[list[_Row]] = []
    for row in rows:
        if not groups or (row.shared_tokens < GRANULE_TOKENS and not row.is_repeat):
            groups.append([])
        groups[-1].append(row)

    def density(group: list[_Row]) -> float:
        prompt_tokens = sum(_num_tokens(prompts[row.members[0]]) - row.shared_tokens for row in group)
        return sum(max_tokens[row.members[0]] for row in group) / max(prompt_tokens, 1)

    groups.sort(key=density, reverse=True)
    return [row for group in groups for row in group]


def _planned_cached_tokens(row: _Row, prompts: Sequence[bytes]) -> int:
    prompt_tokens = _num_tokens(prompts[row.members[0]])
    if row.is_repeat:
        return prompt_tokens
    return _whole_granules(min(row.shared_tokens, max(prompt_tokens - 1, 0)))


def _cut(
    rows: list[_Row], prompts: Sequence[bytes], max_tokens: Sequence[int], unit_lines: int, unit_tokens: int
) -> list[slice]:
    """Fills units to their limits, then moves each cut back, at most to the middle, to where sharing is least."""
    units: list[slice] = []
    start = 0
    while start < len(rows):
        lines = tokens = 0
        end = start
        while end < len(rows):
            first = rows[end].members[0]
            lines += len(rows[end].members)
            tokens += _num_tokens(prompts[first]) + max_tokens[first]
            if end > start and (lines > unit_lines or tokens > unit_tokens):
                break
            end += 1
        if end < len(rows):
            middle = start + (end - start) // 2 + 1
            end = min(range(end, middle - 1, -1), key=lambda cut: rows[cut].shared_tokens)
        units.append(slice(start, end))
        start = end
    return units


def _prefix_uses(rows: list[_Row], units: list[slice], prompts: Sequence[bytes]) -> list[list[PrefixUse]]:
    """What each unit leaves behind for later ones. From last to first, `depths` holds (depth, units that share it)
    with the unit at hand, deepest first; a step to the left caps all depths by the least sharing on the way."""
    uses: list[list[PrefixUse]] = []
    depths: list[tuple[int, int]] = []
    for number in range(len(units) - 1, -1, -1):
        last_prompt = prompts[rows[units[number].stop - 1].members[0]]
        if number + 1 < len(units):
            later = units[number + 1]
            inside = [rows[i].shared_tokens for i in range(later.start + 1, later.stop)]
            depths = [(_UNLIMITED, 1), *_capped(depths, _whole_granules(min(inside, default=_UNLIMITED)))]
            depths = _capped(depths, _whole_granules(rows[later.start].shared_tokens))
        total, found = 0, []
        for depth, count in depths:
            total += count
            digest = hashlib.blake2b(last_prompt[: depth * TOKEN_BYTES], digest_size=16).hexdigest()
            found.append(PrefixUse(depth, digest, total))
        uses.append(found)
    return uses[::-1]


def _capped(depths: list[tuple[int, int]], cap: int) -> list[tuple[int, int]]:
    """Depths limited to `cap`; what shares nothing is dropped."""
    deeper = sum(count for depth, count in depths if depth >= cap)
    shallower = [entry for entry in depths if entry[0] < cap]
    return [(cap, deeper), *shallower] if cap and deeper else shallower if cap else []
