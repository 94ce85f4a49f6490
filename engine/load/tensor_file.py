"""Writes tensors that others may read: the library makes its files readable by their owner alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file, as readable as the folder it lies in. Raises OSError or SafetensorError."""
    save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    path.chmod(path.parent.stat().st_mode & 0o666)
