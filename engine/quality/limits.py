"""How much a format may cost in quality, and the verdict on what it was found to cost; no torch.

Each format is held to its own limit: weights with KV in bf16, against the unquantized model in float32; KV against the
same model without. Perplexities are ratios.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from engine.load.quantization import Quantization
from engine.quality.figures import Quality


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a format may cost."""

    kl: float
    perplexity: float

    def holds(self, quality: Quality) -> bool:
        """Also false where a figure is not a number."""
        return quality.kl <= self.kl and quality.perplexity <= self.perplexity

    def __str__(self) -> str:
        return f"{self.kl:g}, {shown_change(self.perplexity)}"


INT8 = Limit(0.01, 1.01)
INT8_KV = Limit(0.005, 1.005)
FP8 = Limit(0.02, 1.01)
INT4 = Limit(0.05, 1.04)

_WEIGHTS = {"int8": INT8, "w8a16": INT8, "fp8": FP8, "w4a16": INT4}
_KV = {"int8": INT8_KV, "fp8": FP8}


class Word(StrEnum):
    """A verdict in one word, the better ones first. What is `over` is served only where that is forced."""

    UNQUANTIZED = "unquantized"
    WITHIN = "within"
    UNMEASURED = "unmeasured"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One format, its limit (None: it isn't quantized) and what it costs (None: that isn't known)."""

    format: str
    limit: Limit | None
    quality: Quality | None = None

    @property
    def word(self) -> Word:
        if self.limit is None:
            return Word.UNQUANTIZED
        if self.quality is None:
            return Word.UNMEASURED
        return Word.WITHIN if self.limit.holds(self.quality) else Word.OVER

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        found = self.quality
        return {
            "format": self.format,
            "verdict": str(self.word),
            "kl": None if found is None else rounded(found.kl, 6),
            "top1": None if found is None else rounded(found.top1, 4),
            "perplexity_ratio": None if found is None else rounded(found.perplexity, 5),
            "limit": None if self.limit is None else asdict(self.limit),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of the two formats that a model is served in."""

    weights: Part
    kv: Part

    @property
    def word(self) -> Word:
        """That of the worse of the two."""
        return worst(self.weights.word, self.kv.word)

    def shown(self) -> dict[str, Any]:
        """As JSON: what models and batches show."""
        return {"verdict": str(self.word), "weights": self.weights.shown(), "kv": self.kv.shown()}


def worst(*words: Word) -> Word:
    """The worst of some verdicts."""
    return max(words, key=list(Word).index)


def weight_limit(weight_format: str, stored: Quantization | None) -> Limit | None:
    """Of weights that run in this format and are stored like that: the wider of the two limits."""
    limits = [limit for limit in (_WEIGHTS.get(weight_format), _stored_limit(stored)) if limit is not None]
    return max(limits, key=lambda limit: limit.kl, default=None)


def kv_limit(kv_format: str) -> Limit | None:
    """Of a KV cache in this format."""
    return _KV.get(kv_format)


def shown_change(ratio: float) -> str:
    """A ratio as a change in percent, such as +0.3 %."""
    change = 100 * (ratio - 1)
    return f"{round(change, 2 if abs(change) < 10 else 1):+g} %"


def rounded(value: float, digits: int) -> float | None:
    """A figure that JSON can carry; None where it is not a number."""
    return round(value, digits) if math.isfinite(value) else None


def _stored_limit(stored: Quantization | None) -> Limit | None:
    if stored is None:
        return None
    if stored.bits == 4:
        return INT4
    return FP8 if stored.is_float else INT8
