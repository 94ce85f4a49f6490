"""Lets the teacher score answers by the engine's own forward pass, and keeps what it would have said at each place.

Lines are scored one after the other in the same KV blocks: what a line shares with the one before it is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.distill import targets
from engine.distill.pack import Example, common_tokens
from engine.distill.shards import Writer
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.sched.plan import Chunk, StepPlan

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
"""Rows of a step, and so of logits at once."""
_PARAMS = SamplingParams(max_tokens=1, temperature=0)


class Scorer:
    """A model that tells the logits behind each token of a text. Holds the KV of the last text."""

    def __init__(self, model: str, most_tokens: int, *, weight_format: str, threads: int | None = None) -> None:
        kv_format = "float32" if weight_format == "float32" else "bf16"
        self._runner = ModelRunner(
            EngineConfig(
                model=model,
                weight_format=weight_format,
                kv_format=kv_format,
                block_tokens=BLOCK_TOKENS,
                num_blocks=max(-(-most_tokens // BLOCK_TOKENS), 2),
                device="cpu",
                threads=threads,
                reproducible=weight_format != "float32" or None,  # a resumed capture finds the same
            )
        )
        self._last: Sequence[int] = ()

    def logits(self, token_ids: Sequence[int], first: int) -> Iterator[Tensor]:
        """What the model says before each token from place `first` on: float32 [rows, vocab], chunk by chunk."""
        yield from map(self._runner.head, self._states(token_ids, first))

    def rows(self, token_ids: Sequence[int], first: int) -> Tensor:
        """What it says that of: the rows behind the last norm, float32 [all of them, hidden]."""
        return torch.cat([self._runner.normed(states) for states in self._states(token_ids, first)])

    def _states(self, token_ids: Sequence[int], first: int) -> Iterator[Tensor]:
        end = len(token_ids) - 1  # nothing is said before what comes behind the last token
        same = common_tokens([self._last, token_ids], min(len(self._last), first - 1))
        start = same - same % BLOCK_TOKENS
        self._last = ()
        begin = start
        while begin < end:
            stop = min(begin - begin % CHUNK_TOKENS + CHUNK_TOKENS, end)  # whatever was there already, chunks end alike
            wanted = tuple(range(max(first - 1 - begin, 0), stop - begin))
            chunk = Chunk(
                seq_id="text",
                token_ids=tuple(token_ids[begin:stop]),
                start=begin,
                block_ids=tuple(range(-(-stop // BLOCK_TOKENS))),
                logit_rows=wanted,
                params=_PARAMS,
                num_prompt_tokens=len(token_ids),
            )
            found = self._runner.states(StepPlan(step=0, chunks=(chunk,)))
            if len(wanted):
                yield found
            begin = stop
        self._last = tuple(token_ids[:end])


def capture(
    scorer: Scorer,
    lines: Sequence[tuple[int, Sequence[int], int]],
    folder: Path,
    *,
    top: int,
    tail: int,
    temperature: float,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Captures (key, token ids, place of the first to be learned) of each line that isn't in `folder` yet."""
    writer = Writer(folder)
    try:
        for done, (key, token_ids, first) in enumerate(lines, 1):
            if key not in writer.lines:
                with torch.inference_mode():
                    parts = [
                        targets.draw(found, top=top, tail=tail, temperature=temperature, seed=_seed(seed, key, part))
                        for part, found in enumerate(scorer.logits(token_ids, first))
                    ]
                writer.add(key, Example(tuple(token_ids), first, targets.joined(parts)))
            progress(done, len(lines))
    finally:
        writer.flush()  # also what was captured until somebody stopped it


def _seed(seed: int, line: int, part: int) -> int:
    """Of the draws of a part of a line: the same in every run, whatever was captured before it."""
    return int.from_bytes(blake2b(f"{seed}/{line}/{part}".encode(), digest_size=7).digest(), "little")
