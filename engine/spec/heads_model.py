"""Heads as the model's own kernels run them: in the formats and on the device of the model that they are on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import Kernels
from engine.model.config import ModelConfig
from engine.sample.sampler import SampleRow, sample
from engine.spec.heads_file import Heads
from engine.spec.heads_loss import told


class PackedHeads:
    """`embedding` is the model's. The first `place` tokens of a proposal are known to head number `place`."""

    def __init__(self, heads: Heads, model: ModelConfig, kernels: Kernels, embedding: Tensor) -> None:
        self.num_heads = heads.num_heads
        self._kernels = kernels
        self._embedding = embedding
        self._vocab_size = model.vocab_size
        self._softcap = model.logit_softcap
        self._ids = heads.ids.long().to(kernels.device)
        self._head = kernels.pack_head(heads.parts["head"])
        self._gates = [kernels.pack_matrix(heads.parts[f"{k}.gate_up"], None) for k in range(heads.num_heads)]
        self._downs = [kernels.pack_matrix(heads.parts[f"{k}.down"], None) for k in range(heads.num_heads)]

    def begin(self, states: Sequence[NDArray[np.float32]]) -> Tensor:
        """The rows to start from, float32 [S, hidden]."""
        return torch.from_numpy(np.stack(states)).to(self._kernels.device)

    @torch.inference_mode()
    def next_ids(self, place: int, x: Tensor, token_ids: Sequence[int], rows: Sequence[SampleRow]) -> list[int | None]:
        """Takes the first rows of x, as many as there are `token_ids`, on by these tokens; what head `place` says comes
        next, sampled as `rows` say. None: it can't say."""
        mine = x[: len(token_ids)]
        embedded = self._embedding[torch.tensor(token_ids, device=x.device)].float()
        gated = self._kernels.linear_gated(self._kernels.pack_rows(told(mine, embedded)), self._gates[place])
        self._kernels.linear_add(gated, self._downs[place], mine)
        packed = self._kernels.pack_rows(mine)
        if all(row.is_argmax for row in rows):
            columns = self._kernels.best(packed, self._head)
            found = torch.where(columns >= 0, self._ids[columns.clamp(min=0)], -1)
            return [token if token >= 0 else None for token in found.tolist()]
        logits = self._kernels.logits(self._kernels.linear(packed, self._head))
        if self._softcap:
            logits = logits.div(self._softcap).tanh().mul(self._softcap)
        # what heads can't say is as unlikely as a finite number says: a sampler takes infinities for broken rows
        whole = torch.full((len(rows), self._vocab_size), _UNLIKELY, device=x.device)
        whole[:, self._ids] = logits
        return sample(whole.cpu(), rows)


_UNLIKELY = -1e9
