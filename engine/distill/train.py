"""The loop that trains anything: parameters, a loss over a batch, batches by number; checkpoints, resume, bounds.

This is the seam for whoever trains something beside a student (such as extra heads on the frozen teacher):

    def loss(pack: Pack) -> Tensor:                                   # a scalar that torch can derive
        with torch.no_grad():
            states = forward.hidden(config, teacher, pack)            # the frozen teacher's rows [T, hidden]
        return heads_loss(heads, states[pack.rows], pack.next_ids, pack.targets)

    train(heads, loss, dataset.batch, settings, folder, tell)         # heads: dict of name -> float32 tensor

The loop knows nothing of what a batch is or what the loss means. Batch number i is the same in every run (a dataset
orders its packs by seed and epoch), and a step depends on its number, on the parameters and on the optimizer alone: so
a run that was stopped and goes on from its checkpoint ends with the same bits as one that wasn't, with equal settings
and threads. `parameters` are changed in place; they hold the master weights, float32.

The learning rate rises for the first steps and falls along a cosine to a tenth. A run that is bounded by minutes
measures its first steps and fixes their number then, so that the fall ends where the time does; the number is part of
the checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.distill import checkpoint
from engine.distill.checkpoint import Progress
from engine.distill.errors import DistillError, StoppedError, memory_told

Batch = TypeVar("Batch")
Tell = Callable[[dict[str, Any]], None]

PACE_STEPS = 6
"""Steps that are timed before a run bounded by minutes knows how many it has."""
LEAST_SHARE = 0.1
"""Of the learning rate, at the end."""
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`steps` or `minutes` (of training, whichever ends first) bound a run; one of them is given.

    `betas`, `decay` and `clip` are AdamW's and the largest norm of a gradient; `checkpoint_steps` lie between two
    checkpoints; `is_reduced` multiplies matrices in bf16 where the loss allows it (torch.autocast); `smaller` names the
    option that makes a step take less memory.
    """

    steps: int | None = None
    minutes: float | None = None
    rate: float = 5e-4
    warmup_share: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.01
    clip: float = 1.0
    checkpoint_steps: int = 25
    is_reduced: bool = False
    smaller: str = "--pack-tokens"


def learning_rate(step: int, steps: int, settings: Settings) -> float:
    """Of step number `step` of `steps`, counted from 0."""
    warmup = max(round(steps * settings.warmup_share), 1)
    if step < warmup:
        return settings.rate * (step + 1) / warmup
    share = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return settings.rate * (LEAST_SHARE + (1 - LEAST_SHARE) * (1 + math.cos(math.pi * share)) / 2)


def train(
    parameters: Mapping[str, Tensor],
    loss: Callable[[Batch], Tensor],
    batch: Callable[[int], Batch],
    settings: Settings,
    folder: Path,
    tell: Tell = lambda line: None,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Progress:
    """Trains `parameters` in place from the checkpoint in `folder`, if there is one, to the end.

    `tell` gets the phase, step, steps, loss and seconds left after each step. Raises StoppedError once `is_stopped`,
    with a checkpoint of all steps so far, and DistillError for a loss that is no number or memory that doesn't suffice.
    """
    if settings.steps is None and settings.minutes is None:
        raise DistillError("A run needs a bound: give --steps or --minutes.")
    trained = {name: tensor.requires_grad_() for name, tensor in sorted(parameters.items())}
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in trained.values() if one.dim() > 1], "weight_decay": settings.decay},
            {"params": [one for one in trained.values() if one.dim() <= 1], "weight_decay": 0.0},
        ],
        betas=settings.betas,
    )
    progress = _restored(folder, trained, optimizer)
    saved_step = progress.step
    try:
        while not _is_over(progress, settings):
            _check_running(is_stopped)
            began = time.perf_counter()
            with memory_told(f"go on with --resume and a smaller {settings.smaller}"):
                _step(progress, trained, optimizer, loss, batch, settings)
            progress.seconds += time.perf_counter() - began
            progress.step += 1
            tell(_told(progress, settings))
            if progress.step - saved_step >= settings.checkpoint_steps:
                _save(folder, progress, trained, optimizer)
                saved_step = progress.step
    except StoppedError:
        _save(folder, progress, trained, optimizer)
        raise
    finally:
        for tensor in trained.values():
            tensor.requires_grad_(False)
            tensor.grad = None
    if progress.step > saved_step:
        _save(folder, progress, trained, optimizer)
    return progress


def _check_running(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise StoppedError("Stopped; the same command with --resume goes on.")


def _step(
    progress: Progress,
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Batch], Tensor],
    batch: Callable[[int], Batch],
    settings: Settings,
) -> None:
    if progress.steps is None:
        progress.steps = _known_steps(progress, settings)
    # until the pace is known the rate rises as if the run were a long one
    steps = progress.steps or round(PACE_STEPS / settings.warmup_share) * 10
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(progress.step, steps, settings)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.is_reduced):
        value = loss(batch(progress.step))
    torch.autograd.backward([value])
    found = float(value.detach())
    norm = float(torch.nn.utils.clip_grad_norm_(list(trained.values()), settings.clip))
    if not math.isfinite(found) or not math.isfinite(norm):
        raise DistillError(
            f"The loss of step {progress.step + 1} is no number any more: train again with a lower --lr."
        )
    optimizer.step()
    progress.losses.append(found)


def _known_steps(progress: Progress, settings: Settings) -> int | None:
    most = _NEVER if settings.steps is None else settings.steps
    if settings.minutes is None:
        return most
    if progress.step < min(PACE_STEPS, most):
        return None
    return min(max(int(settings.minutes * 60 * progress.step / progress.seconds), progress.step + 1), most)


def _is_over(progress: Progress, settings: Settings) -> bool:
    if progress.steps is not None and progress.step >= progress.steps:
        return True
    if settings.steps is not None and progress.step >= settings.steps:
        return True
    return settings.minutes is not None and progress.seconds >= settings.minutes * 60


def _told(progress: Progress, settings: Settings) -> dict[str, Any]:
    pace = progress.seconds / progress.step
    left = None if progress.steps is None else pace * (progress.steps - progress.step)
    if settings.minutes is not None:
        rest = settings.minutes * 60 - progress.seconds
        left = rest if left is None else min(left, rest)
    return {
        "phase": "train",
        "done": progress.step,
        "total": progress.steps,
        "loss": round(progress.losses[-1], 4),
        "eta_s": None if left is None else round(max(left, 0.0), 1),
    }


def _save(folder: Path, progress: Progress, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    tensors = dict(trained)
    for name, tensor in trained.items():
        for part, value in optimizer.state[tensor].items():
            tensors[f"{part}/{name}"] = value
    checkpoint.save(folder, progress, tensors)


def _restored(folder: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Progress:
    found = checkpoint.load(folder)
    if found is None:
        return Progress()
    progress, tensors = found
    if not trained.keys() <= tensors.keys() or any(tensors[name].shape != trained[name].shape for name in trained):
        raise DistillError(f"The checkpoint in {folder} is of another student; remove it to train from the beginning.")
    with torch.no_grad():
        for name, tensor in trained.items():
            tensor.copy_(tensors.pop(name))
            parts = ((key.partition("/"), value) for key, value in tensors.items())
            optimizer.state[tensor] = {part: value for (part, _, owner), value in parts if owner == name}
    return progress
