"""Tensors of a Hugging Face directory by parameter name, read lazily by the `safetensors` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.load.kept import GroupScheme
from engine.load.meta import weight_files
from engine.load.names import from_hf, is_beside_text, is_derived
from engine.quant.fp8 import Fp8Weight
from engine.quant.groups import GroupedWeight

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class SafetensorsSource:
    """`names` are parameter names; `load` reads one. Tensors whose names we don't know keep them, so that they show."""

    def __init__(self, path: Path, *, has_post_norms: bool = False) -> None:
        self.path = path
        self._home: dict[str, tuple[Any, str]] = {}
        for file in weight_files(path):
            try:
                opened: Any = safe_open(str(file), framework="pt")
                keys: list[str] = list(opened.keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(f"{file} is no usable safetensors file: {error}.") from error
            for key in keys:
                if is_derived(key) or is_beside_text(key):
                    continue
                name = from_hf(key, has_post_norms=has_post_norms) or key
                if name in self._home:
                    raise ModelError(f"{path} has the tensor {key} twice.")
                self._home[name] = (opened, key)

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def load(self, name: str) -> Tensor:
        """The tensor in its stored floating-point type. Raises ModelError for another type."""
        return self.tensor(name, FLOATS)

    is_fp8 = False

    def grouped(self, name: str) -> GroupedWeight | None:
        return None

    def fp8(self, name: str) -> Fp8Weight | None:
        return None

    def scheme(self, name: str) -> GroupScheme | None:
        return None

    def kind(self, name: str) -> str | None:
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
