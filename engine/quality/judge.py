"""Finds the verdict on a pair of formats: from what was measured before, or by measuring it now.

A quantized model is held against the one that it was made from. Where nobody says which that is, or memory doesn't
suffice for both, its verdict is `unmeasured`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.config import Formats
from engine.errors import ModelError
from engine.load.fetch import locate
from engine.load.meta import ModelMeta, read_json, read_meta
from engine.load.origin import Origin, origin_of
from engine.load.quantization import Quantization, read_quantization
from engine.load.weights import open_model
from engine.memory.plan import available_bytes
from engine.quality import kept
from engine.quality.figures import Quality
from engine.quality.limits import Part, Verdict, kv_limit, weight_limit
from engine.quality.measure import Reference

PLAIN = "bf16"
"""The format of one side while the other is judged."""

BYTES_PER_PARAMETER = 7  # float32, and at most bf16 with a head of its own

Say = Callable[[str], None]


class Judge:
    """Judges formats of one model. Raises EngineError where the model can't be read or run."""

    def __init__(self, model: str, say: Say) -> None:
        self.meta: ModelMeta = read_meta(model)
        self.stored: Quantization | None = quantization_of(self.meta.path)
        self.origin: Origin | None = None if self.stored is None else origin_of(self.meta.path)
        self._say = say
        self._found: dict[Formats, Quality | None] = {}
        self._reference: Reference | None = None

    def verdict(self, formats: Formats) -> Verdict:
        """On both formats."""
        return Verdict(weights=self.weights(formats.weights), kv=self.kv(formats))

    def weights(self, weight_format: str) -> Part:
        """On weights in this format."""
        limit = weight_limit(weight_format, self.stored)
        quality = None if limit is None else self._once(Formats(weight_format, PLAIN))
        return Part(format=weight_format, limit=limit, quality=quality)

    def kv(self, formats: Formats) -> Part:
        """On the KV of this pair of formats."""
        limit = kv_limit(formats.kv)
        quality = None if limit is None else self._once(beside(formats, self.stored))
        return Part(format=formats.kv, limit=limit, quality=quality)

    def _once(self, formats: Formats) -> Quality | None:
        """What one format of this pair costs, the other being plain."""
        if formats not in self._found:
            self._found[formats] = self._find(formats)
        return self._found[formats]

    def _find(self, formats: Formats) -> Quality | None:
        is_own = self.stored is None or formats.kv != PLAIN
        base = self.meta.digest if is_own else None if self.origin is None else self.origin.digest
        found = kept.load(self.meta, formats, base)
        if found is not None:
            return found
        if is_own:
            return self._measured(formats, self.meta.path) if self._has_room(formats) else None
        if self.origin is None:
            command = f"`batchsvc models eval {self.meta.path} --against MODEL` tells both"
            self._tell_unknown(formats, f"nobody says which model it was made from; {command}")
            return None
        if not self._has_room(formats):  # asked before what it was made from is fetched
            return None
        try:
            return self._measured(formats, found_origin(self.origin, self._say))
        except ModelError as error:
            self._tell_unknown(formats, str(error).rstrip("."))
            return None

    def _has_room(self, formats: Formats) -> bool:
        config, _ = open_model(self.meta.path)
        has_room = BYTES_PER_PARAMETER * config.num_parameters <= available_bytes()
        if not has_room:
            self._tell_unknown(formats, "there is too little memory here to compare it with float32")
        return has_room

    def _measured(self, formats: Formats, base: Path) -> Quality:
        self._say(f"Measuring once what {_spelled(formats)} costs {self.meta.name} in quality.")
        if self._reference is None or self._reference.meta.path != base:
            self._reference = None  # before the next one is there: two may be more than there is room for
            self._reference = Reference(str(base), say=self._say)
        quality = self._reference.compare(str(self.meta.path), *formats)
        kept.store(self.meta, quality)
        return quality

    def _tell_unknown(self, formats: Formats, why: str) -> None:
        self._say(f"What {_spelled(formats)} costs {self.meta.name} in quality isn't known: {why}.")


def quantization_of(path: Path) -> Quantization | None:
    """How the weights of the model at `path` are quantized by its config.json. A GGUF file counts as it is: it is the
    model."""
    return read_quantization(read_json(path / "config.json"), path) if path.is_dir() else None


def found_origin(origin: Origin, say: Say) -> Path:
    """Where the model lies that a copy was made from. Raises ModelError where it is gone or has changed."""
    path = locate(origin.model, say=say)
    if read_meta(path).digest != origin.digest:
        raise ModelError(f"{origin.model} isn't the same model any more as when the copy was made.")
    return path


def beside(formats: Formats, stored: Quantization | None) -> Formats:
    """The pair on which KV in its format is judged: with plain weights, or with those that a checkpoint has."""
    return Formats(PLAIN if stored is None else formats.weights, formats.kv)


def _spelled(formats: Formats) -> str:
    """What of a pair is judged."""
    return formats.weights if formats.kv == PLAIN else f"KV in {formats.kv}"
