"""`batchsvc run`: one file in, its results out; everything between is done, shown and picked up again if it broke."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer

from batchsvc.cli import attach, merge, outcome, served, table_output
from batchsvc.cli.console import Console
from batchsvc.cli.exits import ApiError, CommandError, Exit, allowed_errors
from batchsvc.cli.follow import follow
from batchsvc.cli.options import AllowErrorsOption, DataDirOption, JsonOption, KeyOption, UrlOption
from batchsvc.cli.prompt import (
    IdColumnOption,
    MaxTokensOption,
    Prompting,
    PromptOption,
    SchemaOption,
    StaticFirstOption,
    SystemOption,
    TemperatureOption,
    requests_of,
    schema_of,
)
from batchsvc.cli.target import Session, Target, absolute_model, opened, select
from batchsvc.stack.options import ALL, DEFAULT_MODEL

ENDPOINT = "/v1/chat/completions"
_OTHER_ENDPOINTS = ["/v1/completions", "/v1/embeddings", "/v1/responses"]
_FIRST_LINE_BYTES = 1 << 20
_TELL_BYTES = 32 * 1024 * 1024  # uploads above this say how far they are

ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="M", help="Run every line on M, whatever its body.model says.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", metavar="N", help="Name of the batch; the same name and input go on with it.")
]
SkipOption = Annotated[bool, typer.Option("--skip-invalid", help="Turn broken lines into error lines.")]
WindowOption = Annotated[
    str, typer.Option("--window", metavar="W", help="How long the batch may take, of those that the server offers.")
]
PriorityOption = Annotated[
    int, typer.Option("--priority", min=-10, max=10, help="Among your own batches: higher ones run first.")
]
QuotaOption = Annotated[
    Literal["wait", "fail"], typer.Option("--on-quota", help="What the batch does while your token quota is full.")
]
QuotedOption = Annotated[
    str | None, typer.Option("--quote", metavar="ID", help="Run at the prices of this quote (quote_...).")
]
MaxCostOption = Annotated[
    str | None,
    typer.Option("--max-cost", metavar="DOLLARS", help="The most that it may cost; the rest ends as error lines."),
]
FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Requests, or with --prompt any table: JSONL, Parquet or CSV; plain, gz, zst."),
]
InputOption = Annotated[Path | None, typer.Option("-i", "--input", metavar="F", help="The same as FILE.")]
DEFAULT_WINDOW = "24h"


def run(
    file: FileArgument = None,
    input_file: InputOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="F",
            help="Results: JSONL, or a table (.parquet, .csv). Default: FILE's name with .results.jsonl, here.",
        ),
    ] = None,
    name: NameOption = None,
    model: ModelOption = None,
    prompt: PromptOption = None,
    system: SystemOption = None,
    id_column: IdColumnOption = None,
    schema: SchemaOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    static_first: StaticFirstOption = False,
    skip_invalid: SkipOption = False,
    window: WindowOption = DEFAULT_WINDOW,
    priority: PriorityOption = 0,
    on_quota: QuotaOption = "wait",
    max_cost: MaxCostOption = None,
    quote: QuotedOption = None,
    allow_errors: AllowErrorsOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a file of requests and write its results, in input order.

    Repeating the command goes on with the unfinished batch of the same input instead of paying twice. Ctrl-C leaves
    the batch running on a stack that was running before.
    """
    console = Console(as_json=as_json)
    source = chosen_input(file, input_file)
    allowed_errors(allow_errors, 0)  # a wrong form is told before anything is paid for
    prompting = Prompting(
        prompt=prompt,
        system=system,
        id_column=id_column,
        schema=schema,
        max_tokens=max_tokens,
        temperature=temperature,
        static_first=static_first,
    )
    goal = _Goal.of(source, output, prompting)
    check_output(goal.path, source)
    model = absolute_model(model) if model else None
    target = select(data_dir, url, api_key, os.environ)
    wishes = extensions(
        window=window,
        priority=priority,
        on_quota=on_quota,
        max_cost=max_cost,
        skip_invalid=skip_invalid,
        quote=quote,
    )
    with requests_of(
        source, prompting, console, endpoint=ENDPOINT, model=line_model(model), skip_invalid=skip_invalid
    ) as requests:
        needed = model or model_to_serve(target, requests)
        with opened(target, console, roles=ALL, purpose="run", model=needed) as session:
            batch: dict[str, Any] | None = None
            try:
                batch = start(
                    session, console, requests, name=name, model=model, wishes=wishes, results=goal.path, label=source
                )
                before, started = batch, time.monotonic()
                batch = follow(session.client, batch, console, check=partial(served.check, session))
                elapsed_s = time.monotonic() - started
                if batch["status"] == "failed":
                    outcome.tell_problems(batch, console)
                else:
                    _fetch(session, batch, goal)
                    outcome.summary(batch, console, results=str(goal.path), elapsed_s=elapsed_s, before=before)
            except KeyboardInterrupt:
                raise CommandError(_interrupted(session, batch, goal, needed), Exit.INTERRUPTED) from None
            console.result(batch)
    raise typer.Exit(outcome.exit_of(batch, allow_errors))


