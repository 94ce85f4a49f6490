"""A step's plan as arrays on the host, then as tensors on the device.

Shape legend: T rows of a step (one a token) · R rows whose logits are wanted · S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import Kernels, SequenceSpan
from engine.sched.plan import PLACEHOLDER, Chunk
from engine.staging import Array


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of one step.

    `token_ids`, `positions` [T] and `slots` [T] (where each row's KV goes) are int64; `logit_rows` [R] are rows of T,
    chunk by chunk in order. `attention` is the tier's own plan of the step.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    attention: Any

    @classmethod
    def of(cls, tensors: Sequence[Tensor], attention: Any) -> StepInputs:
        """From the arrays of a step as they are on the device."""
        token_ids, positions, slots, logit_rows = tensors
        return cls(token_ids, positions, slots, logit_rows, attention)

    def with_ids(self, token_ids: Tensor) -> StepInputs:
        return replace(self, token_ids=token_ids)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The same on the host. A token that was sampled in the last step and isn't known here is -1 - its place among the
    ids of that step. `decodes`: every chunk is one token, perhaps with a draft behind it, and all logits are wanted."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    attention: Any
    decodes: bool

    @property
    def arrays(self) -> list[Array]:
        return [self.token_ids, self.positions, self.slots, self.logit_rows]

    @property
    def has_unread(self) -> bool:
        return bool(len(self.token_ids)) and int(self.token_ids.min()) < 0


def lay_out(
    chunks: Sequence[Chunk], kernels: Kernels, block_tokens: int, last_places: Mapping[str, range]
) -> StepArrays:
    """Lays the chunks' rows one after the other. `last_places` says where among the last step's ids those of each
    sequence are."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceSpan] = []
    for chunk in chunks:
        row, size = len(token_ids), len(chunk.token_ids)
        token_ids += _referring(chunk, last_places)
        for position in range(chunk.start, chunk.start + size):
            positions.append(position)
            slots.append(chunk.block_ids[position // block_tokens] * block_tokens + position % block_tokens)
        logit_rows += [row + wanted for wanted in chunk.logit_rows]
        spans.append(SequenceSpan(row, size, chunk.start, chunk.block_ids))
    return StepArrays(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        slots=np.array(slots, np.int64),
        logit_rows=np.array(logit_rows, np.int64),
        attention=kernels.plan_attention(spans),
        decodes=len(token_ids) == len(logit_rows) and all(chunk.pooling is None for chunk in chunks),
    )


def build_inputs(chunks: Sequence[Chunk], kernels: Kernels, block_tokens: int) -> StepInputs:
    """The tensors of chunks all of whose tokens are known, in the host's memory."""
    step = lay_out(chunks, kernels, block_tokens, {})
    attention, tensors = kernels.place(step.attention, step.arrays, lambda arrays: list(map(torch.from_numpy, arrays)))
    return StepInputs.of(tensors, attention)


def filled(token_ids: Tensor, last_ids: Tensor) -> Tensor:
    """token_ids [T] with those of the last step, ids [R], in their places; 0 for a token that has none: what comes of
    it is thrown away."""
    known = last_ids.index_select(0, (-1 - token_ids).clamp(min=0))
    return torch.where(token_ids < 0, known, token_ids).clamp(min=0)


def resolve(chunk: Chunk, last_ids: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The chunk's input ids with placeholders filled: k of them are the last k samples of its sequence."""
    missing = _num_missing(chunk)
    known = last_ids.get(chunk.seq_id, ())
    assert len(known) >= missing, f"{chunk.seq_id} has a placeholder for a token the last step didn't sample"
    return _with(chunk, known[len(known) - missing :])


def _referring(chunk: Chunk, last_places: Mapping[str, range]) -> list[int]:
    missing = _num_missing(chunk)
    if not missing:
        return list(chunk.token_ids)
    places = last_places.get(chunk.seq_id, range(0))
    assert len(places) >= missing, f"{chunk.seq_id} has a placeholder for a token the last step didn't sample"
    return _with(chunk, [-1 - place for place in places[len(places) - missing :]])


def _num_missing(chunk: Chunk) -> int:
    return chunk.token_ids.count(PLACEHOLDER)


def _with(chunk: Chunk, fresh: Sequence[int]) -> list[int]:
    values = iter(fresh)
    return [next(values) if token == PLACEHOLDER else token for token in chunk.token_ids]
