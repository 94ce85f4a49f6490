"""What tiers whose tensors lie in the host's memory answer alike where the seam speaks of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.staging import Array


class HostKernels:
    """See `Kernels`."""

    device = torch.device("cpu")
    draws = False

    def place(
        self, plan: Any, arrays: Sequence[Array], send: Callable[[Sequence[Array]], list[Tensor]]
    ) -> tuple[Any, list[Tensor]]:
        return plan, send(arrays)

    def draw(self, logits: Tensor, numbers: Tensor, top_ks: Tensor, allowed: Tensor | None) -> Tensor:
        raise AssertionError("engine/sample draws these ids")

    def graphs(self, forward: object, most_rows: int) -> None:
        return None
