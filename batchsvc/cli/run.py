"""`batchsvc run`: one file in, its results out; everything between is done, shown and picked up again if it broke."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from batchsvc.cli import attach, merge, outcome, served, table_output
from batchsvc.cli.awaited import Awaited
from batchsvc.cli.console import Console
from batchsvc.cli.exits import ApiError, CommandError, Exit, allowed_errors
from batchsvc.cli.exporting import wait_for_export
from batchsvc.cli.follow import follow
from batchsvc.cli.input_file import InputOptions, Source, endpoint_of, model_to_serve
from batchsvc.cli.options import (
    AllowErrorsOption,
    DraftOption,
    ForceFormatOption,
    ServerOptions,
    SpecOption,
    grouped,
)
from batchsvc.cli.prompt import Prompting, requests_of, schema_of
from batchsvc.cli.target import Session, absolute_model
from batchsvc.errors import InvalidRequestError
from batchsvc.files.s3_uri import S3Uri, parse_prefix
from batchsvc.stack.options import ALL, DEFAULT_MODEL, Drafting

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

_TELL_BYTES = 32 * 1024 * 1024  # uploads above this say how far they are


@dataclass(frozen=True, kw_only=True)
class LineOptions:
    """On what lines run, and what becomes of broken ones, by when."""

    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Run every line on M, whatever its body.model says.")
    ] = None
    by_line: Annotated[
        bool, typer.Option("--models-by-line", help="Run each line on the model that it names: they may be several.")
    ] = False
    skip_invalid: Annotated[bool, typer.Option("--skip-invalid", help="Turn broken lines into error lines.")] = False
    window: Annotated[
        str, typer.Option("--window", metavar="W", help="How long the batch may take, of those that the server offers.")
    ] = "24h"

    @property
    def spelled_model(self) -> str | None:
        """The model by a name that means the same from any folder."""
        return absolute_model(self.model) if self.model else None

    @property
    def line_model(self) -> str | None:
        """What requests that are filled in name as their model: none, where the batch names one."""
        return DEFAULT_MODEL if self.model is None else None

    def extensions(self) -> dict[str, Any]:
        """The window, and those of our extensions that aren't as usual: another server need not know them."""
        asked = {"completion_window": self.window, "on_invalid": "skip" if self.skip_invalid else "fail"}
        return asked | ({"models": "by_line"} if self.by_line else {})


@dataclass(frozen=True, kw_only=True)
class BatchOptions(LineOptions):
    """What is asked of a batch beside its lines."""

    name: Annotated[
        str | None,
        typer.Option("--name", metavar="N", help="Name of the batch; the same name and input go on with it."),
    ] = None
    priority: Annotated[
        int, typer.Option("--priority", min=-10, max=10, help="Among your own batches: higher ones run first.")
    ] = 0
    on_quota: Annotated[
        Literal["wait", "fail"],
        typer.Option("--on-quota", help="What the batch does while your token quota is full."),
    ] = "wait"
    max_cost: Annotated[
        str | None,
        typer.Option("--max-cost", metavar="DOLLARS", help="The most that it may cost; the rest ends as error lines."),
    ] = None
    quote: Annotated[
        str | None, typer.Option("--quote", metavar="ID", help="Run at the prices of this quote (quote_...).")
    ] = None
    output_s3: Annotated[
        str | None,
        typer.Option("--output-s3", metavar="URI", help="Prefix in S3 that the results go to: s3://bucket/prefix."),
    ] = None

    @property
    def prefix(self) -> str | None:
        """The prefix in S3 as the server keeps it. Raises CommandError."""
        if self.output_s3 is None:
            return None
        try:
            return str(parse_prefix(self.output_s3, "--output-s3"))
        except InvalidRequestError as error:
            raise CommandError(error.message, Exit.USAGE) from error

    def extensions(self) -> dict[str, Any]:
        unusual: dict[str, Any] = {"priority": self.priority} if self.priority else {}
        unusual |= {"on_quota": self.on_quota} if self.on_quota != "wait" else {}
        unusual |= {} if self.max_cost is None else {"max_cost": self.max_cost}
        unusual |= {"quote_id": self.quote} if self.quote else {}
        unusual |= {} if (prefix := self.prefix) is None else {"output_s3": prefix}
        return {**super().extensions(), **unusual}


