"""W8A8 arithmetic: quantized rows, quantized matrices, and the fastest exact int8 matmul of this machine.

1. Rows and weights are turned by Hadamard blocks of 64 columns (QuaRot, SpinQuant): an exact change of basis that
   spreads outliers, so that one scale a row loses ten times less.
2. x = scale * q with q in [-127, 127], scale = largest |x| / 127: one scale a row, of activations and of weights alike.
3. The product of the q is an integer sum (as float32 rounded once, above 2^24); the two scales come back afterwards,
   in whatever reads the product.

Torch has two int8 matmuls on CPU, and which is faster by a factor of two (on some machines of a thousand) depends on
the machine. Both are checked against exact sums at start, because the first was wrong on some processors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.values import Matrix

BLOCK = 64


class Int8Error(ConfigError):
    """This machine multiplies no int8 matrices correctly."""


@functools.cache
def _hadamard() -> Tensor:
    block = torch.ones(1, 1)
    while len(block) < BLOCK:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)), 0)
    return torch.mul(block, BLOCK**-0.5)


def can_rotate(columns: int) -> bool:
    """Whether rows of this width have whole blocks."""
    return columns % BLOCK == 0


def rotate(x: Tensor) -> Tensor:
    """x [..., columns] float32 in the turned basis."""
    turned = torch.matmul(x.view(*x.shape[:-1], -1, BLOCK), _hadamard().to(x.device))
    return turned.view(x.shape)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, columns] float32 -> int8 [T, columns] and scale float32 [T]; a row that isn't finite has a NaN scale."""
    scale = x.abs().amax(dim=-1) / 127
    is_sound = scale.isfinite()
    divisor = torch.where(is_sound & (scale > 0), scale, 1.0)
    values = torch.where(is_sound[:, None], x / divisor[:, None], 0.0).round().clamp(-127, 127).to(torch.int8)
    return values, torch.where(is_sound, scale, float("nan"))


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] of any float dtype -> int8 [out, in], rotated, and its scale float32 [out]."""
    return quantize_rows(rotate(weight.float()))


def pack(weight: Tensor, bias: Tensor | None) -> Matrix:
    """weight [out, in] of any float dtype -> its rotated, quantized form."""
    values, scale = quantize_weight(weight)
    return Matrix(
        packed=_backend().pack(values),
        num_rows=len(weight),
        num_columns=weight.shape[1],
        bias=None if bias is None else bias.float(),
        scale=scale,
    )


def multiply(values: Tensor, matrix: Matrix) -> Tensor:
    """values int8 [T, in] times the packed matrix: integer sums [T, out], as int32 or float32."""
    return _backend().multiply(values, matrix.packed, matrix.num_rows)


class _IntMm:
    """`torch._int_mm`: int32 sums, weights as they are."""

    @staticmethod
    def pack(values: Tensor) -> Tensor:
        return values.t()

    @staticmethod
    def multiply(values: Tensor, packed: Tensor, _num_rows: int) -> Tensor:
        return torch._int_mm(values, packed)


class _OneDnn:
    """oneDNN's quantized linear: float32 sums, weights in its own blocked layout."""

    @staticmethod
    def pack(values: Tensor) -> Tensor:
        packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
        return packed

    @staticmethod
    def multiply(values: Tensor, packed: Tensor, num_rows: int) -> Tensor:
        one, zero = _constants(num_rows)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            values, 1.0, 0, packed, one, zero, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product


@functools.cache
def _constants(num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(num_rows), torch.zeros(num_rows, dtype=torch.int32)


@functools.cache
def _backend() -> type[_IntMm] | type[_OneDnn]:
    """The faster of those that are right here. Raises Int8Error."""
    timed = [(seconds, backend) for backend in (_IntMm, _OneDnn) if (seconds := _try(backend)) is not None]
    if not timed:
        raise Int8Error("torch multiplies int8 matrices wrongly on this processor; use the weight format bf16.")
    return min(timed, key=lambda pair: pair[0])[1]


def _try(backend: type[_IntMm] | type[_OneDnn]) -> float | None:
    """Seconds for one matmul of a middling size, or None where sums are wrong."""
    generator = torch.Generator().manual_seed(0)
    best = float("inf")
    for rows, columns, out in ((1, 192, 48), (3, 640, 64), (64, 576, 320)):
        x = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
        w = torch.randint(-127, 128, (out, columns), generator=generator, dtype=torch.int8)
        packed = backend.pack(w)
        call: Callable[[], Tensor] = functools.partial(backend.multiply, x, packed, out)
        if not torch.equal(call().long(), x.long() @ w.long().t()):
            return None
    for _ in range(5):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
