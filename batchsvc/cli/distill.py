"""`batchsvc models distill`: trains a student by `python -m engine.distill`, on a file or on a batch of the caller's.

A batch's lines are fetched over the API with the caller's key, so nobody trains on what isn't his to read; the student
notes the project, and `models.register` lets no other project use it. Files are an operator's to name, with --project.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsvc.cli import engine_child
from batchsvc.cli.admin import opened_admin
from batchsvc.cli.console import Console
from batchsvc.cli.distill_data import Data, found_data, tell_left
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.licence import asking
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.progress_bar import shown_phases
from batchsvc.cli.target import absolute_model

_HEADS = "heads:"
_KILLED = (
    "The training was killed, as by a system that runs out of memory: the same command with --resume goes on from its "
    "last checkpoint, a smaller {smaller} takes less."
)


class Method(StrEnum):
    """What a student learns by."""

    SOFT = "soft"
    TRANSCRIPTS = "transcripts"
    BOTH = "both"


class Direction(StrEnum):
    """Of the divergence."""

    FORWARD = "forward"
    REVERSE = "reverse"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a student is trained, with what bounds."""

    method: Annotated[
        Method, typer.Option(help="soft: what the teacher thinks of each token; transcripts: what was said.")
    ] = Method.BOTH
    kl: Annotated[
        Direction, typer.Option(help="forward covers what the teacher may say, reverse keeps to what is likely.")
    ] = Direction.FORWARD
    temperature: Annotated[float, typer.Option(help="Of both distributions when they are compared.")] = 1.0
    draft_vocab: Annotated[
        int | None,
        typer.Option(metavar="N", help="As a draft it scores the N tokens alone that the data speak of most."),
    ] = None
    train_embeddings: Annotated[
        bool, typer.Option("--train-embeddings", help="Train the embedding and the head, too.")
    ] = False
    minutes: Annotated[
        float | None, typer.Option(metavar="M", help="Minutes of training (default: 60, unless --steps bounds it).")
    ] = None
    steps: Annotated[int | None, typer.Option(metavar="N", help="Steps of training.")] = None
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 5e-4
    seed: Annotated[int, typer.Option(help="Of held-out lines, order and draws.")] = 0
    lines: Annotated[int, typer.Option(metavar="N", help="Most lines that are read.")] = 10_000
    samples: Annotated[
        int, typer.Option(metavar="N", help="Further answers that the teacher draws to each line: more to learn from.")
    ] = 0
    holdout: Annotated[float, typer.Option(metavar="SHARE", help="Of the lines that it is measured on, unseen.")] = 0.1
    pack_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a step; fewer take less memory.")] = 2048
    checkpoint_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps between checkpoints (default: 25, of heads 100).")
    ] = None
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads (default: all cores).")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False

    def check(self, given: dict[str, Any]) -> None:
        """Raises CommandError for what can't be, with these other options, or has no place to be made at."""
        from engine.distill.errors import DistillError
        from engine.distill.options import Options, check_place

        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own |= {"embeddings": own.pop("train_embeddings"), "method": str(self.method), "kl": str(self.kl)}
        try:
            check_place(Options(**own, **given))
        except DistillError as error:
            raise CommandError(str(error), Exit.REFUSED) from error

    def argv(self) -> list[str]:
        """As `engine.distill` takes them."""
        argv = ["--method", self.method, "--kl", self.kl, "--temperature", str(self.temperature)]
        argv += ["--lr", str(self.lr), "--seed", str(self.seed), "--lines", str(self.lines)]
        argv += ["--holdout", str(self.holdout), "--pack-tokens", str(self.pack_tokens)]
        argv += ["--samples", str(self.samples)]
        for option in ("draft_vocab", "minutes", "steps", "checkpoint_steps", "threads"):
            if (value := getattr(self, option)) is not None:
                argv += [f"--{option.replace('_', '-')}", str(value)]
        argv += ["--embeddings"] if self.train_embeddings else []
        return argv + (["--resume"] if self.resume else [])


