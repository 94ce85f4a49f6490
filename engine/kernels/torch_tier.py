"""The verbs in plain torch, put together from the operations of `reference`: any machine, any format, the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache.layout import Layout, ScaledTokenLayout, TokenLayout
from engine.config import GROUP_FORMATS
from engine.kernels import fp8, groups, int8, reference, scaled_cache
from engine.kernels.host import HostKernels
from engine.kernels.reference import AttentionPlan
from engine.kernels.spans import SequenceSpan
from engine.kernels.values import Matrix, Product, Rows
from engine.model.config import ModelConfig
from engine.quant.fp8 import Fp8Weight
from engine.quant.groups import GroupedWeight

_DTYPES = {"float32": torch.float32}  # of activations and caches; else bf16


class TorchKernels(HostKernels):
    """See `Kernels`. The caches of a layer are [blocks, tokens, kv_heads, head_dim], or bytes where KV has scales."""

    is_fused = False

    def __init__(self, model: ModelConfig, *, weight_format: str, kv_format: str, block_tokens: int) -> None:
        self._scaled_kv = scaled_cache.KINDS.get(kv_format)
        layout = TokenLayout if self._scaled_kv is None else ScaledTokenLayout
        self.layout: Layout = layout(block_tokens, model.num_kv_heads, model.head_dim)
        self._model = model
        self._is_int8 = weight_format == "int8"
        self.takes_groups = weight_format in GROUP_FORMATS
        self.takes_fp8 = weight_format == "fp8"
        self._dtype = _DTYPES.get(weight_format, torch.bfloat16)
        self._block_tokens = block_tokens
        gathered = torch.float32 if self._scaled_kv else _DTYPES.get(kv_format, torch.bfloat16)
        self._slot_bytes = model.num_kv_heads * model.head_dim * gathered.itemsize

    def pack_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        if self._is_int8:
            return int8.pack(weight, bias)
        rows, columns = weight.shape
        packed = weight.to(self._dtype)
        return Matrix(
            packed=packed, num_rows=rows, num_columns=columns, bias=None if bias is None else bias.to(self._dtype)
        )

    def pack_head(self, weight: Tensor) -> Matrix:
        head = groups.head_in_groups(weight) if self.takes_groups else None
        return self.pack_matrix(weight, None) if head is None else self.pack_groups([head], None)

    def pack_groups(self, weights: Sequence[GroupedWeight], bias: Tensor | None) -> Matrix:
        return groups.pack(weights, None if bias is None else bias.float())

    def pack_fp8(self, weights: Sequence[Fp8Weight], bias: Tensor | None) -> Matrix:
        return fp8.pack(weights, bias)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        return self.pack_rows(reference.rms_norm(x, weight, eps, torch.float32))

    def pack_rows(self, x: Tensor) -> Rows:
        return Rows(*int8.quantize_rows(int8.rotate(x.float()))) if self._is_int8 else Rows(x.to(self._dtype))

    def linear(self, rows: Rows, matrix: Matrix) -> Product:
        if rows.scale is not None:
            return Product(int8.multiply(rows.values, matrix), rows.scale, matrix.scale, matrix.bias)
        if fp8.is_fp8(matrix):
            return fp8.multiply(rows.values, matrix)
        if matrix.bits:
            product = groups.multiply(rows.values, matrix)
            return Product(product if matrix.bias is None else product + matrix.bias)
        return Product(reference.linear(rows.values, matrix.packed, matrix.bias))

    def linear_add(self, rows: Rows, matrix: Matrix, x: Tensor, norm: Tensor | None = None) -> None:
        product = self.linear(rows, matrix).dequantized()
        x += product if norm is None else reference.rms_norm(product, norm, self._model.norm_eps, torch.float32)

    def linear_gated(self, rows: Rows, matrix: Matrix) -> Rows:
        return self.pack_rows(reference.gated(self.linear(rows, matrix).dequantized(), self._model.activation))

    def best(self, rows: Rows, matrix: Matrix, allowed: Tensor | None = None) -> Tensor:
        return reference.best(self.linear(rows, matrix).dequantized(), allowed)

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
        heads, kv_heads = self._model.num_heads, self._model.num_kv_heads
        qkv = product.dequantized().view(-1, heads + 2 * kv_heads, self._model.head_dim)
        qk = qkv[:, : heads + kv_heads]
        if qk_norm is not None:
            weight = qk_norm.repeat_interleave(torch.tensor([heads, kv_heads]), dim=0)
            qk = reference.rms_norm(qk, weight, self._model.norm_eps, torch.float32)
        rotated = reference.rope(qk, cos[:, None], sin[:, None])
        k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        k, v = rotated[:, heads:], qkv[:, heads + kv_heads :]
        if self._scaled_kv is None:
            reference.write_cache(k, v, k_slots, v_slots, slots)
        else:
            for x, cache in ((k, k_slots), (v, v_slots)):
                scaled_cache.write(x, cache, slots, self._scaled_kv)
        return rotated[:, :heads]

    def plan_attention(self, spans: list[SequenceSpan]) -> dict[int, AttentionPlan]:
        return {
            window: reference.plan_attention(spans, self._block_tokens, self._slot_bytes, window)
            for window in self._model.distinct_windows
        }

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: dict[int, AttentionPlan], window: int = 0
    ) -> Tensor:
        caches = (k_cache.flatten(0, 1), v_cache.flatten(0, 1))
        scale = self._model.score_scale
        return reference.paged_attention(q, *caches, plan[window], self._scaled_kv, scale).float()

    def logits(self, product: Product) -> Tensor:
        return product.dequantized()

    def run_layers(self, *_: object) -> bool:
        return False
