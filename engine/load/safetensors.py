"""Tensors of a Hugging Face directory by parameter name, read lazily by the `safetensors` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.load.meta import weight_files
from engine.load.names import from_hf, is_derived
from engine.quant.groups import GroupedWeight

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsSource:
    """`names` are parameter names; `load` reads one. Tensors whose names we don't know keep them, so that they show."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._home: dict[str, tuple[Any, str]] = {}
        for file in weight_files(path):
            try:
                opened: Any = safe_open(str(file), framework="pt")
                keys: list[str] = list(opened.keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(f"{file} is no usable safetensors file: {error}.") from error
            for key in keys:
                if is_derived(key):
                    continue
                name = from_hf(key) or key
                if name in self._home:
                    raise ModelError(f"{path} has the tensor {key} twice.")
                self._home[name] = (opened, key)

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def load(self, name: str) -> Tensor:
        """The tensor in its stored floating-point type. Raises ModelError for another type."""
        return self.tensor(name, FLOATS)

    def grouped(self, name: str) -> GroupedWeight | None:
        return None

    def tensor(self, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        """The tensor of one of these types. Raises ModelError for another type."""
        opened, key = self._home[name]
        try:
            tensor: Tensor = opened.get_tensor(key)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{self.path}: tensor {key} can't be read: {error}.") from error
        if tensor.dtype not in dtypes:
            raise ModelError(f"{self.path}: tensor {key} has the type {tensor.dtype}, not supported here.")
        return tensor