@dataclass(frozen=True, slots=True)
class _Goal:
    """Where the results go, and, where they become a table, beside which rows."""

    path: Path
    table: Path | None
    prompting: Prompting

    @classmethod
    def of(cls, source: Path, output: Path | None, prompting: Prompting) -> _Goal:
        has_prompt = prompting.prompt is not None
        path = output or (table_output.default_path(source) if has_prompt else Path(source.stem + ".results.jsonl"))
        table_output.check_name(path)
        schema_of(prompting.schema)
        is_table = has_prompt or prompting.schema is not None or table_output.is_table(path)
        return cls(path, source if is_table else None, prompting)

    def flags(self) -> str:
        """What `batchsvc results` needs to write the same."""
        return f" -o {self.path}" + (self.prompting.flags(self.table) if self.table else "")


def _fetch(session: Session, batch: dict[str, Any], goal: _Goal) -> None:
    try:
        if goal.table is None:
            merge.write_results(session.client, batch, goal.path)
        else:
            table_output.write_table(session.client, batch, goal.path, source=goal.table, schema=goal.prompting.schema)
    except CommandError as error:
        again = f"batchsvc results {batch['id']}{goal.flags()}{session.target.flags()}"
        raise CommandError(f"{error.message} The results are kept: `{again}`.", error.code) from error


def line_model(model: str | None) -> str | None:
    """What requests that are filled in name as their model: none, where the batch names one."""
    return DEFAULT_MODEL if model is None else None


def start(
    session: Session,
    console: Console,
    source: Path,
    *,
    name: str | None,
    model: str | None,
    wishes: dict[str, Any],
    results: Path | None,
    label: Path | None = None,
) -> dict[str, Any]:
    """Upload and create the batch, or find the one to go on with. `results`: where this run would write, if it does;
    `label`: what the user calls the input."""
    if model:
        console.say(f"Every line runs on {model}: --model overrides the model that the file names.")
    sha256 = attach.sha256_of(source)
    if results is not None:
        wish = attach.Wish(
            sha256=sha256,
            name=name,
            model=model,
            on_invalid=wishes["on_invalid"],
            has_results=results.exists(),
            quote_id=wishes.get("quote_id"),
        )
        if found := attach.find(session.client, wish):
            console.say(f"Going on with {found['id']}, the batch of the same input ({found['status']}).")
            return found
    try:
        return _create(session, console, source, sha256=sha256, name=name, model=model, wishes=wishes, label=label)
    except ApiError as error:
        if error.status in (400, 413, 415, 422):
            raise CommandError(error.message, Exit.REFUSED) from error
        raise


