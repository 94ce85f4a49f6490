"""Heads begin as the model's own head, look into no other text, learn, and run as they were trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.sample.row import SampleRow
from engine.spec.heads_file import Heads
from engine.spec.heads_loss import advanced, heads_logits, heads_loss, initial_parts, right_in_a_row
from engine.spec.heads_model import PackedHeads

HIDDEN, WORDS, HEADS = 16, 24, 3


def made(rows: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Heads with something in them; rows, embeddings."""
    generator = torch.Generator().manual_seed(seed)
    parts = initial_parts(torch.randn(WORDS, HIDDEN, generator=generator), num_heads=HEADS, inner=8, seed=seed)
    for place in range(HEADS):
        parts[f"{place}.down"] = torch.randn(HIDDEN, 8, generator=generator)
    return parts, torch.randn(rows, HIDDEN, generator=generator), torch.randn(rows, HIDDEN, generator=generator)


def test_they_begin_as_the_models_own_head() -> None:
    head = torch.randn(WORDS, HIDDEN)
    parts = initial_parts(head, num_heads=HEADS, inner=8, seed=1)
    rows, embedded = torch.randn(9, HIDDEN), torch.randn(9, HIDDEN)
    for place, logits in enumerate(heads_logits(parts, HEADS, rows, embedded, "silu")):
        assert torch.equal(logits, rows[: 9 - place - 1] @ head.T)


def test_each_head_is_told_the_tokens_before_its_own() -> None:
    parts, rows, embedded = made(9)
    found = heads_logits(parts, HEADS, rows, embedded, "silu")
    x = rows
    for place in range(HEADS):
        x = advanced(parts, place, x[:-1], embedded[place : place + len(x) - 1], "silu")
        assert torch.allclose(found[place], x @ parts["head"].T)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_texts_beside_each_other_count_as_if_they_were_alone(sizes: list[int], seed: int) -> None:
    parts, rows, embedded = made(sum(sizes), seed)
    targets = torch.randn(sum(sizes), WORDS, generator=torch.Generator().manual_seed(seed))
    columns = targets.argmax(-1)
    owners = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    together = right_in_a_row(parts, HEADS, rows, embedded, columns, owners, "silu")
    ends = torch.tensor(sizes).cumsum(0).tolist()
    for start, end in zip([0, *ends], ends, strict=False):
        part = slice(start, end)
        alone = right_in_a_row(parts, HEADS, rows[part], embedded[part], columns[part], owners[part], "silu")
        assert torch.equal(together[part], alone)
    whole = heads_loss(parts, HEADS, rows, embedded, targets, owners, "silu")
    other = torch.where(owners[:, None] == owners[-1], embedded, embedded + 1)  # of all texts but the last
    if len(sizes) > 1 and max(sizes[:-1]) == 1:  # whose heads have nothing to say
        assert torch.allclose(whole, heads_loss(parts, HEADS, rows, other, targets, owners, "silu"))


def test_they_learn_what_a_text_says() -> None:
    """A text that goes round: all that a head must know is the token it was told."""
    generator = torch.Generator().manual_seed(2)
    embedding = torch.randn(WORDS, HIDDEN, generator=generator)
    next_ids = torch.arange(200) % WORDS
    head, rows = torch.randn(WORDS, HIDDEN, generator=generator), torch.randn(200, HIDDEN, generator=generator)
    targets = 9.0 * torch.nn.functional.one_hot(next_ids, WORDS).float()
    parts = initial_parts(head, num_heads=HEADS, inner=32, seed=1)
    owners = torch.zeros(200, dtype=torch.int64)
    asked = (rows, embedding[next_ids], targets, owners, "silu")
    before = right_in_a_row(parts, HEADS, rows, embedding[next_ids], next_ids, owners, "silu")
    for part in parts.values():
        part.requires_grad_()
    optimizer = torch.optim.AdamW(parts.values(), lr=1e-2)
    first = None
    for _ in range(80):
        optimizer.zero_grad()
        loss = heads_loss(parts, HEADS, *asked)
        first = first or loss.item()
        loss.backward()
        optimizer.step()
    after = right_in_a_row(parts, HEADS, rows, embedding[next_ids], next_ids, owners, "silu")
    assert loss.item() < first / 4
    assert before[:197].float().mean() < 0.2 and after[:197].float().mean() > 2.5
    assert (after[197:] == -1).all(), "behind the last rows nothing is known"


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8"])
def test_they_run_as_they_were_trained(tiny_model: Path, weights: str) -> None:
    kv = "float32" if weights == "float32" else "bf16"
    runner = ModelRunner(
        EngineConfig(model=str(tiny_model), weight_format=weights, kv_format=kv, num_blocks=4, threads=1, device="cpu")
    )
    model = runner.model_config
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(model.vocab_size, generator=generator)[:128]
    parts = initial_parts(runner.embedding[ids].float(), num_heads=HEADS, inner=model.hidden, seed=2)
    for place in range(HEADS):
        parts[f"{place}.down"] = torch.randn(model.hidden, model.hidden, generator=generator) * 0.1
    heads = Heads(
        model_digest=runner.digest,
        num_heads=HEADS,
        hidden=model.hidden,
        inner=model.hidden,
        vocab_size=model.vocab_size,
        parts=parts | {"ids": ids.int()},
    )
    packed = PackedHeads(heads, model, runner.kernels, runner.embedding)
    states = torch.randn(5, model.hidden, generator=generator)
    x, expected = packed.begin(list(states.numpy())), states
    told = [7, 8, 9, 10, 11]
    greedy, drawn = SamplingParams(max_tokens=9, temperature=0), SamplingParams(max_tokens=9, seed=3, temperature=1.5)
    for place, count in enumerate((5, 4, 2)):
        rows = [SampleRow(greedy if place < 2 or i else drawn, 20 + place) for i in range(count)]
        found = packed.next_ids(place, x, told[:count], rows)
        expected = advanced(parts, place, expected[:count], runner.embedding[told[:count]].float(), model.activation)
        atol = {"float32": 1e-4, "bf16": 0.05, "int8": 0.2}[weights]
        assert torch.allclose(x[:count], expected, atol=atol, rtol=0.05)
        best = ids[(expected @ parts["head"].T).argmax(-1)].tolist()
        sure = [i for i in range(count) if place < 2 or i]
        if weights == "float32":
            assert [found[i] for i in sure] == [best[i] for i in sure]
        assert all(token in ids.tolist() for token in found)
        told = [int(token) for token in found if token is not None]


def test_a_row_that_is_no_number_proposes_nothing(tiny_model: Path) -> None:
    runner = ModelRunner(EngineConfig(model=str(tiny_model), num_blocks=4, threads=1, device="cpu"))
    model = runner.model_config
    parts = initial_parts(runner.embedding[:64].float(), num_heads=1, inner=64, seed=2)
    heads = Heads(
        model_digest="", num_heads=1, hidden=model.hidden, inner=64, vocab_size=model.vocab_size,
        parts=parts | {"ids": torch.arange(64, dtype=torch.int32)},
    )  # fmt: skip
    packed = PackedHeads(heads, model, runner.kernels, runner.embedding)
    for params in (SamplingParams(max_tokens=1, temperature=0), SamplingParams(max_tokens=1, seed=1)):
        x = packed.begin([torch.full((model.hidden,), float("nan")).numpy(), torch.ones(model.hidden).numpy()])
        broken, sound = packed.next_ids(0, x, [5, 5], [SampleRow(params, 9)] * 2)
        assert broken is None and sound is not None
