"""The one dispatch seam: every heavy operation of the engine is a verb of `Kernels`.

Each tier implements the verbs for one device: `torch_tier` in plain torch (the definition, any machine, any format),
`cpu` in C++. `choose` picks a tier for a model and its formats and says in a sentence when it has to fall back.
`override` replaces the choice, for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from engine.cache.layout import Layout
from engine.kernels import fp8
from engine.kernels.spans import SequenceSpan
from engine.kernels.torch_tier import TorchKernels
from engine.kernels.values import Matrix, Product, Rows
from engine.model.config import ModelConfig
from engine.quant.fp8 import Fp8Weight
from engine.quant.groups import GroupedWeight
from engine.staging import Array

if TYPE_CHECKING:
    from engine.batch import StepArrays, StepInputs

__all__ = ["Kernels", "Matrix", "Product", "Rows", "SequenceSpan", "choose", "override"]


class Kernels(Protocol):
    """One tier, for one model and its formats. T rows of a step; `x` is the residual stream, float32 [T, hidden].

    `norm`, `pack_rows` and `linear_gated` end in `Rows`, ready for the next matmul; `linear_add` modifies `x`;
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

    @property
    def device(self) -> torch.device:
        """Where weights, caches and all tensors of a step are."""

    @property
    def draws(self) -> bool:
        """Whether ids are drawn on the device, by `draw`."""

    def place(
        self, plan: Any, arrays: Sequence[Array], send: Callable[[Sequence[Array]], list[Tensor]]
    ) -> tuple[Any, list[Tensor]]:
        """A plan of `plan_attention` as `attend` takes it, and `arrays` as tensors: all that goes to the device for a
        step, in one call of `send`."""

    def draw(self, logits: Tensor, numbers: Tensor, top_ks: Tensor, allowed: Tensor | None) -> Tensor:
        """An id for each row of logits, int64 [R], -1 where a value isn't finite or none may come: `numbers` and
        `top_ks` as engine/sample/picks.py has them, `allowed` as in `best`. Waits for nothing."""

    def graphs(self, forward: Forward, most_rows: int) -> Graphs | None:
        """Replays `forward` for steps of at most `most_rows` rows that only decode; None where nothing is to be won."""

    def pack_matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        """A weight [out, in] in the form that `linear` reads."""

    @property
    def takes_fp8(self) -> bool:
        """Whether the matrices of layers are fp8 (`pack_fp8`), whose rows are made fp8 in front of each."""

    def pack_head(self, weight: Tensor) -> Matrix:
        """The head [vocab, hidden], floating-point, in the form that `linear` and `best` read."""

    def pack_groups(self, weights: Sequence[GroupedWeight], bias: Tensor | None) -> Matrix:
        """Weights in groups, one below the other, in the form that `linear` reads."""

    def pack_fp8(self, weights: Sequence[Fp8Weight], bias: Tensor | None) -> Matrix:
        """fp8 weights, one below the other, in the form that `linear` reads."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Rows:
        """RMSNorm: x / sqrt(mean(x²) + eps) * weight."""

    def pack_rows(self, x: Tensor) -> Rows:
        """float32 [T, columns] as rows for `linear`."""

    def linear(self, rows: Rows, matrix: Matrix) -> Product: ...

    def linear_add(self, rows: Rows, matrix: Matrix, x: Tensor, norm: Tensor | None = None) -> None:
        """x += rows times matrix; normalized by the weight `norm` first, where there is one."""

    def linear_gated(self, rows: Rows, matrix: Matrix) -> Rows:
        """rows times matrix [gate | up] -> activation(gate) * up, with the model's activation."""

    def best(self, rows: Rows, matrix: Matrix, allowed: Tensor | None = None) -> Tensor:
        """The column of each row's largest value of rows times matrix, int64 [T]: the first of equals.

        `allowed` int32 [M, words] are the masks of the first M rows: bit c, in little-endian words, says that column c
        may come; none behind the last word may. -1 where a value isn't finite, whether it may come or not, and where
        no column may."""

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
        """product [T, q | k | v heads]: normalizes each head of q and k by `qk_norm` [2, head_dim] where there is one,
        turns them by cos, sin [T, head_dim / 2], writes k and v to `slots` [T] of a layer's caches, and returns q as
        `attend` wants it."""

    def plan_attention(self, spans: list[SequenceSpan]) -> Any:
        """What `attend` needs in every layer of one step."""

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, window: int = 0) -> Tensor:
        """Causal attention over the paged cache -> float32 [T, heads * head_dim]. A row sees the last `window` tokens,
        its own included; 0: all."""

    def logits(self, product: Product) -> Tensor:
        """The head's product as float32 [R, vocab]."""

    def run_layers(
        self,
        layers: Sequence[Any],
        cache_of: Callable[[int], tuple[Tensor, Tensor]],
        x: Tensor,
        angles: Any,
        slots: Tensor,
        plan: Any,
        eps: float,
    ) -> bool:
        """The verbs of all `layers` (model/layers.py) on `x`, in one call; same results. `cache_of` gives a layer's
        caches, `angles` (model/rope.py) are cosines and sines. False, and nothing has happened, where this tier takes
        verb by verb."""


class Graphs(Protocol):
    """The forward pass of decodes, recorded by size."""

    def run(
        self, step: StepArrays, beside: Sequence[Array], last_ids: Tensor | None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The hidden rows of the step's logits, and the arrays `beside` on the device; None: this step isn't one that
        is recorded. `last_ids` as in batch.filled, where the step needs them."""


Forward = Callable[["StepInputs"], Tensor]
Say = Callable[[str], None]
_override: Kernels | None = None


def choose(
    model: ModelConfig,
    *,
    weight_format: str,
    kv_format: str,
    block_tokens: int,
    say: Say,
    reproducible: bool = False,
    device: torch.device | None = None,
) -> Kernels:
    """The fastest tier that serves this model in these formats on `device` (engine/device.py; None: the CPU).

    `reproducible`: no row's result may depend on the rows beside it, even where that is slower; `say` is told where
    that can't be promised.
    """
    if _override is not None:
        return _override
    if device is not None and device.type == "cuda":
        from engine.kernels.gpu.tier import GpuKernels

        return GpuKernels(
            model, weight_format=weight_format, kv_format=kv_format, block_tokens=block_tokens, device=device
        )
    if weight_format == "fp8":
        say(fp8.EMULATED)
    if kv_format == "fp8":
        say("KV in fp8 is read and written in plain torch on a CPU, which is slower than int8, of the same size.")
    elif weight_format != "float32" and kv_format != "float32":
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
            say(f"Attention and row kernels run in plain torch, which is slower: {error}.")
    if reproducible:
        say("In plain torch an answer may depend on what is computed beside it, so nothing here is reproducible.")
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
