"""Every kernel at work: its inputs, what it must give by float64, and what it moves and computes at least.

Kernels are called by the verbs of the tier, so that grids and types are those of the engine. At toy size bf16 stands
for float32, which the interpreter can multiply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import log

import torch
from torch import Tensor

from engine.kernels import fp8 as fp8_rows
from engine.kernels import int8
from engine.kernels.gpu.tier import FEW_ROWS, GpuKernels
from engine.kernels.spans import SequenceSpan
from engine.kernels.values import Matrix, Product, Rows
from engine.model.config import ModelConfig
from engine.ondevice.place import Place
from engine.quant import fp8
from engine.quant.groups import Scheme, round_to_nearest
from engine.staging import Staging

BLOCK = 16
KV = ("bf16", "int8", "fp8")
WEIGHTS = ("bf16", "int8", "fp8", "w4a16")
_EXACT = 2e-3  # sums in float32, of inputs that the reference has too
_ROUNDED = 1.6e-2  # results of 8 bits of digits, or rounded on the way


@dataclass(frozen=True, slots=True)
class Case:
    """`run` gives what `wanted` gives in float64, within `tolerance` of the largest of it. `least_bytes` are read or
    written by whoever does this, `flops` computed. `work` is what of `run` is measured, if that isn't all."""

    run: Callable[[], Tensor]
    wanted: Callable[[], Tensor]
    tolerance: float
    least_bytes: int = 0
    flops: int = 0
    work: Callable[[], object] | None = None

    def error(self) -> float:
        """The largest, as a share of the largest number wanted; infinite where something isn't finite."""
        found, wanted = self.run().double(), self.wanted()
        if found.shape != wanted.shape or not found.isfinite().all():
            return float("inf")
        return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


