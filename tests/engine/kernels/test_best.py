"""The best column of each row under masks: every kernel against a search through the logits in plain Python."""

from __future__ import annotations

import math
import random as draws

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels import Kernels, reference
from engine.kernels.cpu import CpuKernels
from engine.kernels.cpu.build import library
from engine.kernels.values import Matrix, Rows
from tests.engine.kernels.test_cpu import BUILDS, FORMATS, MODEL, OLDER, older_flags, random, tiers, use


def words_of(masks: list[set[int]], num_words: int) -> torch.Tensor:
    bits = np.zeros((len(masks), num_words * 32), np.uint8)
    for row, mask in zip(bits, masks, strict=True):
        row[[column for column in mask if column < len(row)]] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def search(logits: torch.Tensor, masks: list[set[int]], num_words: int) -> list[int]:
    """The oracle; rows behind the masks have none."""
    found = []
    for index, row in enumerate(logits.tolist()):
        may_come = range(len(row))
        if index < len(masks):
            may_come = [column for column in may_come if column in masks[index] and column < num_words * 32]
        is_sound = all(math.isfinite(value) for value in row)
        found.append(max(may_come, key=lambda column: (row[column], -column), default=-1) if is_sound else -1)
    return found


def built(weight_format: str, build: str) -> CpuKernels:
    cpu, _ = tiers(weight_format)
    if build in BUILDS:
        use(cpu, build)
    else:
        cpu._lib = library(older_flags(build))
        cpu._has_tiles = False
    return cpu


def some_masks(rng: draws.Random, rows: int, vocab: int) -> list[set[int]]:
    """One of each kind by turns: one column, all, all but one, a few, half, none."""
    columns = range(vocab)
    kinds = (
        lambda: {rng.randrange(vocab)},
        lambda: set(columns),
        lambda: set(columns) - {rng.randrange(vocab)},
        lambda: set(rng.sample(columns, 5)),
        lambda: set(rng.sample(columns, vocab // 2)),
        set,
    )
    return [kinds[index % len(kinds)]() for index in range(rows)]


def check(kernels: Kernels, ready: Rows, matrix: Matrix, masks: list[set[int]], num_words: int) -> None:
    logits = kernels.logits(kernels.linear(ready, matrix))
    found = kernels.best(ready, matrix, words_of(masks, num_words) if masks else None)
    assert found.tolist() == search(logits, masks, num_words)


@pytest.mark.parametrize("build", [*BUILDS, *OLDER])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_masks_of_all_kinds_leave_the_best_that_may_come(weight_format: str, build: str) -> None:
    """Vocabularies that are whole words of masks, half a word more, and four columns more."""
    cpu, rng = built(weight_format, build), draws.Random(5)
    for vocab in (1024, 1040, 1044):
        matrix = cpu.pack_matrix(random(vocab, MODEL.hidden, seed=2), None)
        for rows in (1, 40):
            ready = cpu.pack_rows(random(rows, MODEL.hidden, seed=rows))
            masks = some_masks(rng, rows, vocab)
            whole = -(-vocab // 32)
            for num_masks in {0, rows // 2, rows}:
                check(cpu, ready, matrix, masks[:num_masks], whole)
            check(cpu, ready, matrix, masks, whole - 3)  # a vocabulary larger than its masks
            check(cpu, ready, matrix, masks, whole + 2)


@pytest.mark.parametrize("build", [*BUILDS, *OLDER])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_of_equals_the_first_that_may_come(weight_format: str, build: str) -> None:
    cpu = built(weight_format, build)
    weight = random(1024, MODEL.hidden, seed=2)
    equals = (17, 18, 500, 1023)
    for column in equals:
        weight[column] = weight[17]
    x = weight[17].repeat(5, 1)
    matrix, ready = cpu.pack_matrix(weight, None), cpu.pack_rows(x)
    everything = set(range(1024))
    masks = [everything - set(equals[:count]) for count in range(4)]
    assert cpu.best(ready, matrix, words_of(masks, 32)).tolist() == [*equals, 17]


@pytest.mark.parametrize("build", [*BUILDS, *OLDER])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_masks_change_no_row_but_their_own(weight_format: str, build: str) -> None:
    """And a row that isn't finite has no best column, whether it has a mask or not."""
    cpu, rng = built(weight_format, build), draws.Random(6)
    matrix = cpu.pack_matrix(random(1024, MODEL.hidden, seed=2), None)
    x = random(40, MODEL.hidden)
    x[3, 5] = x[30, 7] = float("nan")
    ready = cpu.pack_rows(x)
    free = cpu.best(ready, matrix).tolist()
    found = cpu.best(ready, matrix, words_of(some_masks(rng, 20, 1024), 32)).tolist()
    assert found[20:] == free[20:]
    assert (found[3], found[30], found.count(-1)) == (-1, -1, 5)  # these two, and three rows whose masks are empty


@given(st.data())
def test_the_reference_is_a_search(data: st.DataObject) -> None:
    width, rows = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 4))
    values = st.lists(st.sampled_from([-1.0, 0.0, 1.0, 2.0]), min_size=width, max_size=width)
    x = torch.tensor(data.draw(st.lists(values, min_size=rows, max_size=rows)))
    masks = data.draw(st.lists(st.sets(st.integers(0, width - 1)), max_size=rows))
    num_words = data.draw(st.integers(1, 3))
    allowed = words_of(masks, num_words) if masks else None
    assert reference.best(x, allowed).tolist() == search(x, masks, num_words)
