"""The C++ kernels against plain torch: each verb over round and weird shapes, attention over random block forests.

Kernels that only move or scale values agree to a bf16 step; grouping and neighbours may not change a single bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.layout import PairLayout
from engine.kernels import choose
from engine.kernels.cpu import BLOCK_TOKENS, CpuAttentionPlan, CpuKernels
from engine.kernels.cpu.build import _FLAGS, BuildError, library
from engine.kernels.spans import SequenceSpan
from engine.kernels.torch_tier import TorchKernels
from engine.kernels.values import Rows
from engine.model.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=96,
    hidden=192,
    mlp=128,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    context_tokens=4096,
    norm_eps=1e-5,
    rope_theta=1e4,
)
FORMATS = ("int8", "bf16")
OLDER = {"AVX2": ("-mavx2", "-mfma"), "SSE2": ("-msse2",)}
LOG2_E = math.log2(math.e)  # weights are powers of two, so queries carry this factor


def tiers(weight_format: str, kv_format: str = "bf16", **changes: int) -> tuple[CpuKernels, TorchKernels]:
    model = replace(MODEL, **changes)
    cpu = CpuKernels(model, weight_format=weight_format, kv_format=kv_format, block_tokens=BLOCK_TOKENS)
    return cpu, TorchKernels(model, weight_format=weight_format, kv_format="bf16", block_tokens=BLOCK_TOKENS)


NO_AMX = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
BUILDS = {"this processor": (), "no AMX": NO_AMX, "no matmul of ours": (*NO_AMX, "-mno-avx512bf16")}


def use(cpu: CpuKernels, build: str) -> None:
    """From here on `cpu` is what it would be on a processor with less than this one."""
    cpu._lib = library((*_FLAGS, *BUILDS[build]))
    cpu._has_tiles = bool(cpu._lib.has_tiles())
    assert not (cpu._has_tiles and build == "no matmul of ours")


def older_flags(name: str) -> tuple[str, ...]:
    """What the compiler is told for one of the OLDER processors."""
    return ("-O3", "-std=c++17", *OLDER[name], "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-w")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def value(rows: Rows) -> torch.Tensor:
    exact = rows.values.float()
    return exact if rows.scale is None else exact * rows.scale[:, None]


def assert_near(got: torch.Tensor, want: torch.Tensor, steps: float) -> None:
    """Within `steps` times 1/127 of the largest value of the row: a step of the coarser of the two formats."""
    allowed = want.abs().amax(dim=-1, keepdim=True) / 127 * steps
    assert ((got - want).abs() <= allowed).all(), f"off by {((got - want).abs() / allowed).max():.2f} of the allowed"


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 29, 64, 300])
def test_row_kernels_are_the_reference(weight_format: str, rows: int, build: str) -> None:
    cpu, torch_tier = tiers(weight_format)
    use(cpu, build)
    x, weight = random(rows, MODEL.hidden) * 7, random(MODEL.hidden, seed=1)
    assert_near(value(cpu.norm(x, weight, 1e-5)), value(torch_tier.norm(x, weight, 1e-5)), 1.01)
    assert_near(value(cpu.pack_rows(x)), value(torch_tier.pack_rows(x)), 1.01)
    matrix = random(2 * MODEL.mlp, MODEL.hidden, seed=2) / 10
    packed, plain = cpu.pack_matrix(matrix, None), torch_tier.pack_matrix(matrix, None)
    same_rows = torch_tier.pack_rows(x)
    assert_near(cpu.logits(cpu.linear(same_rows, packed)), torch_tier.logits(torch_tier.linear(same_rows, plain)), 1.0)
    assert_near(value(cpu.linear_gated(same_rows, packed)), value(torch_tier.linear_gated(same_rows, plain)), 2.0)
    residual, other = random(rows, 2 * MODEL.mlp, seed=3), random(rows, 2 * MODEL.mlp, seed=3)
    cpu.linear_add(same_rows, packed, residual)
    torch_tier.linear_add(same_rows, plain, other)
    assert_near(residual, other, 1.0)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_not_finite_stays_so_and_stays_in_its_row(weight_format: str) -> None:
    cpu, _ = tiers(weight_format)
    x, weight = random(5, MODEL.hidden), torch.ones(MODEL.hidden)
    sound = value(cpu.norm(x, weight, 1e-5))
    for bad in (float("nan"), float("inf")):
        x[2, 7] = bad
        got = value(cpu.norm(x, weight, 1e-5))
        assert not got[2].isfinite().all()
        assert torch.equal(got[[0, 1, 3, 4]], sound[[0, 1, 3, 4]])


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_comes_out_the_same_whatever_stands_beside_it(weight_format: str, build: str) -> None:
    cpu = CpuKernels(MODEL, weight_format=weight_format, block_tokens=BLOCK_TOKENS, reproducible=True)
    use(cpu, build)
    packed = cpu.pack_matrix(random(2 * MODEL.mlp, MODEL.hidden, seed=2), None)
    x, residual = random(333, MODEL.hidden), random(333, 2 * MODEL.mlp, seed=1)
    ones, weight = residual.clone(), torch.ones(MODEL.hidden)
    cpu.linear_add(cpu.norm(x, weight, 1e-5), packed, residual)
    silu = value(cpu.linear_gated(cpu.norm(x, weight, 1e-5), packed))
    for first, last in ((0, 1), (31, 33), (100, 116), (200, 333)):
        mine = cpu.norm(x[first:last].contiguous(), weight, 1e-5)
        part = ones[first:last].clone()
        cpu.linear_add(mine, packed, part)
        assert torch.equal(part, residual[first:last])
        assert torch.equal(value(cpu.linear_gated(mine, packed)), silu[first:last])


def filled_caches(tier: CpuKernels | TorchKernels, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All NaN, as freed blocks are in poison mode."""
    k, v = (
        torch.full((num_blocks, *shape), float("nan"), dtype=torch.bfloat16)
        for shape in (tier.layout.k_shape, tier.layout.v_shape)
    )
    return k, v


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [47, 16, 17, 5], [33, 14, 15]])
def test_qkv_lands_where_it_belongs(weight_format: str, slots: list[int]) -> None:
    cpu, torch_tier = tiers(weight_format)
    heads = MODEL.num_heads + 2 * MODEL.num_kv_heads
    matrix, x = random(heads * MODEL.head_dim, MODEL.hidden) / 10, random(len(slots), MODEL.hidden, seed=1)
    turns = random(len(slots), MODEL.head_dim // 2, seed=2)
    rows, at = torch_tier.pack_rows(x), torch.tensor(slots)
    found = []
    for tier in (cpu, torch_tier):
        k, v = filled_caches(tier, 3)
        q = tier.store_qkv(tier.linear(rows, tier.pack_matrix(matrix, None)), turns.cos(), turns.sin(), k, v, at)
        found.append((q, tier.layout.k_to_wire(k), tier.layout.v_to_wire(v)))
    (q, k, v), (want_q, want_k, want_v) = found
    assert_near(q.float(), want_q.float() * MODEL.head_dim**-0.5 * LOG2_E, 1.0)
    for got, want in ((k, want_k), (v, want_v)):
        written = ~want.isnan()
        assert_near(got[written].float()[None], want[written].float()[None], 1.0)
    untouched = want_k.isnan()
    assert k[untouched].isnan().all()


def fours(wire: torch.Tensor) -> torch.Tensor:
    """[n, kv_heads, tokens, dim] -> [n, kv_heads, dim / 4, tokens, 4], and back."""
    return wire.unflatten(-1, (-1, 4)).transpose(2, 3) if wire.dim() == 4 else wire.transpose(2, 3).flatten(3)


def scaled_blocks(pair: PairLayout, wire: torch.Tensor, is_v: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """wire [n, kv_heads, tokens, dim] as int8 blocks with scales (cache/layout.py), and the values these are."""
    scale = wire.float().abs().amax(dim=-1, keepdim=True) / 127
    values = (wire.float() / scale).round()
    ordered = (pair.v_from_wire if is_v else fours)(values).to(torch.int8).flatten(2)
    return torch.cat((ordered, scale[..., 0].contiguous().view(torch.int8)), dim=2).contiguous(), values * scale


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [47, 16, 17, 5], [33, 14, 15]])
def test_int8_kv_is_quantized_by_token_and_head(slots: list[int]) -> None:
    cpu, torch_tier = tiers("bf16", "int8")
    heads = MODEL.num_heads + 2 * MODEL.num_kv_heads
    matrix, x = random(heads * MODEL.head_dim, MODEL.hidden) / 10, random(len(slots), MODEL.hidden, seed=1)
    turns, at = random(len(slots), MODEL.head_dim // 2, seed=2), torch.tensor(slots)
    k, v = (torch.full((3, *cpu.layout.k_shape), -1, dtype=torch.int8) for _ in range(2))
    cpu.store_qkv(cpu.linear(cpu.pack_rows(x), cpu.pack_matrix(matrix, None)), turns.cos(), turns.sin(), k, v, at)
    want_k, want_v = filled_caches(torch_tier, 3)
    product = torch_tier.linear(torch_tier.pack_rows(x), torch_tier.pack_matrix(matrix, None))
    torch_tier.store_qkv(product, turns.cos(), turns.sin(), want_k, want_v, at)
    pair, size = PairLayout(BLOCK_TOKENS, MODEL.num_kv_heads, MODEL.head_dim), BLOCK_TOKENS * MODEL.head_dim
    k_shape = (MODEL.num_kv_heads, MODEL.head_dim // 4, BLOCK_TOKENS, 4)
    for got, want, back, shape in ((k, want_k, fours, k_shape), (v, want_v, pair.v_to_wire, pair.v_shape)):
        values = back(got[..., :size].reshape(3, *shape)).float()
        scale = got[..., size:].contiguous().view(torch.float32)
        wire = torch_tier.layout.k_to_wire(want)
        written = ~wire.isnan()
        assert scale.isnan().equal(wire[..., 0].isnan()), "nothing else was written"
        assert_near(
            (values * scale[..., None])[written].view(-1, MODEL.head_dim), wire[written].view(-1, MODEL.head_dim), 1.1
        )


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [heads, dim] scaled, k and v [length, kv_heads, dim] -> [heads * dim] in float64."""
    share = q.shape[0] // k.shape[1]
    keys, values = (t.double().repeat_interleave(share, dim=1) for t in (k, v))
    weights = torch.einsum("hd,lhd->hl", q.double(), keys).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, values).flatten()


@settings(max_examples=40, deadline=None)
@given(
    kv_format=st.sampled_from(["bf16", "int8"]),
    build=st.sampled_from([*BUILDS]),
    shared=st.sampled_from([0, 3, 4, 9, 16]),
    own=st.lists(st.tuples(st.integers(1, 150), st.sampled_from([1, 1, 2, 33])), min_size=1, max_size=6),
    heads=st.sampled_from([(2, 1), (6, 2), (4, 4), (8, 1)]),
    dim=st.sampled_from([32, 64, 96, 128]),
    window=st.sampled_from([0, 0, 1, 24, 64, 150]),
)
def test_attention_is_dense_attention_and_grouping_changes_no_bit(
    kv_format: str,
    build: str,
    shared: int,
    own: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    window: int,
) -> None:
    num_heads, kv_heads = heads
    cpu, _ = tiers("bf16", kv_format, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=dim)
    use(cpu, build)
    prefix, tokens = tuple(range(shared)), BLOCK_TOKENS
    sequences, needed, row = [], shared, 0
    for length, size in own:
        size = min(size, length)
        blocks = -(-length // tokens)
        table = prefix + tuple(range(needed, needed + blocks))
        needed += blocks
        sequences.append(SequenceSpan(row, size, shared * tokens + length - size, table))
        row += size
    wire = random(2, needed, kv_heads, tokens, dim, seed=shared).bfloat16()
    if kv_format == "int8":
        pair = PairLayout(tokens, kv_heads, dim)
        (k, exact_k), (v, exact_v) = (scaled_blocks(pair, wire[side], bool(side)) for side in (0, 1))
        wire = torch.stack((exact_k, exact_v))
    else:
        k, v = cpu.layout.k_from_wire(wire[0]).contiguous(), cpu.layout.v_from_wire(wire[1]).contiguous()
    q = (random(row, num_heads, dim, seed=1) * dim**-0.5).bfloat16()
    got = cpu.attend(q, k, v, cpu.plan_attention(sequences), window)
    for seq in sequences:
        keys, values = (
            wire[side][list(seq.block_ids)].transpose(1, 2).flatten(0, 1)[: seq.length].float() for side in (0, 1)
        )
        for i in range(seq.num_rows):
            end = seq.start + i + 1
            seen = slice(max(0, end - window) if window else 0, end)
            want = dense(q[seq.row + i] / LOG2_E, keys[seen], values[seen])
            torch.testing.assert_close(got[seq.row + i].double(), want, atol=0.02, rtol=0.02)
        alone = SequenceSpan(0, seq.num_rows, seq.start, seq.block_ids)
        mine = slice(seq.row, seq.row + seq.num_rows)
        assert torch.equal(cpu.attend(q[mine].contiguous(), k, v, cpu.plan_attention([alone]), window), got[mine])


def test_poisoned_keys_beyond_the_end_are_not_touched() -> None:
    cpu, _ = tiers("bf16")
    for length in (1, 2, 15, 16, 17, 63, 64, 65, 129):
        blocks = tuple(range(-(-length // BLOCK_TOKENS)))
        wire = random(2, len(blocks), MODEL.num_kv_heads, BLOCK_TOKENS, MODEL.head_dim).bfloat16()
        k, v = cpu.layout.k_from_wire(wire[0]).contiguous(), cpu.layout.v_from_wire(wire[1]).contiguous()
        q = random(1, MODEL.num_heads, MODEL.head_dim).bfloat16()
        plan = cpu.plan_attention([SequenceSpan(0, 1, length - 1, blocks)])
        sound = cpu.attend(q, k, v, plan)
        rest = length % BLOCK_TOKENS
        if rest:
            wire[0, -1, :, rest:] = float("nan")
            wire[1, -1, :, rest:] = float("nan")
        k, v = cpu.layout.k_from_wire(wire[0]).contiguous(), cpu.layout.v_from_wire(wire[1]).contiguous()
        assert torch.equal(cpu.attend(q, k, v, plan), sound)


@pytest.mark.parametrize("kv_format", ["bf16", "int8"])
@pytest.mark.parametrize("name", OLDER)
def test_older_processors_compute_the_same(name: str, kv_format: str) -> None:
    """The same sources compiled for less: only the fused bf16 pairs may round differently."""
    cpu, _ = tiers("bf16", kv_format)
    older, _ = tiers("bf16", kv_format)
    older._lib = library(older_flags(name))
    x, weight = random(7, MODEL.hidden), random(MODEL.hidden, seed=1)
    assert_near(value(older.norm(x, weight, 1e-5)), value(cpu.norm(x, weight, 1e-5)), 1.0)
    blocks = tuple(range(9))
    wire = random(2, 9, MODEL.num_kv_heads, BLOCK_TOKENS, MODEL.head_dim).bfloat16()
    pair = PairLayout(BLOCK_TOKENS, MODEL.num_kv_heads, MODEL.head_dim)
    if kv_format == "int8":
        k, v = (scaled_blocks(pair, wire[side], bool(side))[0] for side in (0, 1))
    else:
        k, v = pair.k_from_wire(wire[0]).contiguous(), pair.v_from_wire(wire[1]).contiguous()
    q = random(3, MODEL.num_heads, MODEL.head_dim).bfloat16()
    plan: CpuAttentionPlan = cpu.plan_attention([SequenceSpan(0, 3, 140, blocks)])
    torch.testing.assert_close(older.attend(q, k, v, plan), cpu.attend(q, k, v, plan), atol=2e-2, rtol=2e-2)


def test_what_is_not_served_falls_back_with_a_sentence() -> None:
    said: list[str] = []
    for changes in ({"mlp": 100}, {"head_dim": 16}, {"has_out_bias": True}):
        chosen = choose(
            replace(MODEL, **changes), weight_format="bf16", kv_format="bf16", block_tokens=16, say=said.append
        )
        assert isinstance(chosen, TorchKernels)
    assert len(said) == 3
    assert all(sentence.endswith(".") and "plain torch" in sentence for sentence in said)
    asked = {"weight_format": "float32", "kv_format": "float32", "block_tokens": 16, "reproducible": True}
    choose(MODEL, **asked, say=said.append)
    assert "reproducible" in said[-1] and len(said) == 4
    with pytest.raises(BuildError, match="KV blocks hold 4 tokens"):
        CpuKernels(MODEL, weight_format="bf16", block_tokens=4)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_the_best_column_is_that_of_the_logits(weight_format: str, rows: int) -> None:
    cpu, _ = tiers(weight_format)
    weight = random(4096, MODEL.hidden, seed=2)
    weight[2049], weight[3333] = weight[17], weight[17]  # equals: the first wins
    packed = cpu.pack_matrix(weight, None)
    x = random(rows, MODEL.hidden)
    x[rows // 2] = weight[17]
    ready = cpu.pack_rows(x)
    logits = cpu.logits(cpu.linear(ready, packed))
    assert torch.equal(cpu.best(ready, packed), logits.argmax(dim=-1))
    assert cpu.best(ready, packed)[rows // 2] == 17
    x[0, 5] = float("nan")
    found = cpu.best(cpu.pack_rows(x), packed)
    assert found[0] == -1
    assert torch.equal(found[1:], logits.argmax(dim=-1)[1:])
