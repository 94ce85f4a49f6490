"""`batchsvc models`: what batches may name, and other names for it."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

import typer

from batchsvc.cli import formats, incidents
from batchsvc.cli.admin import opened_admin
from batchsvc.cli.console import Console
from batchsvc.cli.distill import distill
from batchsvc.cli.evaluate import evaluate
from batchsvc.cli.exits import ApiError
from batchsvc.cli.licence import asking
from batchsvc.cli.options import AdminOptions, JsonOption, ServerOptions, grouped
from batchsvc.cli.quantize import quantize
from batchsvc.cli.size import size
from batchsvc.cli.target import absolute_model
from batchsvc.errors import NotFoundError
from batchsvc.stack.options import DEFAULT_MODEL, READING

app = typer.Typer(
    no_args_is_help=True,
    help="Models: pull, list, add, alias, load, unload, size, quantize, eval, distill.",
    rich_markup_mode=None,
)

WorkerOption = Annotated[
    str | None, typer.Option("--worker", metavar="NAME", help="Only workers of this name (default: all).")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name, path, or hf:owner/name.")]


@app.command("list")
@grouped
def list_models(
    server: ServerOptions,
) -> None:
    """List models and aliases."""
    console = server.console
    with server.opened(roles=READING, purpose="models list") as session:
        page = session.client.models()
        served = _served_by(server)
    page["data"] = [{**row, "served_by": served.get(str(row.get("digest")), [])} for row in page["data"]]
    console.result(page)
    rows = [
        {
            **row,
            "served by": ", ".join(row["served_by"]) or row["workers"],
            "alias_of": row.get("alias_of") or "",
            "digest": str(row.get("digest") or "")[:16],
            "quality": formats.verdict(row),
        }
        for row in page["data"]
    ]
    columns = ("id", "alias_of", "context_tokens", "weight_format", "kv_format", "quality", "served by", "digest")
    console.table(rows, columns)


def _served_by(server: ServerOptions) -> dict[str, list[str]]:
    """By digest, which workers serve a model; nothing for whoever isn't an operator."""
    options = AdminOptions(data_dir=server.data_dir, url=server.url, api_key=server.api_key)
    try:
        with incidents.opened(options) as verbs:
            return verbs.served_by()
    except ApiError as error:
        if error.status in (HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND):
            return {}
        raise


@app.command()
def pull(
    name: NameArgument = DEFAULT_MODEL,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="Accept the licence that is shown, without being asked.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model into your cache directory; it is checked and kept.

    A model whose licence binds its users (gemma3-270m) shows it first, and is fetched once it is accepted.
    """
    from batchsvc.stack.prepare import located

    console = Console(as_json=as_json)
    found = located(absolute_model(name), console.say, asking(console, is_accepted=accept_licence))
    console.out(str(found.path))
    console.result({"id": name, "object": "model", **found.registration(name), "path": str(found.path)})


@app.command()
@grouped
def add(
    *,
    model: NameArgument,
    name: Annotated[str | None, typer.Option("--as", metavar="NAME", help="Its name (default: as given).")] = None,
    server: AdminOptions,
) -> None:
    """Register a model, so that batches may name it.

    A worker that serves it is started by `batchsvc up --model`, or with BATCHSVC_MODEL.
    """
    from batchsvc.stack.prepare import located

    console = server.console
    spelled = absolute_model(model)
    found = located(spelled, console.say)
    with opened_admin(server) as admin:
        added = admin.add_model(found.registration(name or spelled))
    console.out(f"{added['id']} is {found.path}.")
    console.result(added)


@app.command()
@grouped
def alias(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that files use.")],
    target: Annotated[str, typer.Argument(metavar="MODEL", help="The model that it means.")],
    server: AdminOptions,
) -> None:
    """Let NAME mean MODEL in batches that are created from now on."""
    from batchsvc.stack.prepare import located

    console = server.console
    spelled = absolute_model(target)
    with opened_admin(server) as admin:
        try:
            made = admin.alias(name, spelled)
        except NotFoundError:  # in a fresh data directory nothing is registered yet; a shipped model is fine
            if spelled != DEFAULT_MODEL:
                raise
            admin.add_model(located(spelled, console.say).registration(spelled))
            made = admin.alias(name, spelled)
    console.out(f"{made['id']} means {made['alias_of']}.")
    console.result(made)


@app.command()
@grouped
def load(
    *,
    model: NameArgument,
    worker: WorkerOption = None,
    server: AdminOptions,
) -> None:
    """Have workers serve a model, in turn with those that they serve; one that isn't registered is added first."""
    from batchsvc.stack.prepare import located

    spelled = absolute_model(model)
    with incidents.opened(server) as verbs:
        try:
            done = verbs.load_model(spelled, worker)
        except (NotFoundError, ApiError) as error:
            if isinstance(error, ApiError) and error.status != HTTPStatus.NOT_FOUND:
                raise
            with opened_admin(server) as admin:
                admin.add_model(located(spelled, server.console.say).registration(spelled))
            done = verbs.load_model(spelled, worker)
    server.console.result(done)
    whose = f"the worker {worker}" if worker else "all workers"
    now = ", ".join(done["served_by"]) or "none that is alive"
    server.console.out(f"{done['model']} is for {whose}: {now}.")


@app.command()
@grouped
def unload(
    *,
    model: NameArgument,
    worker: WorkerOption = None,
    server: AdminOptions,
) -> None:
    """Have workers serve a model no more; refused while unfinished batches need it."""
    with incidents.opened(server) as verbs:
        done = verbs.unload_model(absolute_model(model), worker)
    server.console.result(done)
    whose = f"the worker {worker}" if worker else "all workers"
    server.console.out(f"{done['model']} is unloaded from {whose}, which let go of it within seconds.")


app.command()(size)
app.command()(quantize)
app.command("eval")(evaluate)
app.command()(distill)