class Bench:
    """Makes cases on a place, for a model's shapes."""

    def __init__(self, place: Place, model: ModelConfig) -> None:
        self.place = place
        self.model = model
        self._random = torch.Generator(place.device).manual_seed(1)
        self._staging = Staging(place.device)

    def tier(self, weights: str = "bf16", kv: str = "bf16") -> GpuKernels:
        kv = "float32" if kv == "bf16" and self.place.is_toy else kv
        return GpuKernels(
            self.model, weight_format=weights, kv_format=kv, block_tokens=BLOCK, device=self.place.device,
            dtype=self.place.dtype,
        )  # fmt: skip

    def attention(self, kv: str, sizes: list[tuple[int, int]], shared_blocks: int = 0, window: int = 0) -> Case:
        """(start, rows) of each sequence; the first blocks are the same for all that are that long."""
        op, spans = self.tier(kv=kv), _spans(sizes, shared_blocks)
        caches = [self._cache(op, kv, 1 + max(block for span in spans for block in span.block_ids)) for _ in "kv"]
        count = sum(rows for _, rows in sizes)
        q = self._drawn(count, self.model.num_heads, self.model.head_dim).to(self.place.dtype)
        plan, _ = op.place(op.plan_attention(spans), [], self._staging.send)
        keys = len({b for s in spans for b in s.block_ids}) * BLOCK
        seen = sum(sum(range(span.start + 1, span.length + 1)) for span in spans)
        return Case(
            lambda: op.attend(q, caches[0], caches[1], plan, window),
            lambda: self._attended(q, [self._read(cache, kv) for cache in caches], spans, window),
            _EXACT if self.place.is_toy else _ROUNDED,
            least_bytes=2 * keys * self.model.num_kv_heads * (self.model.head_dim * _kv_bytes(kv) + 4 * (kv != "bf16")),
            flops=4 * seen * self.model.num_heads * self.model.head_dim,
        )

    def store(self, kv: str, count: int) -> Case:
        """Both caches after it, slot by slot, and the queries."""
        op, model = self.tier(kv=kv), self.model
        heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
        caches = [self._cache(op, kv, 3) for _ in "kv"]
        slots = torch.tensor([3, 40, 16, 17, 31][:count], device=self.place.device)
        turns = torch.rand(count, dim // 2, generator=self._random, device=self.place.device) * 6
        qkv = self._drawn(count, (heads + 2 * kv_heads) * dim)

        def run() -> Tensor:
            q = op.store_qkv(Product(qkv), turns.cos(), turns.sin(), caches[0], caches[1], slots)
            found = [self._read(cache, kv)[slots // BLOCK, :, slots % BLOCK] for cache in caches]
            return torch.cat([q.double(), *found], dim=1)

        def wanted() -> Tensor:
            cells = qkv.double().view(count, -1, dim)
            first, second = cells.chunk(2, dim=-1)
            cos, sin = turns.double().cos()[:, None], turns.double().sin()[:, None]
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
            q = turned[:, :heads] * (dim**-0.5 / log(2))
            return torch.cat((q, turned[:, heads : heads + kv_heads], cells[:, heads + kv_heads :]), dim=1)

        return Case(run, wanted, 0.04 if kv == "fp8" else _ROUNDED)

    def linear(self, weights: str, count: int) -> Case:
        """A matrix of the MLP, added to what is there."""
        op = self.tier(weights)
        matrix, exact = self._matrix(op, self.model.hidden, self.model.mlp)
        rows, given = self._rows(op, count, self.model.mlp)
        x = self._drawn(count, self.model.hidden)

        def run() -> Tensor:
            out = x.clone()
            op.linear_add(rows, matrix, out)
            return out

        return Case(
            run,
            lambda: x.double() + given @ exact.T,
            _ROUNDED,
            least_bytes=_bytes(matrix) + rows.values.nbytes + 8 * x.numel(),
            flops=2 * count * matrix.num_rows * matrix.num_columns,
            work=lambda: op.linear_add(rows, matrix, x),
        )

    def gated(self, weights: str, count: int) -> Case:
        """Gate and up, and the rows that they make for the next matrix."""
        op = self.tier(weights)
        matrix, exact = self._matrix(op, 2 * self.model.mlp, self.model.hidden)
        rows, given = self._rows(op, count, self.model.hidden)

        def wanted() -> Tensor:
            gate, up = (given @ exact.T).chunk(2, dim=1)
            return gate * torch.sigmoid(gate) * up

        return Case(
            lambda: self._exact(op.linear_gated(rows, matrix)),
            wanted,
            0.03,
            least_bytes=_bytes(matrix) + rows.values.nbytes,
            flops=2 * count * matrix.num_rows * matrix.num_columns,
            work=lambda: op.linear_gated(rows, matrix),
        )

    def norm(self, weights: str, count: int) -> Case:
        op, width = self.tier(weights), self.model.hidden
        x, weight = self._drawn(count, width) * 3, self._drawn(width)

        def wanted() -> Tensor:
            y = x.double()
            return y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

        return Case(
            lambda: self._exact(op.norm(x, weight, 1e-5)),
            wanted,
            _ROUNDED,
            least_bytes=x.nbytes,
            work=lambda: op.norm(x, weight, 1e-5),
        )

    def best(self, count: int) -> Case:
        """Ids as numbers: one that differs is far off."""
        op, logits, head = self.tier(), self.model.hidden, self._head()
        rows, given = self._rows(op, count, logits)
        matrix = op.pack_matrix(head, None)
        exact = matrix.packed.double()
        return Case(
            lambda: op.best(rows, matrix),
            lambda: (given @ exact.T).argmax(1).double(),
            1e-6,
            least_bytes=head.nbytes,
            flops=2 * count * matrix.num_rows * matrix.num_columns,
        )

    def drawn(self, count: int) -> Case:
        """A draw of 0 and few candidates: the id is the first of those that top_k keeps."""
        op = self.tier()
        logits = self._drawn(count, self.model.vocab_size) * 4
        numbers = torch.tensor([[0.7, 1.0, 0.0, 0.0]] * count, device=self.place.device)
        top_ks = torch.full((count,), 9, dtype=torch.int32, device=self.place.device)
        return Case(
            lambda: op.draw(logits, numbers, top_ks, None),
            lambda: logits.topk(9).indices.amin(1).double(),
            1e-6,
            least_bytes=logits.nbytes,
        )

    def _attended(self, q: Tensor, caches: list[Tensor], spans: list[SequenceSpan], window: int) -> Tensor:
        group = self.model.num_heads // self.model.num_kv_heads
        out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        for span in spans:
            blocks = list(span.block_ids)
            keys, values = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, : span.length] for cache in caches)
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            mine = q[span.row : span.row + span.num_rows].double().transpose(0, 1)
            scores = mine @ keys.transpose(1, 2) * log(2)
            at = torch.arange(span.start, span.length, device=q.device)[:, None]
            keys_at = torch.arange(span.length, device=q.device)[None, :]
            hidden = (keys_at > at) | ((keys_at <= at - window) if window else False)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[span.row : span.row + span.num_rows] = (weights @ values).transpose(0, 1)
        return out.flatten(1)

    def _cache(self, op: GpuKernels, kv: str, blocks: int) -> Tensor:
        """Random keys or values in the tier's layout."""
        shape = (blocks, self.model.num_kv_heads, BLOCK, self.model.head_dim)
        numbers = self._drawn(*shape)
        if kv == "bf16":
            return numbers.to(self.place.dtype)
        scale = torch.rand(*shape[:3], 1, generator=self._random, device=self.place.device) * 0.02 + 0.01
        kind = torch.int8 if kv == "int8" else fp8.DTYPE
        values = (numbers * 40).clamp(-127, 127).to(kind).view(torch.int8)
        return torch.cat((values.flatten(2), scale.view(torch.int8).flatten(2)), dim=-1).contiguous()

    def _read(self, cache: Tensor, kv: str) -> Tensor:
        """A cache as float64 [blocks, kv heads, tokens, dim]."""
        if kv == "bf16":
            return cache.double()
        size = BLOCK * self.model.head_dim
        kind = torch.int8 if kv == "int8" else fp8.DTYPE
        values = cache[..., :size].contiguous().view(kind).double()
        scales = cache[..., size:].contiguous().view(torch.float32).double()
        return values.view(*values.shape[:2], BLOCK, self.model.head_dim) * scales[..., None]

    def _matrix(self, op: GpuKernels, rows: int, columns: int) -> tuple[Matrix, Tensor]:
        """A weight as the tier keeps it, and as numbers in the basis of its rows."""
        weight = self._drawn(rows, columns) * columns**-0.5
        if op.takes_groups:
            group = min(128, columns)
            codes = round_to_nearest(weight, Scheme(bits=4, group=group, symmetric=False))
            return op.pack_groups([codes], None), codes.dequantized().double()
        if op.takes_fp8:
            eight = fp8.quantized(weight)
            return op.pack_fp8([eight], None), eight.dequantized().double()
        matrix = op.pack_matrix(weight, None)
        exact = matrix.packed.double()
        return matrix, exact if matrix.scale is None else exact * matrix.scale.double()[:, None]

    def _rows(self, op: GpuKernels, count: int, width: int) -> tuple[Rows, Tensor]:
        """Rows as the tier packs them, and as the numbers that they hold."""
        rows = op.pack_rows(self._drawn(count, width))
        if op.takes_fp8:  # in front of the matrix
            values, scale = fp8_rows.quantize_rows(rows.values.float())
            return rows, values.double() * scale.double()[:, None]
        exact = rows.values.double()
        return rows, exact if rows.scale is None else exact * rows.scale.double()[:, None]

    def _exact(self, rows: Rows) -> Tensor:
        """The numbers that rows were made of."""
        if rows.scale is None:
            return rows.values.double()
        return int8.rotate(rows.values.float() * rows.scale[:, None]).double()

    def _head(self) -> Tensor:
        return self._drawn(self.model.vocab_size, self.model.hidden).to(self.place.dtype)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random, device=self.place.device)


