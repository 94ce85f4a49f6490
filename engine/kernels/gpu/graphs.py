"""CUDA graphs of the forward pass: steps that only decode are replayed instead of launched kernel by kernel.

1. A step is filled up to a size of few: rows, pieces of attention and slots of partial results each to the next of four
   sizes an octave. Rows beyond the step have no slot in the cache and no keys; what comes of them is cut off.
2. All that a graph reads lies at the beginning of one buffer that stays in its place, in the same order for the same
   sizes; block tables come last of it, as a kernel doesn't know their length. One copy fills it.
3. The first step of a size runs kernel by kernel (which compiles them), the second is recorded, later ones replay it.
   Recorded sizes are forgotten when the buffer has to grow. A size that can't be recorded, for want of memory, stays
   with its kernels.

Whatever reads the result runs behind it on the same stream, and before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import StepArrays, StepInputs, filled
from engine.kernels.gpu.pieces import Pieces
from engine.staging import Array, Staging, places

_MOST_GRAPHS = 128
_LEAST_PIECES = 16
_LEAST_BYTES = 1 << 20


class Size(NamedTuple):
    """What a graph is recorded for. `tile`: rows of attention's programs; `slots` 0: nothing is merged."""

    rows: int
    pieces: int
    slots: int
    tile: int


class Tier(Protocol):
    """What graphs ask of the tier whose kernels they record."""

    @property
    def device(self) -> torch.device: ...
    def tile_of(self, plan: Pieces) -> int: ...
    def placed(self, tensors: Sequence[Tensor], size: Size) -> object:
        """A step's plan of attention, of its tensors."""


class Graph(Protocol):
    """Work that is recorded once."""

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        """Its result, which is there after each `replay`."""

    def replay(self) -> None: ...


class CudaGraph:
    """Of a stream of the current device; all graphs of a pool share the memory that they need between their kernels."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    @classmethod
    def maker(cls) -> Callable[[], Graph]:
        """Makes graphs of a new pool. One whose graphs are all gone takes no others."""
        pool = torch.cuda.graph_pool_handle()
        return lambda: cls(pool)

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        try:
            # what other threads ask of the device meanwhile is no business of this recording
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                return work()
        except RuntimeError as error:  # the end of a recording may complain of the error that ended it
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise

    def replay(self) -> None:
        self._graph.replay()


def bucket(count: int) -> int:
    """The next size: powers of two up to 16, then four an octave."""
    if count <= 16:
        return 1 << max(count - 1, 0).bit_length()
    step = (1 << (count - 1).bit_length() - 1) // 4
    return -(-count // step) * step


def size_of(plan: Pieces, tile: int) -> Size:
    """The size that a step is filled up to."""
    slots = bucket(max(plan.num_slots, _LEAST_PIECES)) if plan.num_slots else 0
    pieces = bucket(max(len(plan.pieces), _LEAST_PIECES))
    return Size(bucket(len(plan.lengths)), pieces, slots, tile)


def padded(step: StepArrays, size: Size) -> list[Array]:
    """The arrays of a step of that size: ids, positions, slots, and those of its attention."""
    more = size.rows - len(step.token_ids)
    plan: Pieces = step.attention
    return [
        np.pad(step.token_ids, (0, more)),
        np.pad(step.positions, (0, more)),
        np.pad(step.slots, (0, more), constant_values=-1),
        *plan.padded(size.rows, size.pieces, size.slots).arrays,
    ]


class DecodeGraphs:
    """Graphs of one runner, whose `forward` takes a step's inputs on the device. `maker` gives what makes graphs that
    share memory, anew for those that come after all were forgotten."""

    def __init__(
        self,
        forward: Callable[[StepInputs], Tensor],
        tier: Tier,
        most_rows: int,
        maker: Callable[[], Callable[[], Graph]],
    ) -> None:
        self._forward = forward
        self._tier = tier
        self._most_rows = most_rows
        self._maker = maker
        self._make = maker()
        self._staging = Staging(tier.device)
        self._buffer = torch.empty(0, dtype=torch.uint8, device=tier.device)
        self._seen: set[Size] = set()
        self._too_large: set[Size] = set()
        self._graphs: dict[Size, tuple[Graph, Tensor]] = {}

    def run(
        self, step: StepArrays, beside: Sequence[Array], last_ids: Tensor | None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """See `kernels.Graphs`."""
        size = size_of(step.attention, self._tier.tile_of(step.attention))
        is_new = size not in self._seen
        if len(step.token_ids) > self._most_rows or (is_new and len(self._seen) >= _MOST_GRAPHS):
            return None
        mine = padded(step, size)
        tensors = self._sent([*mine, *beside])
        token_ids, positions, slots, *attention = tensors[: len(mine)]
        if last_ids is not None:
            token_ids.copy_(filled(token_ids, last_ids))
        inputs = StepInputs(token_ids, positions, slots, token_ids, self._tier.placed(attention, size))
        return self._result(size, inputs)[: len(step.token_ids)], tensors[len(mine) :]

    def _result(self, size: Size, inputs: StepInputs) -> Tensor:
        if size not in self._seen or size in self._too_large:
            self._seen.add(size)
            return self._forward(inputs)
        if size not in self._graphs:
            graph = self._make()
            try:
                self._graphs[size] = graph, graph.record(lambda: self._forward(inputs))
            except torch.OutOfMemoryError:
                self._too_large.add(size)
                return self._forward(inputs)
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def _sent(self, arrays: Sequence[Array]) -> list[Tensor]:
        _, needed = places(arrays)
        if needed > len(self._buffer):
            self._buffer = self._buffer.new_empty(max(2 * needed, _LEAST_BYTES))
            self._graphs.clear()
            self._make = self._maker()
        return self._staging.send(arrays, into=self._buffer)
