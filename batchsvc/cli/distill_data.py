"""What a distillation learns from: named files, or a batch's, which are fetched for it and kept from others' eyes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from batchsvc.cli import merge
from batchsvc.cli.admin import Admin, opened_admin
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions
from batchsvc.stack.options import READING

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

_ENDED = ("completed", "expired", "cancelled")
_PARTS = ("input", "results")
"""Of a batch, each a file: all lines, and what they had as their last answers, in whichever batch of a chain."""
_RUN = "run.json"
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1")


@dataclass(frozen=True, slots=True)
class Data:
    """Files to learn from, and whose they are."""

    file: Path
    results: tuple[Path, ...] = ()
    batch: str | None = None
    project: str | None = None


def found_data(data: str, results: list[Path], target: Path, project: str | None, server: AdminOptions) -> Data:
    """What `--data` names; of a batch, its lines now lie beside `target`. Raises CommandError."""
    path = Path(data).expanduser()
    if data.startswith("msgbatch_") and not path.exists():
        raise CommandError(
            f"{data} is a batch of messages, and a student learns from chat completions and completions (batch_...): "
            "give its requests as JSONL of chat lines with --data, and the teacher answers them.",
            Exit.USAGE,
        )
    if path.exists() or not data.startswith("batch_"):
        if not path.is_file():
            raise CommandError(f"--data {data} is neither a file nor a batch (batch_...).", Exit.USAGE)
        files = tuple(one.expanduser().absolute() for one in results)
        if project is None:
            return Data(path.absolute(), files)
        with opened_admin(server) as admin:
            return Data(path.absolute(), files, project=project_id(project, admin))
    if results:
        raise CommandError("A batch brings its own results: leave --results out.", Exit.USAGE)
    if project is not None:
        raise CommandError("A batch has its own project: leave --project out.", Exit.USAGE)
    if (kept := _kept(data, _work(target))) is not None:
        return kept
    with server.opened(roles=READING, purpose="models distill") as session:
        return fetched(session.client, data, _work(target))


def fetched(client: Client, data: str, work: Path) -> Data:
    """The lines of a batch that has ended, which now lie in `work`: of a retry or a continuation those of the whole
    chain, each with the youngest answer. Raises CommandError."""
    batch = client.batch(data)
    if batch["status"] not in _ENDED:
        raise CommandError(f"{data} is {batch['status']}: a student learns from a batch that has ended.")
    lines, answers = (work / f"{part}.jsonl" for part in _PARTS)
    try:
        with client.content(batch["input_file_id"]) as chunks:
            store(lines, chunks)
        _check_plain(lines, data)
        said = merge.latest(merge.results(client, one) for one in merge.chain(client, batch))
        store(answers, (line + b"\n" for line in said))
    except BaseException:
        _removed(work)
        raise
    return Data(lines, (answers,), data, batch["project_id"])


def _kept(data: str, work: Path) -> Data | None:
    """What a run that goes on has of its batch: that may be deleted by now. None: nothing has begun, or its lines were
    taken away. Raises CommandError where it began with something else, which a fetch would write over."""
    run, (lines, answers) = work / _RUN, (work / f"{part}.jsonl" for part in _PARTS)
    try:
        begun = json.loads(run.read_bytes())
        batch, project = begun.get("batch"), begun.get("project")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise CommandError(f"{run} can't be read: {error}.") from error
    if batch != data:
        raise CommandError(
            f"{work} holds a run of {batch or 'other data'}: give the same with --resume, or remove it.", Exit.REFUSED
        )
    return Data(lines, (answers,), data, project) if lines.exists() and answers.exists() else None


def _check_plain(path: Path, batch: str) -> None:
    with path.open("rb") as file:
        if file.read(4).startswith(_PACKED):
            raise CommandError(
                f"The input of {batch} isn't plain JSONL; give its lines as JSONL with --data, and --results.",
                Exit.REFUSED,
            )


def _work(target: Path) -> Path:
    """Where an unfinished run keeps what it has (engine/distill/options.py)."""
    return target.parent / f"{target.name}.distill"


def store(path: Path, chunks: Iterable[bytes]) -> None:
    """A file that its owner alone can read, in a folder likewise."""
    scratch = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(scratch, "wb", opener=_private) as file:
            for chunk in chunks:
                file.write(chunk)
        scratch.replace(path)
    except OSError as error:
        raise CommandError(f"The batch can't be stored in {path.parent}: {error.strerror or error}.") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)


def _removed(work: Path) -> bool:
    """Removes what was fetched, unless a run has begun with it."""
    if (work / _RUN).exists():
        return False
    with suppress(OSError):
        for part in _PARTS:
            for name in (f"{part}.jsonl", f".{part}.jsonl"):
                (work / name).unlink(missing_ok=True)
        work.rmdir()
    return True


def tell_left(data: Data, target: Path, console: Console) -> None:
    """Of a batch's lines that were fetched and are no longer needed, or are for a run that goes on."""
    work = _work(target)
    if data.batch is not None and not _removed(work):
        console.say(
            f"The lines of {data.batch} stay in {work}, for you alone, for --resume; remove it to give the run up."
        )


def project_id(project: str, admin: Admin) -> str:
    """Of the project with this id or name. Raises CommandError for an unknown one."""
    for row in admin.list_projects()["data"]:
        if project in (row["id"], row["name"]):
            return str(row["id"])
    raise CommandError(f"There is no project {project} here; `batchsvc admin projects` lists them.", Exit.USAGE)
