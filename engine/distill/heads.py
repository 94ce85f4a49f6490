"""Trains heads on the frozen teacher (engine/spec/heads.py): `--student heads:N`, with the same data, seams and report.

The engine computes the teacher's rows once, over the answers; they are kept on disk and are all that is learned from,
as the teacher's own later rows are the soft targets (engine/spec/heads_loss.py). So a step costs a few matrices and not
the teacher, and an epoch over a hundred thousand tokens takes minutes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from engine.config import EngineConfig
from engine.distill import evaluate, vocabulary
from engine.distill.capture import Scorer
from engine.distill.checkpoint import Progress
from engine.distill.errors import DistillError
from engine.distill.lines import Line
from engine.distill.options import HEADS_PREFIX
from engine.distill.run import TEACHER_FORMAT, TRAINED_BYTES, Run, multiplies_bf16
from engine.distill.student import columns_of
from engine.distill.train import Settings, train
from engine.load.origin import FILE as ORIGIN
from engine.load.weights import open_model
from engine.model.config import ModelConfig
from engine.spec.heads_file import MOST_HEADS, Heads, save_heads
from engine.spec.heads_loss import heads_loss, initial_parts, right_in_a_row

VOCABULARY = 4096
"""Tokens that heads propose, unless --draft-vocab says more or fewer: their matrix is most of what a head reads."""
BATCH_ROWS = 512
_LEAST_ROWS = 64
"""Of a batch of its own: fewer at the end belong to the one before. A single row says nothing of what comes next."""
_MOST_ROW = 60_000.0  # what float16 holds


class Rows(NamedTuple):
    """R rows of the teacher, text by text: `values` float16 [R, hidden]; `next_ids` [R] came after them, `owners` [R]
    name their texts."""

    values: NDArray[np.float16]
    next_ids: Tensor
    owners: Tensor


class Batch(NamedTuple):
    """The same of consecutive rows, float32."""

    values: Tensor
    next_ids: Tensor
    owners: Tensor


class HeadsRun(Run):
    """The phases of such a run."""

    _way_out = "give a smaller --draft-vocab, or begin anew with fewer --lines"

    def _check(self) -> None:
        count, (config, _) = num_heads(self._options.student), open_model(self._meta.path)
        size = min(self._options.draft_vocab or VOCABULARY, config.vocab_size)
        frozen = (1 if config.is_tied else 2) * config.vocab_size * config.hidden + size * config.hidden
        learned = size * config.hidden + count * 5 * config.hidden**2  # gate, up and down: 2, 2 and 1
        self._check_memory(
            4 * frozen + TRAINED_BYTES * learned, f"{count} heads", "take fewer, or a smaller --draft-vocab"
        )

    def _made(self, trained_on: Sequence[Line], held_out: Sequence[Line]) -> tuple[Path, Progress, dict[str, Any]]:
        options, count = self._options, num_heads(self._options.student)
        scorer = self._scorer([*trained_on, *held_out])
        config, source = open_model(self._meta.path)
        embedding = source.load("embedding.weight").float()
        head = embedding if config.is_tied else source.load("head.weight").float()
        rows = captured(scorer, trained_on, config.hidden, self._work / "rows.npy", self._phase("capture"))
        worth = torch.bincount(rows.next_ids, minlength=config.vocab_size).double()
        ids = vocabulary.chosen(worth, options.draft_vocab or VOCABULARY, self._meta.eos_ids)
        parts = initial_parts(head[ids], num_heads=count, inner=config.hidden, seed=options.seed)
        loss = rows_loss(parts, count, config, embedding, head[ids])
        progress = self._learned(parts, loss, rows)
        made = self._saved_heads(parts, ids, count, config, progress, len(trained_on))
        lines = held_out[: options.eval_lines]
        right = right_shares(scorer, parts, count, config, embedding, ids, lines)
        return made, progress, self._judged(made, held_out) | {"right": right}

    def _scorer(self, lines: Sequence[Line]) -> Scorer:
        most = max(len(line.prompt) + len(line.answer or ()) for line in lines)
        return Scorer(str(self._meta.path), most, weight_format=TEACHER_FORMAT, threads=self._options.threads)

    def _learned(self, parts: dict[str, Tensor], loss: Callable[[Batch], Tensor], rows: Rows) -> Progress:
        options = self._options
        settings = Settings(
            steps=options.steps,
            minutes=options.bound_minutes,
            rate=options.lr,
            checkpoint_steps=options.bound_checkpoint_steps,
            is_reduced=options.precision == "bf16" or (options.precision == "auto" and multiplies_bf16()),
            smaller="--draft-vocab",
        )
        if len(rows.owners) < _LEAST_ROWS:
            raise DistillError(
                f"The answers have {len(rows.owners)} tokens, and heads need {_LEAST_ROWS} or more: give more lines."
            )
        self._tell({"say": f"An epoch has {pieces(len(rows.owners)):,} steps of about {BATCH_ROWS} tokens."})

        def batch(number: int) -> Batch:
            return batch_of(rows, number, options.seed)

        return train(parts, loss, batch, settings, self._work, self._tell, is_stopped=self._is_stopped)

    def _saved_heads(
        self, parts: dict[str, Tensor], ids: Tensor, count: int, config: ModelConfig, progress: Progress, lines: int
    ) -> Path:
        made = self._work / "student"
        shutil.rmtree(made, ignore_errors=True)
        heads = Heads(
            model_digest=self._meta.digest,
            num_heads=count,
            hidden=config.hidden,
            inner=config.hidden,
            vocab_size=config.vocab_size,
            parts=parts | {"ids": ids.int()},
        )
        save_heads(made, heads, {"model": self._options.teacher, "project": self._project})
        self._copy_licences(made)
        lineage = self._lineage(progress, lines) | {"heads": count}
        (made / ORIGIN).write_text(json.dumps(lineage, indent=2) + "\n", encoding="utf-8")
        return made

    def _judged(self, made: Path, held_out: Sequence[Line]) -> dict[str, Any]:
        options = self._options
        config = EngineConfig(
            model=str(self._meta.path),
            draft=str(made),
            spec="heads",
            weight_format=TEACHER_FORMAT,
            max_running=1,
            device="cpu",
            threads=options.threads,
        )
        self._tell({"say": "Measuring what the heads are worth as a draft."})
        accepted = evaluate.acceptance(config, held_out[: options.eval_lines])
        return {
            "object": "model.distillation",
            "teacher": options.teacher,
            **accepted.shown(),
        }


def num_heads(student: str) -> int:
    """Of `heads:N`. Raises DistillError."""
    text = student.removeprefix(HEADS_PREFIX)
    count = int(text) if text.isdecimal() and len(text) < 3 else 0
    if not 1 <= count <= MOST_HEADS:
        raise DistillError(f"--student {student} can't be: N is between 1 and {MOST_HEADS} heads.")
    return count


def captured(
    scorer: Scorer, lines: Sequence[Line], hidden: int, path: Path, progress: Callable[[int, int], None]
) -> Rows:
    """The rows that these answers were said of. What an earlier run had of them is in the file already: behind each row
    lies a number that is written when all rows of its text are."""
    answers = [line.answer or () for line in lines]
    ends = np.cumsum([len(answer) for answer in answers]).tolist()
    try:
        values = np.lib.format.open_memmap(
            path, mode="r+" if path.exists() else "w+", dtype=np.float16, shape=(ends[-1], hidden + 1)
        )
    except (OSError, ValueError) as error:
        raise DistillError(f"The teacher's rows can't be kept in {path}: {error}.") from error
    if values.shape != (ends[-1], hidden + 1):
        raise DistillError(f"{path} has rows of other lines; remove it, and go on with --resume.")
    with torch.inference_mode():
        for done, (line, start, end) in enumerate(zip(lines, [0, *ends], ends, strict=False), 1):
            if not values[start:end, hidden].all():
                found = scorer.rows((*line.prompt, *(line.answer or ())), len(line.prompt))
                values[start:end, :hidden] = found.clamp(-_MOST_ROW, _MOST_ROW).half().numpy()
                values[start:end, hidden] = 1
            progress(done, len(lines))
    return Rows(
        values[:, :hidden],
        torch.tensor([token for answer in answers for token in answer]),
        torch.repeat_interleave(torch.arange(len(answers)), torch.tensor([len(answer) for answer in answers])),
    )


def pieces(rows: int) -> int:
    """How many batches so many rows are."""
    whole, rest = divmod(rows, BATCH_ROWS)
    return max(whole + (rest >= _LEAST_ROWS), 1)


def batch_of(rows: Rows, number: int, seed: int) -> Batch:
    """Batch `number` of the endless row of epochs, each of which sees all rows once, in an order of its own."""
    count = pieces(len(rows.owners))
    epoch, place = divmod(number, count)
    piece = int(np.random.default_rng((seed, epoch)).permutation(count)[place])
    part = slice(piece * BATCH_ROWS, None if piece == count - 1 else (piece + 1) * BATCH_ROWS)
    return Batch(torch.from_numpy(rows.values[part].astype(np.float32)), rows.next_ids[part], rows.owners[part])


def rows_loss(
    parts: dict[str, Tensor], count: int, config: ModelConfig, embedding: Tensor, head: Tensor
) -> Callable[[Batch], Tensor]:
    """How far heads are from what the teacher's `head` [vocabulary, hidden] makes of its own rows."""

    def loss(batch: Batch) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            targets = linear(batch.values, head)
        embedded = embedding[batch.next_ids]
        return heads_loss(parts, count, batch.values, embedded, targets, batch.owners, config.activation)

    return loss


@torch.inference_mode()
def right_shares(
    scorer: Scorer,
    parts: dict[str, Tensor],
    count: int,
    config: ModelConfig,
    embedding: Tensor,
    ids: Tensor,
    lines: Sequence[Line],
) -> list[float]:
    """For each head the share of places at which it and those before it say what was said in these answers."""
    columns = columns_of(ids, config.vocab_size)
    right = torch.zeros(count)
    judged = 0
    for line in lines:
        next_ids = torch.tensor(line.answer or ())
        rows = scorer.rows((*line.prompt, *(line.answer or ())), len(line.prompt))
        owners = torch.zeros(len(rows), dtype=torch.int64)
        found = right_in_a_row(parts, count, rows, embedding[next_ids], columns[next_ids], owners, config.activation)
        found = found[found >= 0]
        judged += len(found)
        right += torch.stack([(found > place).sum() for place in range(count)])
    return [round(float(share), 4) for share in right / max(judged, 1)]
