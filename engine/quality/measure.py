"""Runs the same text through a reference in float32 and through another pair of formats, and compares the two.

The reference runs once: its hidden rows are kept, and its head is applied to them again for each comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.quality.figures import Positions, Quality, quality_of
from engine.quality.text import WINDOW_TOKENS, check_same, read_windows
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.sched.plan import Chunk, StepPlan
from engine.text import load_text

DEFAULT_TOKENS = 16_384
_BLOCK_TOKENS = 16
_CHUNK_TOKENS = 128
Say = Callable[[str], None]

_PARAMS = SamplingParams(max_tokens=1, temperature=0)


class Reference:
    """A model in float32 that has read the text. `say` is told what runs slower than it could. Raises EngineError in
    one sentence."""

    def __init__(
        self,
        model: str,
        *,
        file: Path | None = None,
        tokens: int = DEFAULT_TOKENS,
        say: Say = lambda sentence: None,
    ) -> None:
        self._file, self._tokens, self._say = file, tokens, say
        self._text = load_text(model)
        self.meta = self._text.meta
        self._windows = read_windows(self._text, file, tokens)
        self._runner = _runner(model, "float32", "float32")
        self._states = [states for _, states in _walk(self._runner, self._windows)]

    def compare(self, model: str, weight_format: str, kv_format: str) -> Quality:
        """What the model costs in these formats, this reference being the model itself or what it was made from."""
        text = load_text(model)
        if text.meta.digest != self.meta.digest:
            check_same(text, self._text, read_windows(text, self._file, self._tokens), self._windows)
        runner = _runner(model, weight_format, kv_format, self._say)
        found = [
            compared(self._runner.head(exact), runner.head(rough), following)
            for exact, (following, rough) in zip(self._states, _walk(runner, self._windows), strict=True)
        ]
        return quality_of(
            Positions(*(np.concatenate(parts) for parts in zip(*found, strict=True))),
            weight_format=weight_format,
            kv_format=kv_format,
            against=self.meta.digest,
            is_fused=runner.kernels.is_fused,
        )


def measure(model: str, weight_format: str, kv_format: str = "bf16", *, against: str | None = None) -> Quality:
    """What the formats cost the model on our held-out text, against itself in float32, or `against` where it is a
    quantized copy of that one. Raises EngineError."""
    return Reference(against or model).compare(model, weight_format, kv_format)


def _runner(model: str, weight_format: str, kv_format: str, say: Say = lambda sentence: None) -> ModelRunner:
    return ModelRunner(
        EngineConfig(
            model=model,
            weight_format=weight_format,
            kv_format=kv_format,
            block_tokens=_BLOCK_TOKENS,
            num_blocks=WINDOW_TOKENS // _BLOCK_TOKENS + 1,
        ),
        say,
    )


def _walk(runner: ModelRunner, windows: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """For each chunk of each window the tokens that follow its positions, and the hidden rows that predict them."""
    for number, ids in enumerate(windows):
        for start in range(0, len(ids) - 1, _CHUNK_TOKENS):
            end = min(start + _CHUNK_TOKENS, len(ids) - 1)
            chunk = Chunk(
                seq_id=str(number),
                token_ids=ids[start:end],
                start=start,
                block_ids=tuple(range(-(-end // _BLOCK_TOKENS))),
                logit_rows=tuple(range(end - start)),
                params=_PARAMS,
                num_prompt_tokens=len(ids),
            )
            yield ids[start + 1 : end + 1], runner.states(StepPlan(step=0, chunks=(chunk,)))


def compared(
    exact: Tensor, rough: Tensor, following: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits of the same positions by both, [R, vocab], and the tokens that really follow."""
    p, q = exact.log_softmax(-1), rough.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    agrees = p.argmax(-1) == q.argmax(-1)
    columns = torch.tensor(following, device=p.device)[:, None]
    nll = [-log.gather(1, columns.to(log.device))[:, 0].double().cpu().numpy() for log in (p, q)]
    return kl.double().cpu().numpy(), agrees.cpu().numpy(), nll[0], nll[1]
