"""The one dispatch seam: every heavy operation of the engine is called through here.

`ops` is the table of the operations in use; it starts as the plain-torch reference, which defines what each must
compute. Tests and faster tiers replace single entries with `override`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, dtype

from engine.kernels import reference
from engine.kernels.reference import AttentionPlan, SequenceSpan

__all__ = ["AttentionPlan", "Ops", "SequenceSpan", "ops", "override"]


class RMSNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, out_dtype: dtype) -> Tensor: ...


class Rope(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class SiluMul(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor: ...


class LinearOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class WriteCache(Protocol):
    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None: ...


class PlanAttention(Protocol):
    def __call__(
        self, spans: list[SequenceSpan], block_tokens: int, zero_slot: int, slot_bytes: int
    ) -> AttentionPlan: ...


class PagedAttention(Protocol):
    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One function an operation; `reference.py` says what each computes."""

    rms_norm: RMSNorm = reference.rms_norm
    rope: Rope = reference.rope
    silu_mul: SiluMul = reference.silu_mul
    linear: LinearOp = reference.linear
    write_cache: WriteCache = reference.write_cache
    plan_attention: PlanAttention = reference.plan_attention
    paged_attention: PagedAttention = reference.paged_attention


_current = Ops()


def ops() -> Ops:
    """The operations in use now."""
    return _current


@contextmanager
def override(table: Ops) -> Iterator[None]:
    """Uses `table` while the context lasts, e.g. `replace(ops(), linear=mine)`. For tests; one thread at a time."""
    global _current
    before, _current = _current, table
    try:
        yield
    finally:
        _current = before
