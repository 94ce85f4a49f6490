"""A step's plan as tensors.

Shape legend: T rows of a step (one a token) · R rows whose logits are wanted · S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels import Kernels, SequenceSpan
from engine.sched.plan import PLACEHOLDER, Chunk


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


def build_inputs(
    chunks: Sequence[Chunk], kernels: Kernels, block_tokens: int, last_ids: Mapping[str, tuple[int, ...]]
) -> StepInputs:
    """Lays the chunks' rows one after the other. `last_ids` are the samples of the last step, for placeholders."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceSpan] = []
    for chunk in chunks:
        row, size = len(token_ids), len(chunk.token_ids)
        token_ids += resolve(chunk, last_ids)
        for position in range(chunk.start, chunk.start + size):
            positions.append(position)
            slots.append(chunk.block_ids[position // block_tokens] * block_tokens + position % block_tokens)
        logit_rows += [row + wanted for wanted in chunk.logit_rows]
        spans.append(SequenceSpan(row, size, chunk.start, chunk.block_ids))
    return StepInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        attention=kernels.plan_attention(spans),
    )


def resolve(chunk: Chunk, last_ids: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The chunk's input ids with placeholders filled: k of them are the last k samples of its sequence."""
    missing = chunk.token_ids.count(PLACEHOLDER)
    if not missing:
        return list(chunk.token_ids)
    known = last_ids.get(chunk.seq_id, ())
    assert len(known) >= missing, f"{chunk.seq_id} has a placeholder for a token the last step didn't sample"
    fresh = iter(known[-missing:])
    return [next(fresh) if token == PLACEHOLDER else token for token in chunk.token_ids]