@grouped
def run(
    *,
    given: InputOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="F",
            help="Results: JSONL, or a table (.parquet, .csv). Default: FILE's name with .results.jsonl, here, "
            "or with --output-s3 none.",
        ),
    ] = None,
    prompting: Prompting,
    wanted: BatchOptions,
    allow_errors: AllowErrorsOption = None,
    force_format: ForceFormatOption = False,
    spec: SpecOption = None,
    draft: DraftOption = None,
    server: ServerOptions,
) -> None:
    """Run a file of requests and write its results, in input order.

    Repeating the command goes on with the unfinished batch of the same input instead of paying twice. Ctrl-C leaves
    the batch running on a stack that was running before.
    """
    console, source = server.console, given.chosen()
    allowed_errors(allow_errors, 0)  # a wrong form is told before anything is paid for
    goal = _Goal.of(source, output, prompting, is_local=output is not None or wanted.prefix is None)
    if goal.path is not None:
        check_output(goal.path, source)
    target = server.target
    with requests_of(source, prompting, console, model=wanted.line_model, skip_invalid=wanted.skip_invalid) as requests:
        job = Job.of(requests, prompting, wanted, label=source)
        needed = job.model or model_to_serve(target, requests)
        drafting = Drafting(spec=spec, draft=draft)
        with server.opened(
            roles=ALL, purpose="run", model=needed, force_format=force_format, drafting=drafting
        ) as session:
            batch: dict[str, Any] | None = None
            awaited = Awaited(target.directory)
            try:
                batch = job.start(session, console, goes_on=True, has_results=goal.has_results)
                awaited.add(batch["id"])
                before, started = batch, time.monotonic()
                batch = follow(session.client, batch, console, check=partial(served.check, session))
                elapsed_s = time.monotonic() - started
                if batch["status"] == "failed":
                    outcome.tell_problems(batch, console)
                else:
                    if goal.path is not None:
                        _fetch(session, batch, goal, goal.path)
                    batch = wait_for_export(session.client, batch, console)
                    outcome.summary(batch, console, results=goal.shown(batch), elapsed_s=elapsed_s, before=before)
                awaited.drop(batch["id"])
            except KeyboardInterrupt:
                raise CommandError(_interrupted(session, batch, goal, needed), Exit.INTERRUPTED) from None
            console.result(batch)
    raise typer.Exit(outcome.exit_of(batch, allow_errors))


@dataclass(frozen=True, slots=True)
class _Goal:
    """Where the results go here, if they do, and whether as a table: beside which rows, if these are here, too."""

    path: Path | None
    is_table: bool
    rows: Path | None
    prompting: Prompting

    @classmethod
    def of(cls, source: Source, output: Path | None, prompting: Prompting, *, is_local: bool) -> _Goal:
        if str(output).startswith("s3:"):
            raise CommandError(
                "-o names a file here: results go to S3 with --output-s3 s3://bucket/prefix.", Exit.USAGE
            )
        has_prompt = prompting.prompt is not None
        named = Path(source.name) if isinstance(source, S3Uri) else source
        path = output or (table_output.default_path(named) if has_prompt else Path(named.stem + ".results.jsonl"))
        table_output.check_name(path)
        schema_of(prompting.schema)
        is_table = has_prompt or prompting.schema is not None or table_output.is_table(path)
        rows = source if is_table and isinstance(source, Path) else None
        return cls(path if is_local else None, is_table, rows, prompting)

    @property
    def has_results(self) -> bool:
        """Whether what this run would write is there already."""
        return self.path is None or self.path.exists()

    def flags(self) -> str:
        """What `batchsvc results` needs to write the same."""
        if self.path is None:
            return " -o FILE"
        return f" -o {self.path}" + (self.prompting.flags(self.rows) if self.rows else "")

    def shown(self, batch: dict[str, Any]) -> str:
        """Where the results are."""
        there = (batch.get("output_s3") or {}).get("manifest")
        return " and ".join(str(place) for place in (self.path, there) if place)


