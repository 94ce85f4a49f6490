"""Draws are uniform, and different for different purposes: exact facts, and statistics with stated odds."""

from __future__ import annotations

import math

from engine.sample.random import Purpose, uniform


def draws(count: int, **fixed: int) -> list[float]:
    return [
        uniform(fixed.get("seed", 1), fixed.get("choice", 0), position, Purpose.SAMPLE) for position in range(count)
    ]


def test_the_same_key_gives_the_same_number_for_ever() -> None:
    assert uniform(0, 0, 0, Purpose.SAMPLE) == 0.6299085342998937
    assert uniform((1 << 63) - 1, 3, 70_000, Purpose.SAMPLE) == 0.9794431580773181


def test_each_part_of_the_key_counts() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 << 32, 0, 0), (1 << 62, 0, 0), (0, 1 << 32, 0), (256, 0, 0)]
    assert len({uniform(*key, Purpose.SAMPLE) for key in keys}) == len(keys)


def test_draws_fill_the_unit_interval_evenly() -> None:
    """Kolmogorov-Smirnov on 20,000 draws. The key is fixed, so a change of the function is the only way to fail;
    a sound new function would fail with odds of 1 in 10,000."""
    found = sorted(draws(20_000))
    assert all(0 <= u < 1 for u in found)
    distance = max(max(abs(u - i / len(found)), abs(u - (i + 1) / len(found))) for i, u in enumerate(found))
    assert distance < math.sqrt(math.log(2 / 1e-4) / 2 / len(found))


def test_neighbouring_positions_and_seeds_are_unrelated() -> None:
    """Correlation of 20,000 pairs stays within 4 standard deviations: odds of a false alarm 1 in 16,000 a pair kind."""
    first, second = draws(20_001), draws(20_000, seed=2)
    for pairs in (zip(first[1:], first, strict=False), zip(first, second, strict=False)):
        products = [(a - 0.5) * (b - 0.5) * 12 for a, b in pairs]
        assert abs(sum(products) / len(products)) < 4 / math.sqrt(len(products))
