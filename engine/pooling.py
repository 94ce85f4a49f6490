"""Requests whose result is a vector: which states of the prompt are pooled, and how a vector comes of them.

Such a request computes its prompt and samples nothing. It may hold several prompts one after the other (`segments`):
each runs as a sequence of its own, under an id made of the request's, and the request ends with the last of them.

LAST takes the state of the last token, which any run of the prompt has: cached prefixes are as good as computed ones.
MEAN needs the states of all tokens, and the cache holds keys and values, not states. So a prompt that is pooled by
MEAN neither looks into the prefix cache nor fills it: it is computed whole, and nothing of it counts as cached. States
are those after the model's last norm, as Sentence Transformers pools them; vectors have length 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from engine.errors import RequestError
from engine.request import Completion, FinishReason, Pooling, Request, Usage

_MARK = "\0"  # stands in nobody's own ids


def refusal(request: Request, *, vocab_size: int, context_tokens: int) -> RequestError | None:
    """Why the prompts of a pooled request can't be run; None if they can."""

    def refused(says: str, code: str = "invalid_value") -> RequestError:
        return RequestError(says, code=code, param="input")

    lengths = segments_of(request)
    if min(lengths, default=0) < 1 or sum(lengths) != len(request.prompt_ids):
        return refused("The input has no tokens, or one of its texts has none.")
    if max(lengths) > context_tokens:
        says = f"The input has {max(lengths)} tokens in one text; this model's context holds {context_tokens}."
        return refused(says, "context_length_exceeded")
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        return refused(f"The input has a token id outside of the model's vocabulary of {vocab_size}.")
    return None


def segments_of(request: Request) -> tuple[int, ...]:
    """The lengths of the prompts that a pooled request holds."""
    return request.segments or (len(request.prompt_ids),)


def sequences_of(request: Request) -> Iterator[Request]:
    """One request for each prompt of a pooled one."""
    bounds = pairwise(accumulate(segments_of(request), initial=0))
    for index, (start, end) in enumerate(bounds):
        prompt_ids = tuple(request.prompt_ids[start:end])
        yield replace(request, id=f"{request.id}{_MARK}{index}", prompt_ids=prompt_ids, segments=())


def unit_vector(total: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bytes | None:
    """`total` scaled to length 1, as little-endian float32; None when it has no direction."""
    length = float(np.linalg.norm(total))
    if not np.isfinite(length) or length == 0.0:
        return None
    return (total / length).astype("<f4").tobytes()


class PooledRequests:
    """The pooled requests under way, and what of their vectors is there."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def begin(self, request: Request) -> list[Request]:
        """The sequences to run for a request."""
        sequences = list(sequences_of(request))
        self._open[request.id] = _Open(request, [sequence.id for sequence in sequences])
        return sequences

    def sequence_ids(self, request_id: str) -> tuple[str, ...]:
        """The sequences of a request that haven't ended; none if it isn't a pooled one."""
        found = self._open.get(request_id)
        return tuple(name for name in found.ids if name not in found.ended) if found else ()

    def end(self, ended: Completion) -> Completion | None:
        """Takes the end of one sequence. The end of its request, if it was the last."""
        request_id = ended.request_id.rpartition(_MARK)[0]
        found = self._open[request_id]
        found.ended[ended.request_id] = ended
        if len(found.ended) < len(found.ids):
            return None
        del self._open[request_id]
        parts = [found.ended[name] for name in found.ids]
        bad = next((part for part in parts if part.finish_reason is not FinishReason.STOP), None)
        return Completion(
            request_id=request_id,
            token_ids=(),
            text="",
            finish_reason=bad.finish_reason if bad else FinishReason.STOP,
            usage=Usage(len(found.request.prompt_ids), sum(part.usage.hit_tokens for part in parts), 0),
            error_code=bad.error_code if bad else None,
            error_message=bad.error_message if bad else None,
            vectors=() if bad else tuple(vector for part in parts for vector in part.vectors),
        )


class _Open:
    def __init__(self, request: Request, ids: list[str]) -> None:
        self.request = request
        self.ids = ids
        self.ended: dict[str, Completion] = {}


def rows_wanted(request: Request, num_tokens: int, is_last: bool) -> tuple[int, ...]:
    """The rows of a chunk of so many tokens that are looked at; `is_last`: it ends what is to be computed."""
    if request.pooling is Pooling.MEAN:
        return tuple(range(num_tokens))
    return (num_tokens - 1,) if is_last else ()


def uses_cache(request: Request) -> bool:
    """Whether a request may begin with what the prefix cache holds."""
    return request.pooling is not Pooling.MEAN