def cases(is_toy: bool) -> Iterator[tuple[str, Callable[[Bench], Case]]]:
    """Each kernel in each type, small and large, odd and even: its name, and what makes it."""
    decodes = [(length, 1) for length in ([5, 40, 16, 33] if is_toy else [5, 1000, 4000, 33, 2047, 2048, 129])]
    prefill = (10, 21) if is_toy else (300, 700)
    mixed, shared = [(0, prefill[0]), decodes[1], prefill], 2 if is_toy else 8
    for kv in KV:
        yield f"attend, KV {kv}, decodes", partial(Bench.attention, kv=kv, sizes=decodes)
        yield (
            f"attend, KV {kv}, decodes, shared prefix",
            partial(Bench.attention, kv=kv, sizes=decodes, shared_blocks=shared),
        )
        yield f"attend, KV {kv}, prefills and decodes", partial(Bench.attention, kv=kv, sizes=mixed)
        yield f"attend, KV {kv}, window", partial(Bench.attention, kv=kv, sizes=mixed, window=13)
        yield f"store_qkv, KV {kv}", partial(Bench.store, kv=kv, count=5)
    for weights in WEIGHTS:
        for count in (1, 5) if is_toy else (1, 5, 33, 200, 700):
            kernel = "multiply_groups" if weights == "w4a16" and count <= FEW_ROWS else "multiply"
            yield f"{kernel}, {weights}, {count} rows", partial(Bench.linear, weights=weights, count=count)
            yield f"silu_mul, {weights}, {count} rows", partial(Bench.gated, weights=weights, count=count)
    for weights in ("bf16", "int8"):
        yield f"norm_rows, {weights}", partial(Bench.norm, weights=weights, count=7)
    yield "best_rows", partial(Bench.best, count=3)
    yield "sample_rows", partial(Bench.drawn, count=3)


def _spans(sizes: list[tuple[int, int]], shared_blocks: int) -> list[SequenceSpan]:
    spans, row, block = [], 0, shared_blocks
    for start, rows in sizes:
        needed = -(-(start + rows) // BLOCK)
        shared = min(shared_blocks, start // BLOCK)
        spans.append(SequenceSpan(row, rows, start, (*range(shared), *range(block, block + needed - shared))))
        row, block = row + rows, block + needed - shared
    return spans


def _kv_bytes(kv: str) -> int:
    return 2 if kv == "bf16" else 1


def _bytes(matrix: Matrix) -> int:
    return matrix.packed.nbytes + (0 if matrix.scale is None else matrix.scale.nbytes)
