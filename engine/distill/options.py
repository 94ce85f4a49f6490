"""What a distillation is asked to do, and what of it a run that goes on must share with what was begun; no torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.distill.errors import DistillError

DIRECTIONS = ("forward", "reverse", "both")
"""Of the divergence: forward makes a student cover what the teacher might say, reverse keeps it to what is likely."""
HEADS_PREFIX = "heads:"
MOST_SAMPLES = 64
METHODS = ("soft", "transcripts", "both")
PRECISIONS = ("auto", "float32", "bf16")
DEFAULT_MINUTES = 60.0

CHECKPOINT = "checkpoint.safetensors"
_RUN = "run.json"
_FREE = {"threads", "resume", "checkpoint_steps", "pack_tokens", "target", "licence", "eval_lines"}
"""What may change when a run goes on."""
_TRAINING = {"student", "method", "kl", "draft_vocab", "embeddings", "steps", "minutes", "lr", "precision"}
"""What may change at the price of what was trained; the beginnings of all others are in what was captured."""
_STUDENTS_ALONE = ("method", "kl", "temperature", "embeddings", "pack_tokens")
"""What heads have no use for: they learn from the teacher's own rows, beside its embedding and head."""
_CHECKPOINT_STEPS, _CHECKPOINT_STEPS_OF_HEADS = 25, 100  # the steps of heads are short


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Names are those of the command's options.

    `teacher` is a name, path or hub name; `data` and `results` are files (engine/distill/lines.py); `target` is the
    directory to make. `samples` answers more are drawn from the teacher for each line to learn from. `batch` names the
    batch that the data came from, `project` who may use the student, `licence` what the teacher comes under: they go
    into the student's lineage.
    """

    teacher: str
    student: str
    data: Path
    target: Path
    results: tuple[Path, ...] = ()
    method: str = "both"
    kl: str = "forward"
    temperature: float = 1.0
    top: int = 32
    tail: int = 16
    draft_vocab: int | None = None
    embeddings: bool = False
    steps: int | None = None
    minutes: float | None = None
    lr: float = 5e-4
    seed: int = 0
    pack_tokens: int = 2048
    holdout: float = 0.1
    samples: int = 0
    lines: int = 10_000
    eval_lines: int = 32
    precision: str = "auto"
    checkpoint_steps: int | None = None
    threads: int | None = None
    resume: bool = False
    batch: str | None = None
    project: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, says: str) -> None:
            if not ok:
                spelled = name.replace("_", "-")
                raise DistillError(f"--{spelled} can't be {getattr(self, name)}: it must be {says}.")

        check(self.method in METHODS, "method", f"one of {', '.join(METHODS)}")
        check(self.kl in DIRECTIONS, "kl", f"one of {', '.join(DIRECTIONS)}")
        check(self.precision in PRECISIONS, "precision", f"one of {', '.join(PRECISIONS)}")
        check(0.1 <= self.temperature <= 10, "temperature", "between 0.1 and 10")
        check(1 <= self.top <= 1024, "top", "between 1 and 1024")
        check(0 <= self.tail <= 1024, "tail", "between 0 and 1024")
        check(self.draft_vocab is None or self.draft_vocab >= 1, "draft_vocab", "at least 1")
        check(self.steps is None or self.steps >= 1, "steps", "at least 1")
        check(self.minutes is None or self.minutes > 0, "minutes", "above 0")
        check(0 < self.lr <= 0.1, "lr", "above 0 and at most 0.1")
        check(self.seed >= 0, "seed", "0 or more")
        check(self.pack_tokens >= 64, "pack_tokens", "at least 64")
        check(0 < self.holdout < 1, "holdout", "above 0 and below 1")
        check(0 <= self.samples <= MOST_SAMPLES, "samples", f"between 0 and {MOST_SAMPLES}")
        check(self.lines >= 2, "lines", "at least 2")
        check(self.eval_lines >= 1, "eval_lines", "at least 1")
        check(self.checkpoint_steps is None or self.checkpoint_steps >= 1, "checkpoint_steps", "at least 1")
        check(self.threads is None or self.threads >= 1, "threads", "at least 1")
        for field in fields(self):
            if self.is_heads and field.name in _STUDENTS_ALONE and getattr(self, field.name) != field.default:
                spelled = {"embeddings": "train-embeddings"}.get(field.name, field.name).replace("_", "-")
                raise DistillError(
                    f"--{spelled} has no effect on heads, which learn from the teacher's own rows: leave it out."
                )

    @property
    def is_heads(self) -> bool:
        return self.student.startswith(HEADS_PREFIX)

    @property
    def bound_minutes(self) -> float | None:
        """Minutes of training; where nothing bounds a run, an hour does."""
        return DEFAULT_MINUTES if self.minutes is None and self.steps is None else self.minutes

    @property
    def bound_checkpoint_steps(self) -> int:
        """Steps between checkpoints."""
        default = _CHECKPOINT_STEPS_OF_HEADS if self.is_heads else _CHECKPOINT_STEPS
        return default if self.checkpoint_steps is None else self.checkpoint_steps

    @property
    def work(self) -> Path:
        """Where an unfinished run keeps what it has."""
        return self.target.parent / f"{self.target.name}.distill"

    def fixed(self, teacher_digest: str) -> dict[str, Any]:
        """What a run that goes on must share, as JSON; files by what they hold."""
        found: dict[str, Any] = {"teacher_digest": teacher_digest}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _FREE or field.name == "teacher":
                continue
            if field.name in ("data", "results"):
                value = [_sha256(path) for path in ((value,) if isinstance(value, Path) else value)]
            found[field.name] = value
        return found


def check_place(options: Options) -> None:
    """Raises DistillError in one sentence where a run can't begin, or go on, at its place."""
    work = options.work
    if options.target.exists():
        raise DistillError(f"{options.target} exists already; name another place, or remove it.")
    has_begun = (work / _RUN).exists()
    if has_begun and not options.resume:
        raise DistillError(f"{work} holds an unfinished run: go on with --resume, or remove it.")
    if options.resume and not has_begun:
        raise DistillError(f"There is no unfinished run at {work}; leave out --resume to begin one.")


