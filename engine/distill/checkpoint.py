"""The state of a training run in one file: written beside the old one, then renamed over it: one of both is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.distill.errors import DistillError
from engine.distill.options import CHECKPOINT

FILE = CHECKPOINT


@dataclass(slots=True)
class Progress:
    """How far a run is: `step` steps of `steps` (None: not known yet) in `seconds`, and the loss of each."""

    step: int = 0
    steps: int | None = None
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


def save(folder: Path, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the checkpoint of `folder`. A process that dies in between leaves the old one."""
    scratch = folder / f".{FILE}"
    try:
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            scratch,
            metadata={"progress": json.dumps(asdict(progress))},
        )
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(folder / FILE)
    except (OSError, SafetensorError) as error:
        raise DistillError(
            f"The checkpoint can't be written to {folder} ({error}); make room there and go on with --resume."
        ) from error


def load(folder: Path) -> tuple[Progress, dict[str, Tensor]] | None:
    """The last checkpoint of `folder`; None where there is none. Raises DistillError for one that can't be read."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            progress = Progress(**json.loads(file.metadata()["progress"]))
            return progress, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DistillError(
            f"{path} is no usable checkpoint ({error}); remove it to train from the beginning."
        ) from error
