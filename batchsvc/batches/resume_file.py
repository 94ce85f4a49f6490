"""The object of a unit's unfinished sequences: what was generated for lines that have no result yet (JSON, zstd).

It is a hint that saves work. What it holds of a line is the beginning of the answers that the line gets anyway, whoever
runs it and however often, so an old object is as right as a new one, and without any the line begins anew.

A row is a JSON list:

    [line, hit tokens, [token ids]]                                   of one answer without logprobs
    [line, hit tokens, [[token ids], …], [[[…], …], …]]              of any number of answers, and their logprobs

where the logprobs of a token are [its own, [ids of the likeliest tokens], [their logprobs]]; an answer whose logprobs
nobody asked for has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
import zstandard

from engine.request import Begun, TokenLogprobs

MOST_LOGPROBS = 1_000_000
"""Numbers in an object: about half a second, and 20 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """What was generated of each answer of a row. `line_no` is the row's first line; `hit_tokens` what the cache held
    when it began."""

    line_no: int
    answers: tuple[Begun, ...]
    hit_tokens: int

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)


def encode(sequences: Iterable[Unfinished], *, most_logprobs: int = MOST_LOGPROBS) -> bytes:
    """The object. Of sequences with logprobs it has the first ones with at most so many numbers together: it is written
    every few seconds, and must not take as long as what it saves."""
    rows, num_logprobs = [], 0
    for one in sequences:
        size = sum(1 + len(found.top) for answer in one.answers for found in answer.logprobs)
        if num_logprobs + size <= most_logprobs:
            num_logprobs += size
            rows.append(_row(one))
    return zstandard.ZstdCompressor(level=1).compress(orjson.dumps(rows))


def decode(data: bytes, sha256: str | None) -> dict[int, Unfinished]:
    """What `encode` was given, by line. Raises ValueError if it isn't what the unit's row names."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("The saved sequences aren't what their unit's row names.")
    rows = orjson.loads(zstandard.ZstdDecompressor().decompressobj().decompress(data))
    return {row[0]: _unfinished(*row) for row in rows}


def _row(one: Unfinished) -> list[Any]:
    if len(one.answers) == 1 and not one.answers[0].logprobs:
        return [one.line_no, one.hit_tokens, one.answers[0].token_ids]
    logprobs = [[_of_token(found) for found in answer.logprobs] for answer in one.answers]
    return [one.line_no, one.hit_tokens, [answer.token_ids for answer in one.answers], logprobs]


def _of_token(found: TokenLogprobs) -> list[Any]:
    return [found.logprob, [token_id for token_id, _ in found.top], [logprob for _, logprob in found.top]]


def _unfinished(line_no: int, hit_tokens: int, token_ids: list[Any], logprobs: list[Any] | None = None) -> Unfinished:
    answers = [_begun(token_ids, [])] if logprobs is None else map(_begun, token_ids, logprobs)
    return Unfinished(line_no=line_no, answers=tuple(answers), hit_tokens=hit_tokens)


def _begun(token_ids: list[int], logprobs: list[Any]) -> Begun:
    if len(logprobs) not in (0, len(token_ids)):
        raise ValueError("The saved sequences have logprobs of some tokens only.")
    found = [
        TokenLogprobs(token_id, own, tuple(zip(top_ids, top, strict=True)))
        for token_id, (own, top_ids, top) in zip(token_ids, logprobs, strict=False)
    ]
    return Begun(tuple(token_ids), tuple(found))