def _fetch(session: Session, batch: dict[str, Any], goal: _Goal, path: Path) -> None:
    try:
        if goal.is_table:
            table_output.write_table(session.client, batch, path, source=goal.rows, schema=goal.prompting.schema)
        else:
            merge.write_results(session.client, batch, path)
    except CommandError as error:
        again = f"batchsvc results {batch['id']}{goal.flags()}{session.target.flags()}"
        raise CommandError(f"{error.message} The results are kept: `{again}`.", error.code) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A file of requests and the batch that it is to become. `label` is what the user calls the input."""

    requests: Source
    endpoint: str
    model: str | None
    wanted: BatchOptions
    label: Source

    @classmethod
    def of(cls, requests: Source, prompting: Prompting, wanted: BatchOptions, *, label: Source) -> Job:
        """Raises CommandError for an endpoint that the file contradicts."""
        endpoint = endpoint_of(requests, prompting.url)
        return cls(requests=requests, endpoint=endpoint, model=wanted.spelled_model, wanted=wanted, label=label)

    def start(
        self, session: Session, console: Console, *, goes_on: bool = False, has_results: bool = False
    ) -> dict[str, Any]:
        """Upload and create the batch, or, with `goes_on`, find the one to go on with. `has_results`: what this run
        would write is there already."""
        if self.model:
            console.say(f"Every line runs on {self.model}: --model overrides the model that the file names.")
        is_s3, extensions = isinstance(self.requests, S3Uri), self.wanted.extensions()
        sha256 = None if isinstance(self.requests, S3Uri) else attach.sha256_of(self.requests)
        if goes_on:
            wish = attach.Wish(
                sha256=sha256,
                uri=str(self.requests) if is_s3 else None,
                name=self.wanted.name,
                model=self.model,
                endpoint=self.endpoint,
                on_invalid=extensions["on_invalid"],
                is_by_line=self.wanted.by_line,
                has_results=has_results or is_s3,  # an object may have been replaced since: what has ended isn't it
                quote_id=self.wanted.quote or None,
                output_s3=self.wanted.prefix,
                awaited=Awaited(session.target.directory).ids(),
            )
            if found := attach.find(session.client, wish):
                console.say(f"Going on with {found['id']}, the batch of the same input ({found['status']}).")
                return found
        try:
            return self._create(session, console, sha256, extensions)
        except ApiError as error:
            if error.status in (400, 413, 415, 422):
                raise CommandError(error.message, Exit.REFUSED) from error
            raise

    def _create(
        self, session: Session, console: Console, sha256: str | None, extensions: dict[str, Any]
    ) -> dict[str, Any]:
        noted = {attach.URI_KEY: str(self.requests)} if sha256 is None else {attach.SHA_KEY: sha256}
        body: dict[str, Any] = {
            "input_file_id": given_to(session.client, self.requests, console),
            "endpoint": self.endpoint,
            "metadata": noted | ({attach.MODEL_KEY: self.model} if self.model else {}),
            **extensions,
        }
        named = (("name", self.wanted.name), ("model", self.model))
        batch = session.client.create_batch(body | {key: value for key, value in named if value})
        console.say(f"{self.label} is batch {batch['id']}.")
        return batch


def given_to(client: Client, requests: Source, console: Console) -> str:
    """How a call names these requests: by the file that they were uploaded as, or where the server finds them."""
    if isinstance(requests, S3Uri):
        return str(requests)
    return str(client.upload(requests, upload_progress(console, requests.stat().st_size))["id"])


def check_output(path: Path, source: Source | None) -> None:
    """Sees that results can be written to `path` before anything is paid for."""
    if path.is_dir():
        raise CommandError(f"{path} is a directory: name a file with -o.", Exit.USAGE)
    if isinstance(source, Path) and path.exists() and path.samefile(source):
        raise CommandError(f"The results would overwrite the input {source}: name another file with -o.", Exit.USAGE)
    partial = merge.partial_of(path)
    try:
        partial.open("ab").close()
        if partial.stat().st_size == 0:
            partial.unlink()
    except OSError as error:
        raise CommandError(f"{path} can't be written: {error.strerror}.", Exit.USAGE) from error


def upload_progress(console: Console, total: int) -> Any:
    """What an upload of so many bytes tells its progress to: it says how far it is, if it is long."""
    told = 0

    def sent(position: int) -> None:
        nonlocal told
        if total > _TELL_BYTES and position - told >= _TELL_BYTES:
            told = position
            console.say(f"uploading: {position / 1e6:,.0f} of {total / 1e6:,.0f} MB")

    return sent


def _interrupted(session: Session, batch: dict[str, Any] | None, goal: _Goal, needed: str | None) -> str:
    if batch is None:
        return "Interrupted before a batch was created: nothing runs and nothing is paid."
    flags = session.target.flags()
    if session.is_own:
        model = f" --model {needed}" if needed and needed != DEFAULT_MODEL else ""
        return (
            f"Interrupted: {batch['id']} keeps its finished lines. Repeat the command to go on with it, "
            f"or let it finish with `batchsvc up{model}{flags}`."
        )
    return (
        f"Detached: {batch['id']} goes on. Repeat the command to pick it up, or use "
        f"`batchsvc watch {batch['id']}{flags}` and `batchsvc results {batch['id']}{goal.flags()}{flags}`."
    )
