"""Runs calibration text through a model layer by layer, and keeps the second moments of what each matrix reads.

The model code is the engine's own: one layer of the decoder on the plain torch kernels in float32, which tell what
their matmuls were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import StepInputs, build_inputs
from engine.cache.pool import KVPool
from engine.kernels.torch_tier import TorchKernels
from engine.kernels.values import Matrix, Product, Rows
from engine.model.config import ModelConfig
from engine.model.decoder import embed, run_layer
from engine.model.layers import Layer
from engine.model.rope import Angles, Rope
from engine.request import SamplingParams
from engine.sched.plan import Chunk

BATCH_TOKENS = 2048
_BLOCK_TOKENS = 16
_PARAMS = SamplingParams(max_tokens=1)


class Moments:
    """Of the inputs x of one matrix: `hessian` = Σ x xᵀ and `magnitude` = mean |x|, over all tokens."""

    def __init__(self, columns: int) -> None:
        self.hessian = torch.zeros(columns, columns)
        self._sum = torch.zeros(columns, dtype=torch.float64)
        self._count = 0

    def add(self, rows: Tensor) -> None:
        """rows [T, columns] float32."""
        self.hessian.addmm_(rows.t(), rows)
        self._sum += rows.abs().sum(0, dtype=torch.float64)
        self._count += len(rows)

    @property
    def magnitude(self) -> Tensor:
        """float32 [columns]."""
        return (self._sum / max(self._count, 1)).float()


class ListeningKernels(TorchKernels):
    """The plain kernels in float32; rows that go to a matrix in `moments` are added there."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model, weight_format="float32", kv_format="float32", block_tokens=_BLOCK_TOKENS)
        self.moments: dict[int, Moments] = {}

    def linear(self, rows: Rows, matrix: Matrix) -> Product:
        if found := self.moments.get(id(matrix)):
            found.add(rows.values)
        return super().linear(rows, matrix)


@dataclass(frozen=True, slots=True)
class LayerMoments:
    """Of the inputs of a layer's matrices."""

    qkv: Moments
    out: Moments
    gate_up: Moments
    down: Moments

    @property
    def all(self) -> tuple[Moments, Moments, Moments, Moments]:
        """In the order of use."""
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(slots=True)
class _Batch:
    inputs: StepInputs
    x: Tensor
    angles: Angles


class Walk:
    """The calibration text's hidden states on their way through the layers, one after the other."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: ListeningKernels,
        embedding: Tensor,
        sequences: Sequence[Sequence[int]],
    ) -> None:
        self._kernels = kernels
        self._eps = config.norm_eps
        rope = Rope(config)
        groups = _grouped(sequences)
        blocks = max(sum(-(-len(ids) // _BLOCK_TOKENS) for ids in group) for group in groups)
        self._pool = KVPool(
            replace(config, num_layers=1),
            kv_format="float32",
            block_tokens=_BLOCK_TOKENS,
            num_blocks=blocks,
            layout=self._kernels.layout,
        )
        self._batches = [self._batch(group, config, embedding, rope) for group in groups]

    def _batch(self, group: Sequence[Sequence[int]], config: ModelConfig, embedding: Tensor, rope: Rope) -> _Batch:
        inputs = build_inputs(_chunks(group), self._kernels, _BLOCK_TOKENS)
        return _Batch(inputs, embed(config, embedding, inputs.token_ids), rope.angles(inputs.positions))

    def listen(self, layer: Layer) -> LayerMoments:
        """What the matrices of `layer` read; the states stay where they are."""
        matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
        found = [Moments(matrix.num_columns) for matrix in matrices]
        self._kernels.moments = {id(matrix): moments for matrix, moments in zip(matrices, found, strict=True)}
        for batch in self._batches:
            self._run(layer, batch, batch.x.clone())
        self._kernels.moments = {}
        return LayerMoments(*found)

    def advance(self, layer: Layer) -> None:
        """Takes the states through `layer`."""
        for batch in self._batches:
            self._run(layer, batch, batch.x)

    def states(self) -> Tensor:
        """The hidden states of all tokens, [T, hidden]."""
        return torch.cat([batch.x for batch in self._batches])

    def _run(self, layer: Layer, batch: _Batch, x: Tensor) -> None:
        run_layer(self._kernels, layer, self._pool.layer(0), x, batch.angles, batch.inputs, self._eps)


def _grouped(sequences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Neighbours together, up to BATCH_TOKENS tokens."""
    groups: list[list[Sequence[int]]] = []
    size = BATCH_TOKENS
    for ids in sequences:
        if size + len(ids) > BATCH_TOKENS:
            groups.append([])
            size = 0
        groups[-1].append(ids)
        size += len(ids)
    return groups


def _chunks(sequences: Sequence[Sequence[int]]) -> list[Chunk]:
    chunks, block = [], 0
    for index, ids in enumerate(sequences):
        blocks = -(-len(ids) // _BLOCK_TOKENS)
        chunks.append(
            Chunk(
                seq_id=str(index),
                token_ids=tuple(ids),
                start=0,
                block_ids=tuple(range(block, block + blocks)),
                logit_rows=(),
                params=_PARAMS,
                num_prompt_tokens=len(ids),
            )
        )
        block += blocks
    return chunks
