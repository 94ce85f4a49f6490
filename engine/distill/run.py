"""One distillation from data to the student's directory: every phase keeps what it has done, and goes on from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.config import EngineConfig
from engine.distill import answers, evaluate, forward, losses, report, student, vocabulary
from engine.distill.capture import Scorer, capture
from engine.distill.checkpoint import Progress
from engine.distill.errors import DistillError, StoppedError, memory_told
from engine.distill.lines import Line, read_lines, split
from engine.distill.options import Options, check_place, entered
from engine.distill.pack import Pack
from engine.distill.shards import Dataset
from engine.distill.student import Student, columns_of, head_of
from engine.distill.targets import within
from engine.distill.train import Settings, Tell, train
from engine.load.draft_vocab import write as write_draft_vocab
from engine.load.fetch import locate
from engine.load.meta import ModelMeta
from engine.load.origin import project_of, source
from engine.memory.plan import available_bytes
from engine.quant.save import save_plain
from engine.text import TextModel, load_text

TEACHER_FORMAT = "bf16"
TRAINED_BYTES = 16  # a float32 number, its gradient and AdamW's two
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


class Run:
    """The phases of one run. `is_stopped` is asked all the time."""

    _way_out = "give a smaller --pack-tokens, or begin anew with fewer --lines"

    def __init__(self, options: Options, tell: Tell, is_stopped: Callable[[], bool]) -> None:
        self._options = options
        self._tell = tell
        self._is_stopped = is_stopped
        self._text: TextModel = load_text(locate(options.teacher))
        self._meta: ModelMeta = self._text.meta
        self._project = self._bound_project()
        self._work = options.work
        self._skipped = 0

    def run(self) -> dict[str, Any]:
        """Makes the student; what came of it. Raises EngineError in one sentence, of what can't be before anything is
        computed."""
        options = self._options
        check_place(options)
        with memory_told(self._way_out):
            self._check()
            with entered(options, self._meta.digest, lambda sentence: self._tell({"say": sentence})):
                trained_on, held_out = self._lines()
                made, progress, found = self._made(trained_on, held_out)
                found |= {
                    "steps": progress.step,
                    "loss": round(_last_mean(progress.losses), 4),
                    "train_s": round(progress.seconds, 1),
                    "trained_lines": len(trained_on),
                    "held_out_lines": len(held_out),
                    "skipped_lines": self._skipped,
                }
                report.write(made / report.FOLDER, found, progress.losses)
                made.replace(options.target)
                shutil.rmtree(self._work, ignore_errors=True)
        return {"path": str(options.target), **found}

    def _check(self) -> None:
        """Raises EngineError for what can't be trained, by its shape or for want of memory."""
        self._begun()

    def _made(self, trained_on: Sequence[Line], held_out: Sequence[Line]) -> tuple[Path, Progress, dict[str, Any]]:
        """The directory of what was trained, how it went, and what was measured on the lines kept apart."""
        options = self._options
        self._captured(trained_on)
        begun = self._begun()
        dataset = Dataset(self._work / "capture", pack_tokens=options.pack_tokens, seed=options.seed)
        ids = self._draft_ids(dataset)
        progress = self._trained(begun, dataset, ids)
        made = self._saved(begun, ids, progress, len(trained_on))
        return made, progress, self._measured(made, held_out)

    def _bound_project(self) -> str | None:
        """Who alone may use the student: whose data it learns from, and whose its teacher is."""
        mine, teachers = self._options.project, project_of(self._meta.path)
        if mine is not None and teachers is not None and mine != teachers:
            raise DistillError(
                f"{self._meta.name} was trained on lines of another project, so it can't teach a student of this one."
            )
        return mine or teachers

    def _lines(self) -> tuple[list[Line], list[Line]]:
        """Those to learn from and those kept apart, all with answers."""
        options = self._options
        found = read_lines(options.data, options.results, self._text, most=options.lines)
        self._tell({"say": found.told()})
        config = EngineConfig(
            model=str(self._meta.path),
            weight_format=TEACHER_FORMAT,
            device="cpu",
            threads=options.threads,
            spec="off",
            reproducible=True,  # whoever resumes answers fewer lines together
        )
        usable, unanswered = answers.answered(found.usable, config, self._work, self._phase("answers"))
        if unanswered:
            self._tell({"say": f"{unanswered:,} lines are skipped, as the teacher had no answer to them."})
        self._skipped = sum(found.skipped.values()) + unanswered
        kept, apart = split(usable, options.holdout, options.seed)
        if options.samples:
            more, _ = answers.answered(answers.drawn(kept, options.samples), config, self._work, self._phase("answers"))
            kept = sorted([*kept, *more], key=lambda line: line.prompt)  # neighbours share what they begin with
        return kept, apart

    def _captured(self, lines: Sequence[Line]) -> None:
        options = self._options
        most = max(len(line.prompt) + len(line.answer or ()) for line in lines)
        scorer = Scorer(str(self._meta.path), most, weight_format=TEACHER_FORMAT, threads=options.threads)
        capture(
            scorer,
            [(line.key, (*line.prompt, *(line.answer or ())), len(line.prompt)) for line in lines],
            self._work / "capture",
            top=options.top,
            tail=options.tail,
            temperature=options.temperature,
            seed=options.seed,
            progress=self._phase("capture"),
        )

    def _begun(self) -> Student:
        """The student before its first lesson, where memory holds its training."""
        begun = student.begin(self._meta.path, self._options.student)
        learned = student.trainable(begun, embeddings=self._options.embeddings)
        needed = (TRAINED_BYTES - 4) * sum(one.numel() for one in learned.values())  # the numbers are there already
        self._check_memory(needed, "this student", "take fewer layers, or leave out --train-embeddings")
        return begun

    def _check_memory(self, needed: int, what: str, way_out: str) -> None:
        free = available_bytes()
        if needed > free:
            raise DistillError(
                f"Training {what} takes {needed / 1e9:,.1f} GB more memory and {free / 1e9:,.1f} GB are free: "
                f"{way_out}."
            )

    def _draft_ids(self, dataset: Dataset) -> Tensor | None:
        count = self._options.draft_vocab
        if count is None or count >= self._meta.vocab_size:
            return None
        return vocabulary.frequent(dataset.targets(), count, self._meta.vocab_size, self._meta.eos_ids)

    def _trained(self, begun: Student, dataset: Dataset, ids: Tensor | None) -> Progress:
        options = self._options
        learned = student.trainable(begun, embeddings=options.embeddings)
        settings = Settings(
            steps=options.steps,
            minutes=options.bound_minutes,
            rate=options.lr,
            checkpoint_steps=options.bound_checkpoint_steps,
            is_reduced=options.precision == "bf16" or (options.precision == "auto" and multiplies_bf16()),
        )
        self._tell({"say": f"An epoch has about {dataset.packs_of_epoch():,} steps over {len(dataset):,} lines."})
        loss = student_loss(begun, ids, options)
        return train(learned, loss, dataset.batch, settings, self._work, self._tell, is_stopped=self._is_stopped)

    def _saved(self, begun: Student, ids: Tensor | None, progress: Progress, lines: int) -> Path:
        options = self._options
        made = self._work / "student"
        shutil.rmtree(made, ignore_errors=True)
        lineage = self._lineage(progress, lines) | {"layers": list(begun.layers), "method": options.method}

        def more(folder: Path) -> None:
            if ids is not None:
                write_draft_vocab(folder, ids.tolist())
            self._copy_licences(folder)

        parameters = sorted(begun.parameters.items())
        save_plain(made, self._meta, begun.config, begun.values, parameters, lineage, more)
        return made

    def _copy_licences(self, folder: Path) -> None:
        """Those of the teacher, if it is a directory."""
        for pattern in _LICENCES:
            for file in self._meta.path.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)

    def _lineage(self, progress: Progress, lines: int) -> dict[str, Any]:
        """Where what was trained comes from, and who may use it."""
        options = self._options
        return {
            "distilled_from": source(options.teacher, self._meta),
            **({} if self._project is None else {"project": self._project}),
            "licence": options.licence,
            "data": options.batch or options.data.name,
            "lines": lines,
            "steps": progress.step,
            "seed": options.seed,
        }

    def _measured(self, made: Path, held_out: Sequence[Line]) -> dict[str, Any]:
        options = self._options
        lines = held_out[: options.eval_lines]
        teacher = str(self._meta.path)
        found = evaluate.quality(teacher, str(made), lines, threads=options.threads, progress=self._phase("report"))
        config = EngineConfig(
            model=teacher,
            draft=str(made),
            spec="draft",
            weight_format=TEACHER_FORMAT,
            max_running=1,
            num_blocks=evaluate.num_blocks(lines),
            device="cpu",
            threads=options.threads,
        )
        self._tell({"say": "Measuring what the student is worth as a draft, and how fast it is alone."})
        accepted = evaluate.acceptance(config, lines)
        alone = replace(config, draft=None, spec="off", max_running=len(lines))
        return {
            "object": "model.distillation",
            "teacher": options.teacher,
            **evaluate.shown(found),
            **accepted.shown(),
            "teacher_tokens_per_s": round(evaluate.tokens_per_s(alone, lines), 1),
            "student_tokens_per_s": round(evaluate.tokens_per_s(evaluate.of(alone, made), lines), 1),
        }

    def _phase(self, name: str) -> Callable[[int, int], None]:
        def progress(done: int, total: int) -> None:
            self._tell({"phase": name, "done": done, "total": total})
            if self._is_stopped():
                raise StoppedError("Stopped; the same command with --resume goes on.")

        return progress


def student_loss(begun: Student, ids: Tensor | None, options: Options) -> Callable[[Pack], Tensor]:
    """What a student learns by: the teacher's distribution, what was said, or the mean of both."""
    columns = columns_of(ids, begun.config.vocab_size)

    def loss(pack: Pack) -> Tensor:
        rows = forward.hidden(begun.config, begun.parameters, pack)[pack.rows]
        logits = forward.logits(begun.config, begun.parameters, rows, head_of(begun.parameters, begun.config, ids))
        found = logits.new_zeros(())
        if options.method != "transcripts":
            targets = within(pack.targets, columns)
            found = losses.divergence(logits, targets, temperature=options.temperature, direction=options.kl).mean()
        if options.method != "soft":
            found = found + losses.surprise(logits, columns[pack.next_ids])
        return found / 2 if options.method == "both" else found

    return loss


def multiplies_bf16() -> bool:
    """Whether this processor multiplies matrices of bf16 faster than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def _last_mean(values: Sequence[float]) -> float:
    last = values[-max(len(values) // 10, 1) :]
    return sum(last) / len(last) if last else 0.0
