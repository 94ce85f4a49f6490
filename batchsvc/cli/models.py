"""`batchsvc models`: what batches may name, and other names for it."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Annotated

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.database import database_of
from batchsvc.cli.exits import CommandError
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption, KeyOption, UrlOption
from batchsvc.cli.target import absolute_model, opened, select
from batchsvc.stack.options import DEFAULT_MODEL, READING

app = typer.Typer(no_args_is_help=True, help="Models: pull, list, add, alias.", rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name, path, or hf:owner/name.")]


@app.command("list")
def list_models(
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List models and aliases."""
    console = Console(as_json=as_json)
    with opened(select(data_dir, url, api_key, os.environ), console, roles=READING, purpose="models list") as session:
        page = session.client.models()
    console.result(page)
    rows = [
        {**row, "alias_of": row.get("alias_of") or "", "digest": str(row.get("digest", ""))[:16]}
        for row in page["data"]
    ]
    console.table(rows, ("id", "alias_of", "context_tokens", "weight_format", "kv_format", "digest"))


@app.command()
def pull(name: NameArgument = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Fetch a model into your cache directory; it is checked and kept."""
    from engine.errors import EngineError
    from engine.load.fetch import locate

    console = Console(as_json=as_json)
    try:
        path = locate(name, say=console.say)
    except EngineError as error:
        raise CommandError(str(error)) from error
    console.out(str(path))
    console.result({"id": name, "object": "model", "path": str(path)})


@app.command()
def add(
    model: NameArgument,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Its name (default: as given).")] = None,
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Register a model, so that batches may name it; a worker serves it with `up --model` or BATCHSVC_MODEL."""
    from batchsvc.stack.prepare import prepare_model

    console = Console(as_json=as_json)
    spelled = absolute_model(model)
    with database_of(data_dir, from_env=from_env) as database:
        path = prepare_model(database, spelled, console.say, name=name or spelled)
    console.out(f"{name or spelled} is {path}.")
    console.result({"id": name or spelled, "object": "model", "path": str(path)})


@app.command()
def alias(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that files use.")],
    target: Annotated[str, typer.Argument(metavar="MODEL", help="The model that it means.")],
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let NAME mean MODEL in batches that are created from now on."""
    from batchsvc.batches import models

    console = Console(as_json=as_json)
    with database_of(data_dir, from_env=from_env, model=target) as database:
        row = database.run(lambda session: models.alias(session, name, absolute_model(target)))
    console.out(f"{row.id} means {row.alias_of}.")
    created = int(datetime.fromtimestamp(row.created_ms / 1000, UTC).timestamp())
    console.result({"id": row.id, "object": "model", "created": created, "alias_of": row.alias_of})
