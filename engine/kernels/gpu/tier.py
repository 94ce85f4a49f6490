"""The verbs of `Kernels` on a GPU: which kernel each is, on what grid, into which tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine.cache.layout import Layout
from engine.config import GROUP_FORMATS
from engine.errors import ConfigError
from engine.kernels import Forward, fp8, int8
from engine.kernels import groups as group_codes
from engine.kernels.gpu import attention, cache, groups, matmul, rowwise, sampling
from engine.kernels.gpu.graphs import CudaGraph, DecodeGraphs, Size
from engine.kernels.gpu.layout import HeadLayout
from engine.kernels.gpu.pieces import Pieces, plan_pieces
from engine.kernels.spans import SequenceSpan
from engine.kernels.values import Matrix, Product, Rows
from engine.model.config import ModelConfig
from engine.quant.fp8 import DTYPE as FP8
from engine.quant.fp8 import Fp8Weight
from engine.quant.groups import GroupedWeight
from engine.staging import Array

_LOG2_E = 1.4426950408889634
FEW_ROWS = 64
"""Rows that multiply codes as they are; more make the weight floating-point first."""
_KV_FORMS = {"int8": rowwise.INT8, "fp8": rowwise.FP8}
_LEAST_KEYS = 256
_PIECES_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class Attention:
    """What `attend` needs in every layer of one step, on the device: see Pieces, whose order of arrays this is."""

    pieces: Tensor
    slots: Tensor
    slot_ends: Tensor
    lengths: Tensor
    tables: Tensor
    tile: int  # rows, heads counted, that a piece's program takes

    @classmethod
    def of(cls, tensors: Sequence[Tensor], tile: int) -> Attention:
        pieces, slots, slot_ends, lengths, tables = tensors
        return cls(pieces, slots, slot_ends, lengths, tables, tile)


class GpuKernels:
    """See `Kernels`. `dtype`: of activations and of weights that aren't quantized; None: as the format says. The
    interpreter, which can't multiply bf16, wants float32."""

    is_fused = True
    draws = True

    def __init__(
        self,
        model: ModelConfig,
        *,
        weight_format: str,
        kv_format: str,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        is_wide = device.type == "cuda" and weight_format == "float32"  # a large tile of it fits no registers
        self._tile_rows = attention.TILE_ROWS[:1] if is_wide else attention.TILE_ROWS
        if model.num_heads // model.num_kv_heads > self._tile_rows[-1]:
            raise ConfigError(
                f"{model.num_heads} query heads for {model.num_kv_heads} kv heads don't fit a GPU's tile."
            )
        widths = (model.hidden, model.mlp, model.num_heads * model.head_dim)
        if weight_format == "int8" and not all(map(int8.can_rotate, widths)):
            raise ConfigError("int8 weights need widths in multiples of 64 on a GPU; use bf16.")
        self._model = model
        self.device = self._device = device
        self._dtype = dtype or (torch.float32 if weight_format == "float32" else torch.bfloat16)
        self._is_int8 = weight_format == "int8"
        self.takes_fp8 = weight_format == "fp8"
        self._kv_form = _KV_FORMS.get(kv_format, rowwise.FLOAT)
        self._block_tokens = block_tokens
        self._group = model.num_heads // model.num_kv_heads
        self._q_factor = model.score_scale * _LOG2_E
        self.takes_groups = weight_format in GROUP_FORMATS
        self.layout: Layout = HeadLayout(block_tokens, model.num_kv_heads, model.head_dim, bool(self._kv_form))
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )

    def pack_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        shift = None if bias is None else bias.float().to(self._device)
        if self._is_int8:
            values, scale = int8.quantize_weight(weight)
            packed, column = values.to(self._device), scale.to(self._device)
            return Matrix(packed=packed, num_rows=len(weight), num_columns=weight.shape[1], bias=shift, scale=column)
        packed = weight.to(self._device, self._dtype).contiguous()
        return Matrix(packed=packed, num_rows=len(weight), num_columns=weight.shape[1], bias=shift)

    def pack_head(self, weight: Tensor) -> Matrix:
        head = group_codes.head_in_groups(weight) if self.takes_groups else None
        return self.pack_matrix(weight, None) if head is None else self.pack_groups([head], None)

    def pack_groups(self, weights: Sequence[GroupedWeight], bias: Tensor | None) -> Matrix:
        matrix = group_codes.pack(weights, None if bias is None else bias.float())
        assert matrix.scale is not None, "weights in groups have scales"
        if self._group_of(matrix) not in groups.SIZES:
            dense = torch.cat([weight.dequantized() for weight in weights])
            return self.pack_matrix(dense, bias)
        return Matrix(
            packed=matrix.packed.to(self._device),
            num_rows=matrix.num_rows,
            num_columns=matrix.num_columns,
            bias=None if matrix.bias is None else matrix.bias.to(self._device),
            scale=matrix.scale.to(self._device),
            zero=None if matrix.zero is None else matrix.zero.to(self._device),
            bits=matrix.bits,
        )

    def pack_fp8(self, weights: Sequence[Fp8Weight], bias: Tensor | None) -> Matrix:
        """Those with scales of blocks of columns, which don't come out of a sum over all, are made floating-point."""
        matrix = fp8.pack(weights, bias)
        if matrix.scale is None or matrix.scale.shape[1] > 1:
            return self.pack_matrix(torch.cat([weight.dequantized() for weight in weights]), bias)
        return Matrix(
            packed=matrix.packed.to(self._device),
            num_rows=matrix.num_rows,
            num_columns=matrix.num_columns,
            bias=None if matrix.bias is None else matrix.bias.to(self._device),
            scale=matrix.scale[:, 0].contiguous().to(self._device),
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        out, scale, form = self._rows_like(x, x.shape[1])
        size = triton.next_power_of_2(x.shape[1])
        rowwise.norm_rows[(len(x),)](
            x, x, weight, out, scale, eps,
            WIDTH=x.shape[1], SIZE=size, HAS_DELTA=False, FORMAT=form, num_warps=rowwise.warps_of_row(size),
        )  # fmt: skip
        return Rows(out, scale if form else None)

    def pack_rows(self, x: Tensor) -> Rows:
        out, scale, form = self._rows_like(x, x.shape[1])
        size = triton.next_power_of_2(x.shape[1])
        rowwise.pack_rows[(len(x),)](
            x, out, scale, WIDTH=x.shape[1], SIZE=size, FORMAT=form, num_warps=rowwise.warps_of_row(size)
        )
        return Rows(out, scale if form else None)

    def linear(self, rows: Rows, matrix: Matrix) -> Product:
        out = torch.empty(len(rows.values), matrix.num_rows, dtype=torch.float32, device=self._device)
        self._multiply(rows, matrix, out, adds=False)
        return Product(out)

    def linear_add(self, rows: Rows, matrix: Matrix, x: Tensor, norm: Tensor | None = None) -> None:
        if norm is None:
            self._multiply(rows, matrix, x, adds=True)
            return
        product, width = self.linear(rows, matrix).values, x.shape[1]
        size = triton.next_power_of_2(width)
        rowwise.add_normed_rows[(len(x),)](
            x, product, norm, self._model.norm_eps, WIDTH=width, SIZE=size, num_warps=rowwise.warps_of_row(size)
        )

    def linear_gated(self, rows: Rows, matrix: Matrix) -> Rows:
        gate_up = torch.empty(len(rows.values), matrix.num_rows, dtype=self._dtype, device=self._device)
        self._multiply(rows, matrix, gate_up, adds=False)
        out, scale, form = self._rows_like(gate_up, gate_up.shape[1] // 2)
        size = triton.next_power_of_2(out.shape[1])
        rowwise.silu_mul[(len(out),)](
            gate_up, out, scale,
            WIDTH=out.shape[1], SIZE=size, FORMAT=form, IS_GELU=self._model.activation == "gelu",
            num_warps=rowwise.warps_of_row(size),
        )  # fmt: skip
        return Rows(out, scale if form else None)

    def best(self, rows: Rows, matrix: Matrix, allowed: Tensor | None = None) -> Tensor:
        logits = self.linear(rows, matrix).values
        ids = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        masks = torch.zeros(1, 1, dtype=torch.int32, device=self._device) if allowed is None else allowed
        sampling.best_rows[(len(logits),)](
            logits, masks, ids, logits.shape[1], 0 if allowed is None else len(masks), masks.shape[1],
            SIZE=sampling.CHUNK, num_warps=8,
        )  # fmt: skip
        return ids

    def draw(self, logits: Tensor, numbers: Tensor, top_ks: Tensor, allowed: Tensor | None) -> Tensor:
        ids = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        masks = torch.zeros(1, 1, dtype=torch.int32, device=self._device) if allowed is None else allowed
        sampling.sample_rows[(len(logits),)](
            logits, masks, ids, numbers, top_ks, logits.shape[1], 0 if allowed is None else len(masks), masks.shape[1],
            SIZE=sampling.CHUNK, num_warps=8,
        )  # fmt: skip
        return ids

    def store_qkv(
        self,
        product: Product,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        qk_norm: Tensor | None = None,
    ) -> Tensor:
        model, qkv = self._model, product.dequantized()
        heads = model.num_heads + 2 * model.num_kv_heads
        q = torch.empty(len(qkv), model.num_heads, model.head_dim, dtype=self._dtype, device=self._device)
        cache.store_qkv[(len(qkv), heads)](
            qkv, cos, sin, slots, q, *self._parts(k_cache, v_cache), cos if qk_norm is None else qk_norm,
            self._q_factor, model.norm_eps,
            HEADS=model.num_heads, KV_HEADS=model.num_kv_heads, DIM=model.head_dim,
            HALF_SIZE=triton.next_power_of_2(model.head_dim // 2), BLOCK_TOKENS=self._block_tokens,
            FORMAT=self._kv_form, HAS_QK_NORM=qk_norm is not None, num_warps=1,
        )  # fmt: skip
        return q

    def plan_attention(self, spans: list[SequenceSpan]) -> Pieces:
        return plan_pieces(
            spans,
            self._block_tokens,
            most_rows=self._tile_rows[-1] // self._group,
            least_keys=_LEAST_KEYS,
            wanted=_PIECES_PER_PROCESSOR * self._processors // self._model.num_kv_heads,
        )

    def place(
        self, plan: Pieces, arrays: Sequence[Array], send: Callable[[Sequence[Array]], list[Tensor]]
    ) -> tuple[Attention, list[Tensor]]:
        tensors = send([*arrays, *plan.arrays])
        return Attention.of(tensors[len(arrays) :], self.tile_of(plan)), tensors[: len(arrays)]

    def tile_of(self, plan: Pieces) -> int:
        """The smallest tile that the largest piece fits into."""
        return next(rows for rows in self._tile_rows if plan.most_rows * self._group <= rows)

    def graphs(self, forward: Forward, most_rows: int) -> DecodeGraphs | None:
        if self._device.type != "cuda":
            return None
        return DecodeGraphs(forward, self, most_rows, CudaGraph.maker)

    @staticmethod
    def placed(tensors: Sequence[Tensor], size: Size) -> Attention:
        """The tensors of a step that is filled up to a size."""
        return Attention.of(tensors, size.tile)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Attention, window: int = 0) -> Tensor:
        model = self._model
        out = torch.empty(q.shape, dtype=torch.float32, device=self._device)
        walk = attention.walk_of(plan.tile, model.head_dim)
        size = triton.next_power_of_2(model.head_dim)
        count = max(len(plan.slots), 1)
        partial = torch.empty(count, model.num_heads, model.head_dim, dtype=torch.float32, device=self._device)
        state = torch.empty(count, model.num_heads, 2, dtype=torch.float32, device=self._device)
        attention.attend[(len(plan.pieces), model.num_kv_heads)](
            q, *self._parts(k_cache, v_cache), plan.lengths, plan.tables, plan.pieces, out, partial, state,
            window,
            HEADS=model.num_heads, KV_HEADS=model.num_kv_heads, DIM=model.head_dim, DIM_SIZE=size,
            BLOCK_TOKENS=self._block_tokens, ROWS=plan.tile, KEYS=walk.keys, IS_SCALED=bool(self._kv_form),
            num_warps=walk.warps, num_stages=walk.stages,
        )  # fmt: skip
        if len(plan.slots):
            attention.merge[(len(q), model.num_heads)](
                partial, state, plan.slots, plan.slot_ends, out,
                HEADS=model.num_heads, DIM=model.head_dim, DIM_SIZE=size, num_warps=1,
            )  # fmt: skip
        return out.view(len(q), -1)

    def logits(self, product: Product) -> Tensor:
        return product.values

    def run_layers(self, *_: Any) -> bool:
        return False

    def _parts(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values of both as their type, scales of both as float32: the same bytes, where the caches are bytes. A kernel
        that has no scales reads none."""
        if not self._kv_form:
            return k_cache, v_cache, k_cache, v_cache
        kind = FP8 if self._kv_form == rowwise.FP8 else torch.int8
        return k_cache.view(kind), v_cache.view(kind), k_cache.view(torch.float32), v_cache.view(torch.float32)

    def _rows_like(self, x: Tensor, width: int) -> tuple[Tensor, Tensor, int]:
        """Empty rows in the format of the next matmul, their scales, and the format."""
        out = torch.empty(len(x), width, dtype=torch.int8 if self._is_int8 else self._dtype, device=self._device)
        scale = torch.empty(len(x), dtype=torch.float32, device=self._device)
        return out, scale, rowwise.INT8 if self._is_int8 else rowwise.FLOAT

    def _multiply(self, given: Rows, matrix: Matrix, out: Tensor, *, adds: bool) -> None:
        packed = matrix.packed
        is_head = matrix.num_rows == self._model.vocab_size  # too large for a floating-point copy at each step
        if matrix.bits and (is_head or len(given.values) <= FEW_ROWS):
            self._multiply_groups(given, matrix, out, adds=adds)
            return
        if matrix.bits:
            packed = self._dequantized(matrix)
        if packed.dtype == FP8:
            given = self._as_fp8(given)
        num_rows, width = given.values.shape
        if self._is_for_vendor(num_rows, packed, out):
            is_there = out.dtype == packed.dtype and not adds
            product = torch.mm(given.values, packed.t(), out=out if is_there else None)
            if matrix.bias is not None:
                product += matrix.bias
            if adds:
                out += product
            elif not is_there:
                out.copy_(product)
            return
        tile = matmul.tile_for(num_rows, matrix.num_rows, adds=adds)
        grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(matrix.num_rows, tile.columns),)
        has_scales = given.scale is not None
        matmul.multiply[grid](
            given.values, packed, given.scale if has_scales else out, matrix.scale if has_scales else out,
            out if matrix.bias is None else matrix.bias, out, num_rows, matrix.num_rows, width,
            M=tile.rows, N=tile.columns, K=tile.depth, IS_INT8=packed.dtype == torch.int8, HAS_SCALES=has_scales,
            HAS_BIAS=matrix.bias is not None, ADDS=adds, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _is_for_vendor(self, num_rows: int, packed: Tensor, out: Tensor) -> bool:
        """Whether the vendor's library multiplies: float32, and bf16 unless rows are few or logits keep all digits."""
        if self._device.type != "cuda" or packed.dtype == torch.float32:
            return self._device.type == "cuda"
        if packed.dtype != torch.bfloat16 or len(packed) == self._model.vocab_size:
            return False
        return num_rows > FEW_ROWS or out.dtype == torch.bfloat16

    def _as_fp8(self, given: Rows) -> Rows:
        count, width = given.values.shape
        out = torch.empty(count, width, dtype=FP8, device=self._device)
        scale = torch.empty(count, dtype=torch.float32, device=self._device)
        size = triton.next_power_of_2(width)
        rowwise.pack_rows[(count,)](
            given.values, out, scale, WIDTH=width, SIZE=size, FORMAT=rowwise.FP8,
            num_warps=rowwise.warps_of_row(size),
        )  # fmt: skip
        return Rows(out, scale)

    def _multiply_groups(self, given: Rows, matrix: Matrix, out: Tensor, *, adds: bool) -> None:
        num_rows, width = given.values.shape
        group = self._group_of(matrix)
        m = groups.TILE_ROWS[num_rows > groups.TILE_ROWS[0]]
        n = 32 if matrix.num_rows <= matmul.NARROW_COLUMNS else 64
        grid = (triton.cdiv(num_rows, m) * triton.cdiv(matrix.num_rows, n),)
        groups.multiply_groups[grid](
            given.values, matrix.packed, matrix.scale, matrix.packed if matrix.zero is None else matrix.zero,
            out if matrix.bias is None else matrix.bias, out, num_rows, matrix.num_rows, width,
            M=m, N=n, K=min(group, 64), GROUP=group, BITS=matrix.bits, HAS_ZERO=matrix.zero is not None,
            HAS_BIAS=matrix.bias is not None, ADDS=adds, num_warps=groups.WARPS, num_stages=groups.STAGES,
        )  # fmt: skip

    def _dequantized(self, matrix: Matrix) -> Tensor:
        out = torch.empty(matrix.num_rows, matrix.num_columns, dtype=self._dtype, device=self._device)
        group = self._group_of(matrix)
        step = min(group, 64)
        groups.dequantize[(triton.cdiv(matrix.num_rows, 32), matrix.num_columns // step)](
            matrix.packed, matrix.scale, matrix.packed if matrix.zero is None else matrix.zero, out,
            matrix.num_rows, matrix.num_columns,
            N=32, K=step, GROUP=group, BITS=matrix.bits, HAS_ZERO=matrix.zero is not None,
            num_warps=groups.WARPS, num_stages=groups.STAGES,
        )  # fmt: skip
        return out

    @staticmethod
    def _group_of(matrix: Matrix) -> int:
        assert matrix.scale is not None, "weights in groups have scales"
        return matrix.num_columns // matrix.scale.shape[1]
