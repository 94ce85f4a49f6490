"""Paged attention and cache writes on the GPU path against each sequence alone, with poison in every unseen slot."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.pool import KVPool
from engine.kernels import fp8, reference
from engine.kernels.gpu.pieces import Pieces, plan_pieces
from engine.kernels.gpu.tier import GpuKernels
from engine.kernels.int8 import quantize_rows
from engine.kernels.spans import SequenceSpan
from engine.kernels.values import Product
from engine.model.config import ModelConfig
from engine.staging import Staging

BLOCK = 16


def model(heads: int = 4, kv_heads: int = 2, dim: int = 32) -> ModelConfig:
    return ModelConfig(
        vocab_size=96, hidden=heads * dim, mlp=64, num_layers=1, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, context_tokens=4096, norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip


def tier(config: ModelConfig, kv_format: str) -> GpuKernels:
    return GpuKernels(
        config, weight_format="float32", kv_format=kv_format, block_tokens=BLOCK, device=torch.device("cpu"),
        dtype=torch.float32,
    )  # fmt: skip


QUANTIZERS = {"int8": quantize_rows, "fp8": fp8.quantize_rows}


def put(cache: torch.Tensor, cells: torch.Tensor, slots: torch.Tensor, kv_format: str) -> None:
    """cells [n, kv heads, dim] into a cache as layout.py has it."""
    block, token, dim = slots // BLOCK, slots % BLOCK, cells.shape[-1]
    if cache.dtype != torch.int8:
        cache[block, :, token] = cells
        return
    size = BLOCK * dim
    for head in range(cells.shape[1]):
        values, scale = QUANTIZERS[kv_format](cells[:, head])
        values = values.view(torch.int8)
        cache[:, head, :size].view(-1, BLOCK, dim)[block, token] = values
        cache.view(torch.float32)[block, head, size // 4 + token] = scale


class Filled:
    """A layer's caches with the keys and values of sequences, everything else poisoned."""

    def __init__(self, config: ModelConfig, kv_format: str, spans: list[SequenceSpan], shared: int = 0) -> None:
        self.op = tier(config, kv_format)
        blocks = 1 + max(block for span in spans for block in span.block_ids)
        pool = KVPool(config, kv_format=kv_format, block_tokens=BLOCK, num_blocks=blocks, layout=self.op.layout)
        pool.poison(range(blocks))
        self.k, self.v = pool.layer(0)
        self.keys: dict[int, torch.Tensor] = {}  # [kv heads, dim] by slot
        self.values: dict[int, torch.Tensor] = {}
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        wanted = sorted({s.block_ids[p // BLOCK] * BLOCK + p % BLOCK for s in spans for p in range(s.length)})
        keys, values = torch.randn(2, len(wanted), kv_heads, dim)
        for cache, cells in ((self.k, keys), (self.v, values)):
            put(cache, cells, torch.tensor(wanted), kv_format)
            if kv_format in QUANTIZERS:
                small, scale = QUANTIZERS[kv_format](cells.reshape(-1, dim))
                cells.copy_((small.float() * scale[:, None]).view(cells.shape))
        for slot, key, value in zip(wanted, keys, values, strict=True):
            self.keys[slot], self.values[slot] = key, value
        self.q = torch.randn(sum(s.num_rows for s in spans), heads, dim)
        self.spans, self.config = spans, config

    def attended(self, window: int = 0) -> torch.Tensor:
        plan, _ = self.op.place(self.op.plan_attention(self.spans), [], Staging(torch.device("cpu")).send)
        return self.op.attend(self.q, self.k, self.v, plan, window).view(self.q.shape)

    def wanted(self, window: int = 0) -> torch.Tensor:
        """Row by row in float64; q is multiplied by log2 e beforehand, as `store_qkv` does."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        group = self.config.num_heads // self.config.num_kv_heads
        for span in self.spans:
            slots = [span.block_ids[p // BLOCK] * BLOCK + p % BLOCK for p in range(span.length)]
            keys = torch.stack([self.keys[s] for s in slots]).double().repeat_interleave(group, 1)
            values = torch.stack([self.values[s] for s in slots]).double().repeat_interleave(group, 1)
            for i in range(span.num_rows):
                end = span.start + i + 1
                seen = slice(max(0, end - window) if window else 0, end)
                scores = torch.einsum("hd,nhd->hn", self.q[span.row + i].double(), keys[seen]) * np.log(2)
                out[span.row + i] = torch.einsum("hn,nhd->hd", scores.softmax(1), values[seen])
        return out


def spans_of(sizes: list[tuple[int, int]], shared_blocks: int = 0) -> list[SequenceSpan]:
    """(start, rows) of each sequence; the first blocks are the same for all."""
    spans, row, block = [], 0, shared_blocks
    for start, rows in sizes:
        own = -(-(start + rows) // BLOCK) - shared_blocks
        ids = (*range(shared_blocks), *range(block, block + max(own, 0)))
        spans.append(SequenceSpan(row, rows, start, ids[: -(-(start + rows) // BLOCK)]))
        row, block = row + rows, block + max(own, 0)
    return spans


MIXED = [(0, 1), (40, 1), (0, 37), (63, 1), (64, 2), (15, 20)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 48), (4, 4, 16), (9, 3, 64)])
def test_prefills_and_decodes_of_one_step(heads: int, kv_heads: int, dim: int) -> None:
    torch.manual_seed(dim)
    filled = Filled(model(heads, kv_heads, dim), "float32", spans_of(MIXED))
    torch.testing.assert_close(filled.attended().double(), filled.wanted(), rtol=1e-4, atol=1e-4)


def test_sequences_that_share_a_prefix() -> None:
    torch.manual_seed(4)
    sizes = [(128 + extra, 1) for extra in (0, 3, 17, 64)] + [(130, 9)]
    filled = Filled(model(), "float32", spans_of(sizes, shared_blocks=8))
    torch.testing.assert_close(filled.attended().double(), filled.wanted(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_keys_and_values_of_eight_bits(kv_format: str) -> None:
    torch.manual_seed(5)
    filled = Filled(model(), kv_format, spans_of(MIXED))
    torch.testing.assert_close(filled.attended().double(), filled.wanted(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [1, 37])
def test_rows_that_look_back_a_window(window: int) -> None:
    """In pieces of a shared prefix, of splits and of prefills; some of them hold nothing that a row sees."""
    torch.manual_seed(window)
    sizes = [(128, 1), (145, 1), (130, 5), (330, 1)]
    filled = Filled(model(), "float32", spans_of(sizes, shared_blocks=8))
    filled.op._processors = 64
    torch.testing.assert_close(filled.attended(window).double(), filled.wanted(window), rtol=1e-4, atol=1e-4)


def test_a_long_sequence_alone_is_cut_and_merged() -> None:
    torch.manual_seed(6)
    filled = Filled(model(), "float32", spans_of([(1100, 1), (3, 1)]))
    filled.op._processors = 64
    plan = filled.op.plan_attention(filled.spans)
    assert len(plan.pieces) >= 4
    assert plan.slot_ends.tolist() == [len(plan.slots)] * 2, "only the long one is in parts"
    torch.testing.assert_close(filled.attended().double(), filled.wanted(), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70)), min_size=1, max_size=8),
    most_rows=st.integers(1, 32),
    least_keys=st.sampled_from([64, 256, 1024]),
    wanted=st.integers(1, 64),
)
def test_each_row_meets_each_of_its_keys_once(
    sizes: list[tuple[int, int]], most_rows: int, least_keys: int, wanted: int
) -> None:
    spans = spans_of(sizes)
    plan: Pieces = plan_pieces(spans, BLOCK, most_rows=most_rows, least_keys=least_keys, wanted=wanted)
    met: dict[int, list[tuple[int, int]]] = {}
    slots: dict[int, list[int]] = {}
    for first, rows, begin, end, _, slot in plan.pieces.tolist():
        assert 0 < rows <= most_rows
        for i in range(rows):
            met.setdefault(first + i, []).append((begin, min(end, int(plan.lengths[first + i]))))
            if slot >= 0:
                slots.setdefault(first + i, []).append(slot + i)
    for row, runs in met.items():
        runs = [run for run in sorted(runs) if run[0] < run[1]]
        assert runs[0][0] == 0
        assert runs[-1][1] == plan.lengths[row]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(runs))
    begin = 0
    for row, end in enumerate(plan.slot_ends.tolist()):
        assert sorted(plan.slots[begin:end].tolist()) == sorted(slots.get(row, []))
        assert len(met[row]) == 1 or end > begin, "a row of several pieces is merged"
        begin = end
    used = sorted(slot for group in slots.values() for slot in group)
    assert used == list(range(plan.num_slots)), "no slot is shared or left out"


@settings(max_examples=60, deadline=None)
@given(
    family=st.lists(
        st.tuples(st.sampled_from([0, 4, 8, 12, 20]), st.integers(0, 500), st.integers(1, 40)), min_size=1, max_size=9
    ),
    wanted=st.integers(1, 64),
)
def test_pieces_find_each_key_in_the_block_of_its_own_sequence(family: list[tuple[int, int, int]], wanted: int) -> None:
    """(blocks that are the same in all who have so many, tokens computed before, rows): neighbours share prefixes of
    other depths, none at all, or more than one of them has computed."""
    trunk, spans, row, free = range(1000, 1020), [], 0, itertools.count()
    for depth, start, rows in family:
        needed = -(-(start + rows) // BLOCK)
        blocks = [*trunk[:depth][:needed], *itertools.islice(free, max(needed - depth, 0))]
        spans.append(SequenceSpan(row, rows, start, tuple(blocks)))
        row += rows
    plan = plan_pieces(spans, BLOCK, most_rows=16, least_keys=64, wanted=wanted)
    met: list[list[int]] = [[] for _ in range(row)]
    owner = [span for span in spans for _ in range(span.num_rows)]
    for first, rows, begin, end, table, _ in plan.pieces.tolist():
        for at in range(first, first + rows):
            for block in range(begin // BLOCK, -(-min(end, int(plan.lengths[at])) // BLOCK)):
                assert plan.tables[table + block] == owner[at].block_ids[block]
                met[at].append(block)
    for at, span in enumerate(owner):
        assert sorted(met[at]) == list(range(-(-(span.start + at - span.row + 1) // BLOCK))), "each block once"


@pytest.mark.parametrize(
    ("kv_format", "dim", "is_normed"),
    [("float32", 32, False), ("int8", 32, False), ("fp8", 32, False), ("int8", 48, False), ("float32", 48, True)],
)
def test_what_is_behind_the_qkv_matmul(kv_format: str, dim: int, is_normed: bool) -> None:
    torch.manual_seed(8)
    config = model(dim=dim)
    op = tier(config, kv_format)
    pool = KVPool(config, kv_format=kv_format, block_tokens=BLOCK, num_blocks=3, layout=op.layout)
    k, v = pool.layer(0)
    slots, angles = torch.tensor([3, -1, 16]), torch.rand(3, dim // 2)
    qkv, weight = torch.randn(3, 8 * dim), torch.randn(2, dim) if is_normed else None
    q = op.store_qkv(Product(qkv), angles.cos(), angles.sin(), k, v, slots, weight)
    cells = qkv.view(3, 8, dim).clone()
    if weight is not None:
        for part, mine in ((slice(0, 4), weight[0]), (slice(4, 6), weight[1])):
            cells[:, part] = reference.rms_norm(cells[:, part], mine, config.norm_eps, torch.float32)
    turned = reference.rope(cells[:, :6], angles.cos()[:, None], angles.sin()[:, None])
    torch.testing.assert_close(q, turned[:, :4] * (dim**-0.5 / np.log(2)))
    wanted_k, wanted_v = torch.zeros_like(k), torch.zeros_like(v)
    kept = [0, 2]  # the row without a slot is written nowhere
    put(wanted_k, turned[kept, 4:], slots[kept], kv_format)
    put(wanted_v, cells[kept, 6:], slots[kept], kv_format)
    if kv_format == "float32":
        torch.testing.assert_close(k, wanted_k)
        assert torch.equal(v, wanted_v)
    size = BLOCK * dim
    assert (k[..., :size].float() - wanted_k[..., :size].float()).abs().max() <= (kv_format != "float32") + 1e-5
    if kv_format != "float32":
        scales = (cache.view(torch.float32)[..., size // 4 :] for cache in (k, wanted_k))
        torch.testing.assert_close(*scales)


def test_blocks_travel_to_the_cpu_and_back() -> None:
    torch.manual_seed(7)
    for kv_format in ("float32", "int8", "fp8"):
        filled = Filled(model(), kv_format, spans_of([(0, 32)]))
        layout = filled.op.layout
        assert torch.equal(layout.k_from_wire(layout.k_to_wire(filled.k)), filled.k)
        assert torch.equal(layout.v_from_wire(layout.v_to_wire(filled.v)), filled.v)


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_spoils_what_reads_it(kv_format: str, value: float) -> None:
    """As its scale: 8 bits hold neither. Another head and token are left alone."""
    config = model(dim=32)
    op = tier(config, kv_format)
    k, v = KVPool(config, kv_format=kv_format, block_tokens=BLOCK, num_blocks=1, layout=op.layout).layer(0)
    qkv = torch.randn(2, 8 * 32)
    qkv[1, 4 * 32 + 7] = value  # the first key head of the second token
    turns = torch.zeros(2, 16)
    op.store_qkv(Product(qkv), turns.cos(), turns.sin(), k, v, torch.tensor([0, 1]))
    scales = k.view(torch.float32)[0, :, BLOCK * 32 // 4 :][:, :2]
    assert scales.isnan().tolist() == [[False, True], [False, False]]
    assert v.view(torch.float32)[0, :, BLOCK * 32 // 4 :].isfinite().all()
