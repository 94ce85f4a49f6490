"""The verbs on CPU: int8 or bf16 matmuls (our own with AMX or AVX-512, else torch's), the rest in C++ kernels.

`matmul.cpp`, `rows.cpp` and `attention.cpp` say what each kernel computes; this module checks layouts and passes
pointers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.layout import Layout, PairLayout, ScaledLayout
from engine.config import GROUP_FORMATS
from engine.kernels import fp8 as fp8_codes
from engine.kernels import groups, int8, reference
from engine.kernels.cpu.build import BuildError, library
from engine.kernels.cpu.fp8 import Fp8Kernels
from engine.kernels.cpu.group_matmul import GroupKernels
from engine.kernels.cpu.layers import DecoderLayer, LayerStack, can_stack, query_scale
from engine.kernels.host import HostKernels
from engine.kernels.spans import SequenceSpan, shared_spans
from engine.kernels.values import Matrix, Product, Rows
from engine.model.config import ModelConfig
from engine.model.rope import Angles
from engine.quant.fp8 import Fp8Weight
from engine.quant.groups import GroupedWeight

BLOCK_TOKENS = 16
_KINDS = {torch.int32: 0, torch.float32: 1, torch.bfloat16: 2}
_PACK_ROWS = 256
_EVEN_ROWS = 64
_PANEL = 32  # outputs that the matmul of matmul.cpp makes at once
_LANES = 16  # values that the kernels of rows.cpp read at once
_STATE_REST = 32  # floats of a row's running state beside the output


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """The arrays of `shared_spans` as tensors, rows' lengths int32 [T], and the kernel's running state."""

    lengths: Tensor
    tables: Tensor
    spans: Tensor
    level_ends: Tensor
    state: Tensor


class CpuKernels(HostKernels):
    """See `Kernels`. Raises BuildError in a clause when this model or this machine isn't served."""

    is_fused = True

    def __init__(
        self,
        model: ModelConfig,
        *,
        weight_format: str,
        block_tokens: int,
        kv_format: str = "bf16",
        reproducible: bool = False,
    ) -> None:
        _check(model, block_tokens)
        self._is_kv_int8 = kv_format == "int8"
        layout = ScaledLayout if self._is_kv_int8 else PairLayout
        self.layout: Layout = layout(block_tokens, model.num_kv_heads, model.head_dim)
        self._model = model
        self._is_int8 = weight_format == "int8"
        self.takes_groups = weight_format in GROUP_FORMATS
        self.takes_fp8 = weight_format == "fp8"
        self._reproducible = reproducible
        self._lib = library()
        self._has_tiles = bool(self._lib.has_tiles())
        self._groups = GroupKernels(self._lib, is_even=reproducible)
        self._fp8 = Fp8Kernels(self._lib, has_tiles=self._has_tiles, is_even=reproducible)
        self._stack: LayerStack | None = None

    def pack_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        rows, columns = weight.shape
        bias = None if bias is None else bias.float()
        if self._has_tiles and rows % _PANEL == 0 and columns % int8.BLOCK == 0:
            values, scale = int8.quantize_weight(weight) if self._is_int8 else (weight.bfloat16().contiguous(), None)
            packed = torch.empty_like(values)
            row_bytes = values.stride(0) * values.itemsize
            self._lib.pack_tiles(_pointer(values), rows, row_bytes, self._is_int8, _pointer(packed))
            return Matrix(packed=packed, num_rows=rows, num_columns=columns, bias=bias, scale=scale, is_tiled=True)
        if self._is_int8:
            return int8.pack(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), _PACK_ROWS)
        return Matrix(packed=packed, num_rows=rows, num_columns=columns, bias=bias)

    def pack_head(self, weight: Tensor) -> Matrix:
        head = groups.head_in_groups(weight) if self.takes_groups else None
        return self.pack_matrix(weight, None) if head is None else self.pack_groups([head], None)

    def pack_groups(self, weights: Sequence[GroupedWeight], bias: Tensor | None) -> Matrix:
        return groups.pack(weights, None if bias is None else bias.float())

    def pack_fp8(self, weights: Sequence[Fp8Weight], bias: Tensor | None) -> Matrix:
        return fp8_codes.pack(weights, bias)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        return self._norm_rows(x, _pointer(weight), eps)

    def pack_rows(self, x: Tensor) -> Rows:
        return self._norm_rows(x, None, 0.0)

    def linear(self, rows: Rows, matrix: Matrix) -> Product:
        if matrix.is_tiled:
            dtype = torch.float32 if rows.scale is None else torch.int32
            sums = torch.empty(len(rows.values), matrix.num_rows, dtype=dtype)
            self._lib.matmul(*_operands(rows, matrix), _pointer(sums))
            return Product(sums, rows.scale, matrix.scale, matrix.bias)
        if rows.scale is not None:
            return Product(int8.multiply(rows.values, matrix), rows.scale, matrix.scale, matrix.bias)
        if fp8_codes.is_fp8(matrix):
            return self._fp8.multiply(rows.values, matrix)
        multiply = self._groups.multiply if matrix.bits else _multiply
        if self._reproducible:
            return Product(_in_even_blocks(multiply, rows.values, matrix), bias=matrix.bias)
        return Product(multiply(rows.values, matrix), bias=matrix.bias)

    def linear_add(self, rows: Rows, matrix: Matrix, x: Tensor, norm: Tensor | None = None) -> None:
        if matrix.is_tiled and norm is None:
            self._lib.matmul_add(*_operands(rows, matrix), _pointer(x))
        else:
            product = self.linear(rows, matrix)  # must outlive the call: pointers keep nothing alive
            eps = ctypes.c_float(self._model.norm_eps)
            self._lib.add(*_product(product), len(x), x.shape[1], _pointer(norm), eps, _pointer(x))

    def linear_gated(self, rows: Rows, matrix: Matrix) -> Rows:
        count, inner = len(rows.values), matrix.num_rows // 2
        is_gelu = self._model.activation == "gelu"
        ready = self._empty_rows(count, inner)
        if matrix.is_tiled:
            scratch = torch.empty(count, inner)
            self._lib.matmul_gated(*_operands(rows, matrix), is_gelu, _pointer(scratch), *_targets(ready))
        else:
            product = self.linear(rows, matrix)
            self._lib.gated(*_product(product), count, inner, is_gelu, *_targets(ready))
        return ready

    def best(self, rows: Rows, matrix: Matrix, allowed: Tensor | None = None) -> Tensor:
        columns = torch.empty(len(rows.values), dtype=torch.int64)
        if matrix.is_tiled:
            self._lib.matmul_best(*_operands(rows, matrix), *_masks(allowed), _pointer(columns))
            return columns
        product = self.linear(rows, matrix)
        if product.bias is not None or matrix.num_rows % _LANES:
            return reference.best(product.dequantized(), allowed)
        self._lib.best(*_product(product), *product.values.shape, *_masks(allowed), _pointer(columns))
        return columns

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
        model, rows = self._model, len(slots)
        q = torch.empty(rows, model.num_heads, model.head_dim, dtype=torch.bfloat16)
        self._lib.store_qkv(
            *_product(product),
            _pointer(product.bias),
            _pointer(qk_norm),
            ctypes.c_float(model.norm_eps),
            rows,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            _pointer(cos),
            _pointer(sin),
            _pointer(slots),
            ctypes.c_float(query_scale(model)),
            self._is_kv_int8,
            ctypes.c_int64(k_cache.stride(0) * k_cache.itemsize),
            _pointer(q),
            _pointer(k_cache),
            _pointer(v_cache),
        )
        return q

    def plan_attention(self, spans: list[SequenceSpan]) -> CpuAttentionPlan:
        shared = shared_spans(spans, BLOCK_TOKENS)
        lengths = [length for span in spans for length in range(span.start + 1, span.length + 1)]
        state = torch.empty(len(lengths), self._model.num_heads, self._model.head_dim + _STATE_REST)
        return CpuAttentionPlan(
            torch.tensor(lengths, dtype=torch.int32),
            torch.from_numpy(shared.tables),
            torch.from_numpy(shared.spans),
            torch.from_numpy(shared.level_ends),
            state,
        )

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuAttentionPlan, window: int = 0) -> Tensor:
        model, rows = self._model, len(q)
        out = torch.empty(rows, model.num_heads * model.head_dim)
        self._lib.attend(
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            self._is_kv_int8,
            ctypes.c_int64(k_cache.stride(0) * k_cache.itemsize),
            window,
            _pointer(q),
            _pointer(k_cache),
            _pointer(v_cache),
            _pointer(plan.lengths),
            _pointer(plan.tables),
            _pointer(plan.spans),
            _pointer(plan.level_ends),
            len(plan.level_ends),
            _pointer(plan.state),
            _pointer(out),
        )
        return out

    def logits(self, product: Product) -> Tensor:
        return product.dequantized()

    def run_layers(
        self,
        layers: Sequence[DecoderLayer],
        cache_of: Callable[[int], tuple[Tensor, Tensor]],
        x: Tensor,
        angles: Angles,
        slots: Tensor,
        plan: CpuAttentionPlan,
        eps: float,
    ) -> bool:
        if not self._has_tiles:
            return False  # layers.cpp isn't there
        if self.takes_groups and len(x) > self._groups.few_rows:
            return False  # many rows go through bf16, matrix by matrix
        stack = self._stack
        if stack is None or stack.layers is not layers or stack.caches[0][0].data_ptr() != cache_of(0)[0].data_ptr():
            if not can_stack(layers):
                return False
            caches = [cache_of(index) for index in range(len(layers))]
            stack = self._stack = LayerStack(self._lib, self._model, layers, caches, eps)
        stack.run(x, angles, slots, (plan.lengths, plan.tables, plan.spans, plan.level_ends, plan.state))
        return True

    def _norm_rows(self, x: Tensor, weight: ctypes.c_void_p | None, eps: float) -> Rows:
        assert x.dtype == torch.float32, "rows are float32"
        assert x.is_contiguous(), "rows are contiguous"
        ready = self._empty_rows(*x.shape)
        self._lib.norm_rows(_pointer(x), weight, ctypes.c_float(eps), *x.shape, *_targets(ready))
        return ready

    def _empty_rows(self, rows: int, columns: int) -> Rows:
        if self._is_int8:
            return Rows(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows))
        return Rows(torch.empty(rows, columns, dtype=torch.bfloat16))


