"""All layers of a step in one call of `layers.cpp`: what it needs of model, weights and caches, as pointers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.cpu.group_matmul import group_of, reads, zeros
from engine.kernels.values import Matrix
from engine.model.config import ModelConfig
from engine.model.rope import Angles

_MATRICES = ("qkv", "out", "gate_up", "down")
_NORMS = ("attention_norm", "qk_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")


class DecoderLayer(Protocol):
    """The weights of a layer, as in model/layers.py."""

    @property
    def attention_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> Matrix: ...
    @property
    def qk_norm(self) -> Tensor | None: ...
    @property
    def out(self) -> Matrix: ...
    @property
    def attention_post_norm(self) -> Tensor | None: ...
    @property
    def mlp_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> Matrix: ...
    @property
    def down(self) -> Matrix: ...
    @property
    def mlp_post_norm(self) -> Tensor | None: ...
    @property
    def window(self) -> int: ...


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scale", "bias", "zero", "between")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_columns", "group", "bits")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Matrix) for name in _MATRICES),
        *((name, ctypes.c_void_p) for name in (*_NORMS, "k_cache", "v_cache")),
        ("window", ctypes.c_int64),
    )


class _Shapes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_layers", "hidden", "mlp", "heads", "kv_heads", "dim")),
        *((name, ctypes.c_int) for name in ("is_int8", "is_kv_int8", "is_gelu", "has_groups")),
        ("block_bytes", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("q_scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("rows", "levels")),
        *((name, ctypes.c_void_p) for name in ("x", "cosine", "sine", "local_cosine", "local_sine", "slots")),
        *((name, ctypes.c_void_p) for name in ("lengths", "tables", "spans", "level_ends", "state")),
    )


class LayerStack:
    """The layers of one decoder over one KV pool, and working memory that stays from step to step."""

    def __init__(
        self,
        library: ctypes.CDLL,
        model: ModelConfig,
        layers: Sequence[DecoderLayer],
        caches: Sequence[tuple[Tensor, Tensor]],
        eps: float,
    ) -> None:
        self.layers = layers
        self.caches = caches
        self._library = library
        self._pointers = (_Layer * len(layers))(
            *(_pointers(layer, k, v) for layer, (k, v) in zip(layers, caches, strict=True))
        )
        keys = caches[0][0]
        self._shapes = _Shapes(
            num_layers=len(layers),
            hidden=model.hidden,
            mlp=model.mlp,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            dim=model.head_dim,
            is_int8=layers[0].qkv.packed.dtype == torch.int8,
            is_kv_int8=keys.dtype == torch.int8,
            is_gelu=model.activation == "gelu",
            has_groups=any(matrix.bits for layer in layers for matrix in _matrices(layer).values()),
            block_bytes=keys.stride(0) * keys.itemsize,
            eps=eps,
            q_scale=query_scale(model),
        )
        self._work = torch.empty(0, dtype=torch.uint8)
        library.layers_work.restype = ctypes.c_int64

    def run(
        self,
        x: Tensor,
        angles: Angles,
        slots: Tensor,
        attention: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """x [T, hidden] float32 through all layers. `attention`: lengths, tables, spans, level ends and state."""
        assert x.is_contiguous(), "the residual stream is contiguous"
        turns = (*angles.whole, *angles.local)
        assert all(turn.is_contiguous() for turn in turns), "cosines and sines are contiguous"
        needed = self._library.layers_work(ctypes.byref(self._shapes), len(x))
        if len(self._work) < needed:
            self._work = torch.empty(needed, dtype=torch.uint8)
        pointers = (tensor.data_ptr() for tensor in (x, *turns, slots, *attention))
        step = _Step(len(x), len(attention[3]), *pointers)
        self._library.run_layers(
            ctypes.byref(self._shapes), self._pointers, ctypes.byref(step), ctypes.c_void_p(self._work.data_ptr())
        )


def query_scale(model: ModelConfig) -> float:
    """What queries are multiplied by: the usual scale, and log2 e, because weights are powers of two."""
    return model.score_scale * math.log2(math.e)


def can_stack(layers: Sequence[DecoderLayer]) -> bool:
    """Whether all matrices are in a form that the CPU's own matmuls read."""
    return all(matrix.is_tiled or reads(matrix) for layer in layers for matrix in _matrices(layer).values())


def _matrices(layer: DecoderLayer) -> dict[str, Matrix]:
    return {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down}


def _pointers(layer: DecoderLayer, k_cache: Tensor, v_cache: Tensor) -> _Layer:
    norms = {
        "attention_norm": layer.attention_norm,
        "qk_norm": layer.qk_norm,
        "attention_post_norm": layer.attention_post_norm,
        "mlp_norm": layer.mlp_norm,
        "mlp_post_norm": layer.mlp_post_norm,
    }
    matrices = {name: _matrix(matrix) for name, matrix in _matrices(layer).items()}
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    return _Layer(**matrices, **_present(norms), **_present(caches), window=layer.window)


def _matrix(matrix: Matrix) -> _Matrix:
    zero, between = zeros(matrix)
    tensors = {"packed": matrix.packed, "scale": matrix.scale, "bias": matrix.bias, "zero": zero, "between": between}
    shape = {"num_rows": matrix.num_rows, "num_columns": matrix.num_columns}
    return _Matrix(**_present(tensors), **shape, group=group_of(matrix), bits=matrix.bits)


def _present(tensors: Mapping[str, Tensor | None]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