def extensions(
    *,
    window: str,
    priority: int,
    on_quota: str,
    skip_invalid: bool,
    max_cost: str | None = None,
    quote: str | None = None,
) -> dict[str, Any]:
    """The window, and those of our extensions that aren't as usual: another server need not know them."""
    unusual: dict[str, Any] = {"priority": priority} if priority else {}
    unusual |= {"on_quota": on_quota} if on_quota != "wait" else {}
    unusual |= {} if max_cost is None else {"max_cost": max_cost}
    unusual |= {"quote_id": quote} if quote else {}
    return {"completion_window": window, "on_invalid": "skip" if skip_invalid else "fail", **unusual}


def _create(
    session: Session,
    console: Console,
    source: Path,
    *,
    sha256: str,
    name: str | None,
    model: str | None,
    wishes: dict[str, Any],
    label: Path | None,
) -> dict[str, Any]:
    uploaded = session.client.upload(source, upload_progress(console, source.stat().st_size))
    metadata = {attach.SHA_KEY: sha256} | ({attach.MODEL_KEY: model} if model else {})
    body: dict[str, Any] = {
        "input_file_id": uploaded["id"],
        "endpoint": endpoint_of(source),
        "metadata": metadata,
        **wishes,
    }
    body |= {key: value for key, value in (("name", name), ("model", model)) if value}
    batch = session.client.create_batch(body)
    console.say(f"{label or source} is batch {batch['id']}.")
    return batch


def chosen_input(file: Path | None, input_file: Path | None) -> Path:
    """The one input that was named, if it can be read. Raises CommandError in one sentence."""
    if (file is None) == (input_file is None):
        raise CommandError("Name one input: FILE or -i FILE.", Exit.USAGE)
    source = file or input_file
    assert source is not None, "one of the two was given"
    try:
        if source.is_dir():
            raise CommandError(f"{source} is a directory: name a JSONL, Parquet or CSV file.", Exit.USAGE)
        with source.open("rb") as opened_file:
            first = opened_file.read(1)
    except FileNotFoundError:
        raise CommandError(f"There is no file {source}.", Exit.USAGE) from None
    except OSError as error:
        raise CommandError(f"{source} can't be read: {error.strerror}.", Exit.USAGE) from error
    if not first:
        raise CommandError(f"{source} is empty: it needs one request a line.", Exit.REFUSED)
    return source


def check_output(path: Path, source: Path | None) -> None:
    """Sees that results can be written to `path` before anything is paid for."""
    if path.is_dir():
        raise CommandError(f"{path} is a directory: name a file with -o.", Exit.USAGE)
    if source is not None and path.exists() and path.samefile(source):
        raise CommandError(f"The results would overwrite the input {source}: name another file with -o.", Exit.USAGE)
    partial = merge.partial_of(path)
    try:
        partial.open("ab").close()
        if partial.stat().st_size == 0:
            partial.unlink()
    except OSError as error:
        raise CommandError(f"{path} can't be written: {error.strerror}.", Exit.USAGE) from error


def model_to_serve(target: Target, source: Path) -> str | None:
    """The model that a stack for this file has to serve: what its first line names, if that was registered."""
    if target.directory is None:
        return None
    try:
        with source.open("rb") as file:
            named = orjson.loads(file.readline(_FIRST_LINE_BYTES))["body"]["model"]
    except (ValueError, TypeError, KeyError):  # Parquet, or a line that the planner will refuse
        return None
    if not isinstance(named, str) or named == DEFAULT_MODEL:
        return None
    from batchsvc.stack.prepare import registered_path

    return registered_path(target.directory, named)


def endpoint_of(source: Path) -> str:
    """The endpoint that the first line of requests names; that of chats, where none can be read from it."""
    try:
        with source.open("rb") as file:
            url = orjson.loads(file.readline(_FIRST_LINE_BYTES))["url"]
    except (ValueError, TypeError, KeyError):
        return ENDPOINT
    return url if url in _OTHER_ENDPOINTS else ENDPOINT


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
