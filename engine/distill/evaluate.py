"""Holds a student against its teacher on lines that it has never seen: divergence, perplexity, acceptance, speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.distill.capture import BLOCK_TOKENS, Scorer
from engine.distill.lines import Line
from engine.engine import Engine
from engine.quality.figures import Positions, Quality, quality_of
from engine.quality.measure import compared
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.spec.choose import drafting
from engine.spec.speculation import Speculation
from engine.text import load_text

WINDOW = 4
"""Tokens that a draft proposes at once when its acceptance is measured."""
MOST_ANSWER_TOKENS = 128
_LEAST_DRAFTED = 3
"""Tokens of an answer of which one can be proposed: not the first, and not the last, which comes with it anyway."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of windows of WINDOW tokens that a draft proposed, all of them verified."""

    verifications: int
    drafted_tokens: int
    accepted_tokens: int
    longest: int
    """Tokens of the longest answer."""

    @property
    def per_verify(self) -> float | None:
        return self.accepted_tokens / self.verifications if self.verifications else None

    def shown(self) -> dict[str, Any]:
        """As the report has it; `accepted_says` tells why there is nothing to tell."""
        says = None
        if self.per_verify is None:
            says = "nothing was proposed: "
            if self.longest < _LEAST_DRAFTED:
                says += f"the held-out answers have {self.longest} tokens at most, and drafts begin behind the first"
            else:
                says += "the answers ended before their texts were read, or there were no KV blocks to read them with"
        return {
            "verifications": self.verifications,
            "accepted_tokens": self.accepted_tokens,
            "accepted_per_verify": None if self.per_verify is None else round(self.per_verify, 3),
            "accepted_says": says,
        }


def quality(teacher: str, student: str, lines: Sequence[Line], *, threads: int | None, progress: Progress) -> Quality:
    """Both in float32 over the answers of these lines: what the student's distribution differs in."""
    most = max(len(line.prompt) + len(line.answer or ()) for line in lines)
    scorers = [Scorer(model, most, weight_format="float32", threads=threads) for model in (teacher, student)]
    found = []
    for done, line in enumerate(lines, 1):
        ids, first = (*line.prompt, *(line.answer or ())), len(line.prompt)
        place = first
        for exact, rough in zip(*(scorer.logits(ids, first) for scorer in scorers), strict=True):
            found.append(compared(exact, rough, ids[place : place + len(exact)]))
            place += len(exact)
        progress(done, len(lines))
    positions = Positions(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    return quality_of(positions, weight_format="float32", kv_format="float32", against=teacher, is_fused=False)


def acceptance(config: EngineConfig, lines: Sequence[Line]) -> Acceptance:
    """What `config.draft` proposes for `config.model` on these prompts, greedy answers, one stream: wherever it can, be
    that worth its time or not."""
    text = load_text(config.model)
    runner = ModelRunner(config)
    drafter = drafting(config, runner, text, lambda sentence: None, reads_all=True)
    speculation = Speculation(drafter, is_gated=False, most_draft=WINDOW)
    engine = Engine(config, runner=runner, text=text, speculation=speculation)
    for _ in engine.run(_requests(lines)):
        pass
    stats = engine.stats()
    longest = max(_params(line).max_tokens for line in lines)
    return Acceptance(stats.verifications, stats.drafted_tokens, stats.accepted_tokens, longest)


def tokens_per_s(config: EngineConfig, lines: Sequence[Line]) -> float:
    """Output tokens a second of a model alone on these prompts, all at once, prompts included."""
    engine = Engine(config)
    start = time.perf_counter()
    tokens = sum(completion.usage.output_tokens for completion in engine.run(_requests(lines)))
    return tokens / (time.perf_counter() - start)


def num_blocks(lines: Sequence[Line]) -> int:
    """KV blocks in which all of these run at once, beside a draft of them."""
    return 2 * sum(-(-(len(line.prompt) + MOST_ANSWER_TOKENS) // BLOCK_TOKENS) + 1 for line in lines) + BLOCK_TOKENS


def of(config: EngineConfig, model: Path) -> EngineConfig:
    """The same engine with another model."""
    return replace(config, model=str(model))


def _requests(lines: Sequence[Line]) -> list[Request]:
    return [Request(id=str(line.number), prompt_ids=line.prompt, params=_params(line)) for line in lines]


def _params(line: Line) -> SamplingParams:
    """As long as the line's own answer, so that speeds and drafts are of what is really said."""
    return SamplingParams(max_tokens=min(len(line.answer or (0,)), MOST_ANSWER_TOKENS), temperature=0, ignore_eos=True)


def shown(found: Quality) -> dict[str, Any]:
    """The figures of a student, as the report has them."""
    return {
        "positions": found.tokens,
        "kl": round(found.kl, 5),
        "kl_error": round(found.kl_error, 5),
        "top1": round(found.top1, 4),
        "perplexity": round(found.reference_perplexity * found.perplexity, 3),
        "teacher_perplexity": round(found.reference_perplexity, 3),
    }