def _check(model: ModelConfig, block_tokens: int) -> None:
    """What the C++ kernels rely on: whole registers and whole Hadamard blocks, no biases outside of qkv."""
    for columns in (model.hidden, model.mlp, model.num_heads * model.head_dim):
        if not int8.can_rotate(columns):
            raise BuildError(f"a width of {columns} is no multiple of {int8.BLOCK}")
    if model.head_dim % 32 or model.head_dim > 512:
        raise BuildError(f"heads of {model.head_dim} dimensions aren't supported")
    if model.has_out_bias or model.has_mlp_bias:
        raise BuildError("biases behind attention or in the MLP aren't supported")
    if block_tokens != BLOCK_TOKENS:
        raise BuildError(f"KV blocks hold {block_tokens} tokens, not {BLOCK_TOKENS}")


def _multiply(values: Tensor, matrix: Matrix) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(values, matrix.packed, None, "none", [], "")
    return product


def _in_even_blocks(multiply: Callable[[Tensor, Matrix], Tensor], values: Tensor, matrix: Matrix) -> Tensor:
    """torch picks its bf16 matmul by the number of rows, so that number is always the same here."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -len(values) % _EVEN_ROWS))
    return torch.cat([multiply(block, matrix) for block in torch.split(padded, _EVEN_ROWS)])[: len(values)]


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def _product(product: Product) -> tuple[object, ...]:
    values = product.values
    assert values.is_contiguous(), "products are contiguous"
    return (_KINDS[values.dtype], _pointer(values), _pointer(product.row), _pointer(product.column))


def _operands(rows: Rows, matrix: Matrix) -> tuple[object, ...]:
    values = rows.values
    assert values.is_contiguous(), "rows are contiguous"
    return (
        _pointer(values),
        _pointer(matrix.packed),
        _pointer(rows.scale),
        _pointer(matrix.scale),
        len(values),
        matrix.num_rows,
        values.shape[1] * values.itemsize,
    )


def _masks(allowed: Tensor | None) -> tuple[object, ...]:
    if allowed is None:
        return (None, 0, 0)
    assert allowed.dtype == torch.int32, "masks are words of 32 bits"
    assert allowed.is_contiguous(), "masks are contiguous"
    return (_pointer(allowed), *allowed.shape)


def _targets(rows: Rows) -> tuple[object, ...]:
    if rows.scale is None:
        return (None, None, _pointer(rows.values))
    return (_pointer(rows.values), _pointer(rows.scale), None)
