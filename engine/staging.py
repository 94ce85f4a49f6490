"""A step's arrays on their way to the device, packed and brought over in one copy; and its ids on their way back.

    host     two pinned buffers in turn: one is filled for the next step while the other may still be read from
    device   a fresh buffer for each step, or one that stays in its place (`into`), for graphs that know its addresses

On the CPU nothing is copied, unless a buffer is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

ALIGN = 16
"""Bytes at whose multiples arrays begin: kernels are compiled for pointers that do."""

_EVENT: Any = torch.cuda.Event  # without types
_DTYPES = {"<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32}


def places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins in a packed buffer, and how many bytes that has."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // ALIGN) * ALIGN
    return starts, end


class Staging:
    """The way to one device. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_copies = 0
        self._pins = device.type == "cuda"
        self._turn = 0
        self._buffers = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._copied: list[Any] = [None, None]

    def send(self, arrays: Sequence[Array], into: Tensor | None = None) -> list[Tensor]:
        """The arrays on the device; packed into the bytes `into`, which are large enough, where that is given."""
        if into is None and self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        starts, size = places(arrays)
        host = self._host(size)
        flat = host.numpy()
        for array, start in zip(arrays, starts, strict=True):
            flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target = torch.empty(size, dtype=torch.uint8, device=self.device) if into is None else into
        target[:size].copy_(host[:size], non_blocking=True)
        self.num_copies += 1
        if self._pins:
            copied = _EVENT()
            copied.record()
            self._copied[self._turn] = copied
        return [
            target[start : start + array.nbytes].view(_DTYPES[array.dtype.str]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def fetch(self, numbers: Tensor) -> Fetch:
        """Begins to bring numbers to the host."""
        if numbers.device.type == "cpu":
            return Fetch(numbers, None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        event = _EVENT()
        event.record()
        return Fetch(host, event)

    def _host(self, size: int) -> Tensor:
        """The next buffer, once nothing is read from it any more."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.uint8, pin_memory=self._pins)
        return self._buffers[self._turn]


class Fetch:
    """Numbers that are being brought to the host: before what is launched after them, which they don't wait for."""

    def __init__(self, host: Tensor, event: Any) -> None:
        self._host = host
        self._event = event

    def tensor(self) -> Tensor:
        """Waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def ids(self) -> list[int]:
        """Likewise."""
        found: list[int] = self.tensor().tolist()
        return found
