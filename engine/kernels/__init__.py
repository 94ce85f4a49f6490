"""The one dispatch seam: every heavy operation of the engine is a verb of `Kernels`.

Each tier implements the verbs for one device: `torch_tier` in plain torch (the definition, any machine, any format),
`cpu` in C++. `choose` picks a tier for a model and its formats and says in a sentence when it has to fall back.
`override` replaces the choice, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from engine.cache.layout import Layout
from engine.errors import ConfigError
from engine.kernels.spans import SequenceSpan
from engine.kernels.torch_tier import TorchKernels
from engine.kernels.values import Matrix, Product, Rows
from engine.model.config import ModelConfig
from engine.quant.groups import GroupedWeight

__all__ = ["Kernels", "Matrix", "Product", "Rows", "SequenceSpan", "choose", "override"]


class Kernels(Protocol):
    """One tier, for one model and its formats. T rows of a step; `x` is the residual stream, float32 [T, hidden].

    `norm`, `pack_rows` and `linear_silu` end in `Rows`, ready for the next matmul; `linear_add` modifies `x`;
    `store_qkv` writes the cache. What follows a matmul is part of its verb, or takes its `Product`: a tier can fuse it.
    """

    @property
    def is_fused(self) -> bool:
        """Whether scales and formats are fused into the kernels around a matmul: only then does int8 pay."""

    @property
    def takes_groups(self) -> bool:
        """Whether weights in groups stay so (`pack_groups`); else they are made floating-point before `pack_matrix`."""

    @property
    def layout(self) -> Layout: ...

    def pack_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """A weight [out, in] in the form that `linear` reads."""

    def pack_groups(self, weights: Sequence[GroupedWeight], bias: Tensor | None) -> Matrix:
        """Weights in groups, one below the other, in the form that `linear` reads."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        """RMSNorm: x / sqrt(mean(x²) + eps) * weight."""

    def pack_rows(self, x: Tensor) -> Rows:
        """float32 [T, columns] as rows for `linear`."""

    def linear(self, rows: Rows, matrix: Matrix) -> Product: ...

    def linear_add(self, rows: Rows, matrix: Matrix, x: Tensor) -> None:
        """x += rows times matrix."""

    def linear_silu(self, rows: Rows, matrix: Matrix) -> Rows:
        """rows times matrix [gate | up] -> silu(gate) * up."""

    def best(self, rows: Rows, matrix: Matrix, allowed: Tensor | None = None) -> Tensor:
        """The column of each row's largest value of rows times matrix, int64 [T]: the first of equals.

        `allowed` int32 [M, words] are the masks of the first M rows: bit c, in little-endian words, says that column c
        may come; none behind the last word may. -1 where a value isn't finite, whether it may come or not, and where
        no column may."""

    def store_qkv(
        self, product: Product, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> Tensor:
        """product [T, q | k | v heads]: turns q and k by cos, sin [T, head_dim / 2], writes k and v to `slots` [T] of
        a layer's caches, and returns q as `attend` wants it."""

    def plan_attention(self, spans: list[SequenceSpan]) -> Any:
        """What `attend` needs in every layer of one step."""

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any) -> Tensor:
        """Causal attention over the paged cache -> float32 [T, heads * head_dim]."""

    def logits(self, product: Product) -> Tensor:
        """The head's product as float32 [R, vocab]."""

    def run_layers(
        self,
        layers: Sequence[Any],
        cache_of: Callable[[int], tuple[Tensor, Tensor]],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        plan: Any,
        eps: float,
    ) -> bool:
        """The verbs of all `layers` (model/layers.py) on `x`, in one call; same results. `cache_of` gives a layer's
        caches. False, and nothing has happened, where this tier takes verb by verb."""


Say = Callable[[str], None]
_override: Kernels | None = None


def choose(
    model: ModelConfig, *, weight_format: str, kv_format: str, block_tokens: int, say: Say, reproducible: bool = False
) -> Kernels:
    """The fastest tier that serves this model in these formats on this machine.

    `reproducible`: no row's result may depend on the rows beside it, even where that is slower.
    """
    if _override is not None:
        return _override
    if weight_format != "float32" and kv_format != "float32":
        from engine.kernels.cpu import CpuKernels
        from engine.kernels.cpu.build import BuildError

        try:
            return CpuKernels(
                model,
                weight_format=weight_format,
                block_tokens=block_tokens,
                kv_format=kv_format,
                reproducible=reproducible,
            )
        except BuildError as error:
            if kv_format == "int8":
                raise ConfigError(f"int8 KV needs the compiled kernels: {error}. Use the KV format bf16.") from error
            say(f"Attention and row kernels run in plain torch, which is slower: {error}.")
    return TorchKernels(model, weight_format=weight_format, kv_format=kv_format, block_tokens=block_tokens)


@contextmanager
def override(kernels: Kernels) -> Iterator[None]:
    """Has `choose` return `kernels` while the context lasts. For tests; one thread at a time."""
    global _override
    before, _override = _override, kernels
    try:
        yield
    finally:
        _override = before
