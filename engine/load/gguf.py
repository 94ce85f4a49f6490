"""Reads a GGUF file's header and tensors, each length checked against the file before it is believed.

1. One walk over the header gives the metadata and the tensor table. Nothing is allocated that the file itself
   could not hold, so a tiny file can't ask for huge memory or a long loop.
2. A tensor's bytes are mapped, never copied, and the `gguf` package turns them into float32.

The package's own reader is not used for step 1: it checks nothing against the file size, hangs on some broken files
and makes one object a token (3 s and 130 MiB for a 49,152-token vocabulary, against 0.1 s here).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import ModelError

MAX_STRING_BYTES = 64 << 20
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 8
MAX_DEPTH = 4

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major (outermost first), as numpy and torch spell it."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `fields` (metadata by key) and `tensors` (by name).

    Arrays of numbers are numpy arrays, arrays of strings are lists. Raises ModelError in one sentence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            if not path.stat().st_size:
                raise ModelError(f"The model file {path} is empty (a download that failed?).")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"The model file {path} can't be read: {error}.") from error
        self._walk = _Walk(self._map, path)
        self._read_header()

    def raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of the tensor `name`, as they are mapped."""
        info = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=info.num_bytes, offset=info.offset)

    def load(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor `name` as float32 [shape], dequantized."""
        info, raw = self.tensors[name], self.raw(name)
        if info.kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape)
        try:
            rows = raw.reshape(*info.shape[:-1], -1)
            return dequantize(rows, info.kind).astype(np.float32, copy=False).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has the format {info.kind.name}, not supported here."
            ) from error

    def _read_header(self) -> None:
        walk = self._walk
        if walk.take(4) != b"GGUF":
            way_out = "; pickles are never loaded: convert it to safetensors" if self.path.suffix in _PICKLES else ""
            raise ModelError(f"{self.path} is not a GGUF file{way_out}.")
        version = walk.scalar("I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} has GGUF version {version}; versions 2 and 3 in little-endian are supported."
            )
        num_tensors = walk.count(least_bytes=8 + 4 + 4 + 8)
        num_fields = walk.count(least_bytes=8 + 4 + 1)
        for _ in range(num_fields):
            key = walk.string()
            if key in self.fields:
                raise walk.broken(f"the key {key!r} appears twice")
            self.fields[key] = walk.value(walk.scalar("I"), depth=0)
        pieces = self.fields.get("split.count", 1)
        if not isinstance(pieces, int) or pieces > 1:
            raise ModelError(f"{self.path} is one piece of a split model; merge the pieces into one file first.")
        table = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise walk.broken(f"the alignment {alignment!r} is no power of two up to {MAX_ALIGNMENT}")
        data_start = -(-walk.offset // alignment) * alignment
        for info in table:
            self._place(info, data_start, alignment)

    def _tensor_entry(self) -> TensorInfo:
        walk = self._walk
        name = walk.string()
        num_dims = walk.scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise walk.broken(f"tensor {name!r} has {num_dims} dimensions")
        dims = [walk.scalar("Q") for _ in range(num_dims)]
        try:
            kind = GGMLQuantizationType(walk.scalar("I"))
        except ValueError as error:
            raise walk.broken(f"tensor {name!r} has an unknown format") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for size in dims:
            elements *= size
        if elements == 0 or dims[0] % block:
            raise walk.broken(f"tensor {name!r} of shape {dims} can't have the format {kind.name}")
        offset = walk.scalar("Q")
        return TensorInfo(name, tuple(reversed(dims)), kind, offset, elements // block * block_bytes)

    def _place(self, info: TensorInfo, data_start: int, alignment: int) -> None:
        if info.name in self.tensors:
            raise self._walk.broken(f"tensor {info.name!r} appears twice")
        offset = data_start + info.offset
        if info.offset % alignment or offset + info.num_bytes > len(self._map):
            raise self._walk.broken(f"tensor {info.name!r} lies outside the file (a download cut short?)")
        self.tensors[info.name] = TensorInfo(info.name, info.shape, info.kind, offset, info.num_bytes)


class _Walk:
    """A cursor over the mapped header that never passes the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = 0

    def broken(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is a broken GGUF file: {what}.")

    def take(self, size: int) -> bytes:
        end = self.offset + size
        if end > len(self._data):
            raise self.broken("it ends inside its header (a download cut short?)")
        piece = self._data[self.offset : end]
        self.offset = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, *, least_bytes: int) -> int:
        """A count of things that take at least `least_bytes` each, so that it is bounded by the file."""
        number: int = self.scalar("Q")
        if number * least_bytes > len(self._data) - self.offset:
            raise self.broken(f"it announces {number} entries, more than it can hold (a download cut short?)")
        return number

    def string(self) -> str:
        size = self.count(least_bytes=1)
        if size > MAX_STRING_BYTES:
            raise self.broken(f"a string of {size} bytes")
        return self.take(size).decode("utf-8", errors="replace")

    def value(self, kind: int, *, depth: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        if kind not in _SCALARS:
            raise self.broken(f"a value of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.broken("arrays nested too deep")
        kind = self.scalar("I")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
            size = self.count(least_bytes=dtype.itemsize)
            return np.frombuffer(self.take(size * dtype.itemsize), dtype=dtype)
        size = self.count(least_bytes=8 if kind == _STRING else 12)
        return [self.value(kind, depth=depth) for _ in range(size)]