@grouped
def distill(
    *,
    teacher: Annotated[str, typer.Option(metavar="M", help="Name, path, or hf:owner/name.")],
    student: Annotated[
        str,
        typer.Option(
            metavar="layers:N|config.json|heads:N",
            help="Evenly spread layers, a shape, or N heads on the teacher, which only draft.",
        ),
    ],
    data: Annotated[str, typer.Option(metavar="BATCH|FILE", help="A finished batch, or JSONL of batch lines.")],
    results: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Results of the lines of FILE; several times at will.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="The directory to make.")] = None,
    project: Annotated[
        str | None,
        typer.Option(metavar="P", help="Whose lines FILE holds (id or name): what they train is that project's alone."),
    ] = None,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Register it under this name.")] = None,
    accept_licence: Annotated[
        bool,
        typer.Option("--accept-licence", help="Confirm that the teacher's licence allows it, without being asked."),
    ] = False,
    training: TrainOptions,
    server: AdminOptions,
) -> None:
    """Train a smaller model on what a model says: to draft for it, or to serve alone.

    The lines of a batch are fetched with your key; a student of them is your project's alone, one of files everybody's
    unless --project says whose they are. Ctrl-C keeps a checkpoint, and --resume goes on.
    Makes DIR with report.md and loss.svg in DIR/distillation.
    """
    console, is_heads = server.console, student.startswith(_HEADS)
    if is_heads and name is not None:
        raise CommandError("Heads are no model, so they have no name of their own: leave --as out.", Exit.USAGE)
    spelled = absolute_model(teacher)
    licence = _confirmed(spelled, console, is_accepted=accept_licence)
    target = (out or Path(f"{Path(teacher).stem}-student")).expanduser().absolute()
    training.check({"teacher": spelled, "student": _shape(student), "data": Path(data), "target": target})
    found = found_data(data, results or [], target, project, server)
    argv = [spelled, str(target), "--student", _shape(student), "--data", str(found.file), *training.argv()]
    for path in found.results:
        argv += ["--results", str(path)]
    for option, value in (("--batch", found.batch), ("--project", found.project), ("--licence", licence)):
        argv += [option, value] if value is not None else []
    try:
        with shown_phases(console) as told:
            killed = _KILLED.format(smaller="--draft-vocab" if is_heads else "--pack-tokens")
            done = engine_child.ask("engine.distill", argv, told, killed=killed)
    except KeyboardInterrupt as error:
        tell_left(found, target, console)
        raise CommandError("Stopped; the same command with --resume goes on.", Exit.INTERRUPTED) from error
    except CommandError:
        tell_left(found, target, console)
        raise
    if is_heads:
        _tell_heads(console, done, target, teacher)
        return
    registered = _registered(target, name, found, server)
    console.fields(
        {
            "KL to the teacher": f"{done['kl']} nats, same first token {100 * done['top1']:.1f} %",
            "Perplexity": f"{done['perplexity']}, the teacher's {done['teacher_perplexity']}",
            "As a draft": _drafting(done, ", of 4 proposed"),
            "Tokens/s alone": f"{done['student_tokens_per_s']}, the teacher {done['teacher_tokens_per_s']}",
        }
    )
    console.out(f"{target} holds the student; distillation/report.md and loss.svg in it say how it came about.")
    console.out(f"Run it with: batchsvc run FILE.jsonl --model {registered or target}")
    console.result({**done, "registered_as": registered})


def _drafting(done: dict[str, Any], of: str = "") -> str:
    if done["accepted_per_verify"] is None:
        return f"not measured: {done['accepted_says']}"
    return f"{done['accepted_per_verify']} accepted tokens a verification{of}"


def _tell_heads(console: Console, done: dict[str, Any], target: Path, teacher: str) -> None:
    shares = ", ".join(f"{100 * share:.1f} %" for share in done["right"])
    console.fields(
        {
            "As a draft": _drafting(done),
            "Right in held-out answers": f"{shares}: each head, with those before it",
        }
    )
    console.out(f"{target} holds the heads; distillation/report.md and loss.svg in it say how they came about.")
    console.out(f"Run with them: batchsvc run FILE.jsonl --model {teacher} --draft {target}")
    console.result(done)


def _confirmed(teacher: str, console: Console, *, is_accepted: bool) -> str | None:
    """Shows what the teacher comes under and has it confirmed; its name."""
    from batchsvc.stack.prepare import located
    from engine.errors import EngineError
    from engine.load.terms import terms_of

    found = located(teacher, console.say, asking(console, is_accepted=is_accepted))
    try:
        terms = terms_of(teacher, found.path)
    except EngineError as error:
        raise CommandError(str(error), Exit.REFUSED) from error
    if terms.text:
        console.say(terms.text)
    named = terms.name or "a licence that its files don't name"
    console.say(f"{teacher} comes under {named}" + (f" ({terms.url})." if terms.url else "."))
    if not is_accepted:
        if not sys.stdin.isatty():
            raise CommandError(
                "Give --accept-licence if you have made sure that the teacher's licence lets you train a model on what "
                "it says.",
                Exit.USAGE,
            )
        if not typer.confirm("Does it let you train a model on what it says, and do you accept it?", err=True):
            raise CommandError("The teacher's licence wasn't accepted, so nothing was trained.", Exit.USAGE)
    return terms.name


def _shape(student: str) -> str:
    path = Path(student).expanduser()
    return student if student.startswith(("layers:", _HEADS)) else str(path.absolute())


def _registered(target: Path, name: str | None, data: Data, server: AdminOptions) -> str | None:
    """Registers the student: as NAME, and where its data is a batch of an embedded stack as its path in any case."""
    from batchsvc.stack.prepare import located

    is_local = data.batch is not None and not server.from_env and server.target.directory is not None
    if name is None and not is_local:
        return None
    found = located(str(target), server.console.say)
    with opened_admin(server) as admin:
        return str(admin.add_model(found.registration(name or str(target)))["id"])
