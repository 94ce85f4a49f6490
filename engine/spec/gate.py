"""How many draft tokens a step takes: as many as give the most tokens for its time; pure arithmetic.

A step with windows of k tokens yields, beside one token of each sequence, for each window the sum over its places of
the chance that all drafts up to there are right. These chances fall along a window, so taking tokens in their order
over all windows is taking the best windows of each total size; of all sizes the one with the most tokens a second is
taken, if it beats the step without drafts by a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MARGIN = 1.05
"""What a step with drafts must be expected to bring, as a ratio: guesses are never exact, and windows cost a little."""


def window_lengths(
    odds: Sequence[Sequence[float]],
    num_decodes: int,
    most_tokens: int,
    cost: Callable[[int], float],
    proposing: Callable[[Sequence[int]], float] = lambda lengths: 0.0,
) -> list[int]:
    """For each sequence the length of its window. `odds` are chances of its tokens, each if those before it are right;
    `num_decodes` sequences get a token in any case; `cost(rows)` is what a step costs, `proposing(lengths)` what comes
    before it."""
    gains: list[tuple[float, int]] = []
    for index, chances in enumerate(odds):
        all_right = 1.0
        for chance in chances:
            all_right *= chance
            gains.append((all_right, index))
    gains.sort(key=lambda gain: -gain[0])  # stable: within a window places stay in order
    tokens = float(num_decodes)
    best_rate = MARGIN * tokens / cost(num_decodes)
    lengths, best = [0] * len(odds), [0] * len(odds)
    for size, (gain, index) in enumerate(gains[:most_tokens], 1):
        tokens += gain
        lengths[index] += 1
        rate = tokens / (cost(num_decodes + size) + proposing(lengths))
        if rate > best_rate:
            best_rate, best = rate, lengths.copy()
    return best
