"""How many bytes a model takes by purpose: the one arithmetic behind `models size` and the engine's own pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.memory.formats import KvFormat, WeightFormat, head_format
from engine.memory.shape import Matrix, ModelShape

LOGIT_ROWS = 128
"""Rows whose logits exist at once: they are the widest tensors of a step."""

_GATHER_BYTES = 64 << 20  # least scratch memory for the KV of sequences that are attended together


class Parts(NamedTuple):
    """Bytes of numbers and of the scales (and zero points) beside them."""

    values: int
    scales: int = 0

    @property
    def total(self) -> int:
        return self.values + self.scales

    def plus(self, other: Parts) -> Parts:
        return Parts(self.values + other.values, self.scales + other.scales)

    def times(self, count: int) -> Parts:
        return Parts(self.values * count, self.scales * count)


class KvShape(Protocol):
    """What of a decoder its cache depends on."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`concurrency` sequences of `context_tokens` each, and the formats they run in. `draft_bytes` are the weights of
    what proposes tokens (drafting.py)."""

    context_tokens: int
    concurrency: int
    weights: WeightFormat
    kv: KvFormat
    block_tokens: int = 16
    step_tokens: int = 2048
    draft_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Bytes by purpose. `workspace_bytes` is needed on each card, beside its part of the total.

    `step_bytes`: what a step of decoding reads, of weights and of the KV of full contexts, without a draft.
    """

    weights: Parts
    kv: Parts
    workspace_bytes: int
    step_bytes: int
    draft_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Weights, those of the draft too, and KV, with their scales."""
        return self.weights.total + self.draft_bytes + self.kv.total


def demand(shape: ModelShape, workload: Workload) -> Demand:
    """What the workload takes."""
    sequence = sequence_parts(shape, workload.kv, workload.context_tokens, workload.block_tokens)
    weights = weight_parts(shape, workload.weights)
    attended = attended_parts(shape, workload.kv, workload.context_tokens)
    looked_up = 0 if workload.weights.is_stored else shape.embedding * workload.weights.plain_bytes
    return Demand(
        weights=weights,
        kv=sequence.times(workload.concurrency),
        workspace_bytes=workspace_bytes(
            shape,
            workload.kv,
            step_tokens=workload.step_tokens,
            max_running=workload.concurrency,
            context_tokens=workload.context_tokens,
        ),
        step_bytes=weights.total - looked_up + attended.times(workload.concurrency).total,
        draft_bytes=workload.draft_bytes,
    )


def weight_parts(shape: ModelShape, form: WeightFormat) -> Parts:
    """Of all weights as the engine holds them: it packs a head of its own even where that is the embedding."""
    if form.is_stored:
        assert shape.stored_bytes is not None, "only a file has stored weights"
        return Parts(shape.stored_bytes)
    sum_of = Parts((shape.embedding + shape.vectors) * form.plain_bytes)
    for matrix in shape.matrices:
        sum_of = sum_of.plus(_matrix_parts(matrix, form))
    return sum_of if shape.head is None else sum_of.plus(head_parts(shape.head, form))


def head_parts(head: Matrix, form: WeightFormat) -> Parts:
    """Of the head beside matrices in that format."""
    return _matrix_parts(head, head_format(form, head.columns))


def block_bytes(shape: KvShape, kv: KvFormat, block_tokens: int) -> int:
    """Of one block of the pool: keys and values of all layers, and their scales."""
    return _slot_parts(shape, kv).times(shape.num_layers * block_tokens).total


def sequence_parts(shape: ModelShape, kv: KvFormat, context_tokens: int, block_tokens: int) -> Parts:
    """Of the KV of one sequence in whole blocks. Layers with a window keep the whole context too, as in the engine's
    pool, where a block is of all layers."""
    blocks = -(-context_tokens // block_tokens)
    return _slot_parts(shape, kv).times(shape.num_layers * blocks * block_tokens)


def attended_parts(shape: ModelShape, kv: KvFormat, context_tokens: int) -> Parts:
    """Of the KV of one sequence that its next token reads: layers with a window end there."""
    whole_layers = shape.num_layers - shape.window_layers
    in_windows = shape.window_layers * min(context_tokens, shape.window)
    return _slot_parts(shape, kv).times(whole_layers * context_tokens + in_windows)


def workspace_bytes(shape: ModelShape, kv: KvFormat, *, step_tokens: int, max_running: int, context_tokens: int) -> int:
    """Most that a step's activations, gathered KV and logits take at once; an estimate from above."""
    row = 4 * (2 * shape.hidden + 3 * shape.mlp + 2 * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim)
    gathered = context_tokens * 2 * shape.num_kv_heads * shape.head_dim * kv.value_bytes
    logits = 12 * min(max_running, LOGIT_ROWS) * shape.vocab_size
    return step_tokens * row + max(_GATHER_BYTES, gathered) + logits


def _slot_parts(shape: KvShape, kv: KvFormat) -> Parts:
    """Of one token in one layer: K and V."""
    heads = 2 * shape.num_kv_heads
    return Parts(heads * shape.head_dim * kv.value_bytes, heads * kv.scale_bytes)


def _matrix_parts(matrix: Matrix, form: WeightFormat) -> Parts:
    values = -(-matrix.elements * form.bits // 8)
    groups = matrix.rows * (-(-matrix.columns // form.group) if form.group else 1)
    return Parts(values, -(-groups * (form.scale_bits + form.zero_bits) // 8))