@contextmanager
def entered(options: Options, teacher_digest: str, say: Callable[[str], None]) -> Iterator[Path]:
    """The folder of this run, new or found again, which is this process's alone meanwhile. What was trained with other
    options is removed, which is said. Raises DistillError in one sentence where it can't be."""
    check_place(options)
    work = options.work
    try:
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        work.chmod(0o700)  # what it holds are a project's lines
        lock = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise DistillError(f"{work} can't be used: {error.strerror or error}.") from error
    try:
        _lock(lock, work)
        _agree(work, options.fixed(teacher_digest), say)
        yield work
    finally:
        os.close(lock)


def _lock(folder: int, work: Path) -> None:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise DistillError(f"Another run is at work in {work}: wait for its end, or name another place.") from error


def _agree(work: Path, wanted: dict[str, Any], say: Callable[[str], None]) -> None:
    """Compares what was begun here with what is wanted now, and notes that."""
    file = work / _RUN
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else wanted
        others = [name for name, value in wanted.items() if known.get(name) != value]
        for name in others:
            if name not in _TRAINING:
                raise DistillError(
                    f"{work} holds a run with another {name.replace('_', '-')}: give the same again with --resume, or "
                    "remove it."
                )
        if others and (work / CHECKPOINT).exists():
            named = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            say(f"Training begins anew, as {named} is another than before; answers and what was captured are kept.")
            (work / CHECKPOINT).unlink()
        scratch = work / f".{_RUN}"
        scratch.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        scratch.replace(file)
    except (OSError, ValueError, AttributeError) as error:
        raise DistillError(f"{work} can't be used: {error}.") from error


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DistillError(f"{path} can't be read: {error.strerror or error}.") from error
