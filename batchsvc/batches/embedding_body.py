"""The body of an embedding: up to 2,048 texts or lists of token ids, each of which becomes a vector.

All texts of a line are one request, so they are billed and fail together. They bill input only. What an earlier line
begins with is planned as cached where the engine can use it (engine/pooling.py): in the first text of a line, and
never where a model takes the mean of all states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchsvc.batches.body_values import allow, integer, wrong
from batchsvc.batches.line_prompt import Fitting, LinePrompt, check_ids, prompts_of
from engine.errors import RequestError
from engine.request import Pooling
from engine.sched.order import GRANULE_TOKENS
from engine.text import TextModel

ENDPOINT = "/v1/embeddings"
MOST_INPUTS = 2_048
MOST_TOKENS = 300_000
_FORMATS = ("float", "base64")

_KNOWN = frozenset({"model", "input", "dimensions", "encoding_format", "service_tier", "prompt_cache_key"})
# field -> values that ask for nothing special; null always does
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "cache_salt": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "normalize": (True,),
    "stream": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_activation": (True,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCall:
    """A checked body: endpoints.Call."""

    given: LinePrompt
    dimensions: int | None
    encoding_format: str
    messages: None = None

    def prepare(self, _text: TextModel) -> tuple[EmbeddingCall, LinePrompt]:
        return self, self.given

    def fit(self, lengths: Sequence[int], fitting: Fitting) -> dict[str, Any]:
        meta = fitting.meta
        if meta.pooling is None:
            raise RequestError(
                f"The model {meta.name} can't make embeddings: it pools in a way that a decoder doesn't.",
                code="endpoint_not_supported",
                param="model",
            )
        check_ids(self.given, meta, "input")
        self._check_lengths(lengths, meta.context_tokens)
        if self.dimensions is not None and self.dimensions > meta.hidden:
            raise wrong("dimensions", f"at most {meta.hidden}, the length of the model's vectors", self.dimensions)
        params = {
            "endpoint": ENDPOINT,
            "max_tokens": 0,
            "pooling": str(meta.pooling),
            "encoding_format": self.encoding_format,
        }
        params |= {} if self.dimensions is None else {"dimensions": self.dimensions}
        return params | ({"segments": list(lengths)} if len(lengths) > 1 else {})

    def _check_lengths(self, lengths: Sequence[int], context_tokens: int) -> None:
        for index, tokens in enumerate(lengths):
            at = f"input[{index}]" if len(lengths) > 1 else "input"
            if tokens == 0:
                raise RequestError(f"{at} has no tokens: write something.", code="invalid_value", param=at)
            if tokens > context_tokens:
                raise RequestError(
                    f"{at} has {tokens} tokens, but the model's context holds {context_tokens}: shorten it.",
                    code="context_length_exceeded",
                    param=at,
                )
        if sum(lengths) > MOST_TOKENS:
            raise RequestError(
                f"input has {sum(lengths)} tokens in all; a line may have {MOST_TOKENS}: make several lines of it.",
                code="invalid_value",
                param="input",
            )


def parse_embedding(body: dict[str, Any]) -> EmbeddingCall:
    """What a body asks for. Raises RequestError."""
    allow(body, _KNOWN, _HARMLESS)
    given = prompts_of(body, "input")
    if (count := max(len(given.texts), len(given.ids))) > MOST_INPUTS:
        raise RequestError(
            f"input has {count} texts; a line may have {MOST_INPUTS}: make several lines of it.",
            code="invalid_value",
            param="input",
        )
    encoding_format = body.get("encoding_format") or "float"
    if encoding_format not in _FORMATS:
        raise wrong("encoding_format", " or ".join(_FORMATS), encoding_format)
    dimensions = integer(body, "dimensions", 1, low=1) if body.get("dimensions") is not None else None
    return EmbeddingCall(given=given, dimensions=dimensions, encoding_format=encoding_format)


def planned_cached_tokens(params: Mapping[str, Any], planned_tokens: int, prompt_tokens: int) -> int:
    """What of a prefix that is planned as shared the row's engine can take from its cache."""
    if "pooling" not in params or planned_tokens == prompt_tokens:  # the latter repeats a row, which is run once
        return planned_tokens
    if params["pooling"] == Pooling.MEAN:
        return 0
    first = params["segments"][0] if "segments" in params else prompt_tokens
    return min(planned_tokens, (first - 1) // GRANULE_TOKENS * GRANULE_TOKENS)
