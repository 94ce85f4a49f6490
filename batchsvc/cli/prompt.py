"""`--prompt` and its companions: a table and a template become a file of requests, before anything is uploaded.

This is done here and not by the server, so that any batch API can run it, and what will run can be read: one line a
row, whose number is the number of the row, so that what is said of a line is true of the row. A million rows need no
more memory than a thousand. The same table and the same options give the same file, byte for byte, and, as the
temperature is 0 unless told otherwise, the same answers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import orjson
import typer

from batchsvc.cli import bodies
from batchsvc.cli.bodies import Bodies
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.input_file import ENDPOINT, ENDPOINTS, Source
from batchsvc.files import template
from batchsvc.files.lines import UnreadableFileError
from batchsvc.files.s3_uri import S3Uri
from batchsvc.files.template import NoTextError, Template, TemplateError, text_of

if TYPE_CHECKING:
    from batchsvc.files.table_reader import TableReader

_SHOWN_ROWS, _SHOWN_COLUMNS = 5, 30
_HAVE_SYSTEM = (None, ENDPOINTS["chat"], ENDPOINTS["responses"])

SchemaOption = Annotated[
    Path | None,
    typer.Option("--schema", metavar="F", help="JSON schema of the answers; its properties become columns."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """What is asked of every row. Without a `prompt`, FILE holds requests itself. Raises CommandError for options that
    don't go together."""

    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="T", help="Ask this of every row of FILE, any table; {name} is a column."),
    ] = None
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="E",
            help="chat, completions, embeddings or responses. Default: chat, or what the first line of FILE names.",
        ),
    ] = None
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="T", help="System message of every row, shared by all. Needs --prompt."),
    ] = None
    id_column: Annotated[
        str | None,
        typer.Option("--id-column", metavar="C", help="Column that names the rows, as custom_id. Needs --prompt."),
    ] = None
    schema: SchemaOption = None
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, metavar="N", help="Most tokens of an answer. Needs --prompt.")
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", min=0, max=2, metavar="X", help="Default: 0, the likeliest answer. Needs --prompt."
        ),
    ] = None
    dimensions: Annotated[
        int | None,
        typer.Option("--dimensions", min=1, metavar="N", help="Numbers of a vector, of --endpoint embeddings."),
    ] = None
    static_first: Annotated[
        bool,
        typer.Option(
            "--static-first", help="Put the template's text after the last column first, where rows share it."
        ),
    ] = False

    def __post_init__(self) -> None:
        name = None if self.endpoint is None else bodies.named_endpoint(self.endpoint)
        if self.prompt is None:
            for option in ("system", "id_column", "max_tokens", "temperature", "dimensions", "static_first"):
                if getattr(self, option) not in (None, False):
                    flag = option.replace("_", "-")
                    raise CommandError(f"--{flag} needs --prompt: without it, FILE holds whole requests.", Exit.USAGE)
        if self.prompt is not None or name is not None:
            bodies.check_options(name or "chat", asdict(self))

    @property
    def url(self) -> str | None:
        """The endpoint that was asked for, as lines name it."""
        return None if self.endpoint is None else ENDPOINTS[bodies.named_endpoint(self.endpoint)]

    def flags(self, source: Path) -> str:
        """What `batchsvc results` needs to write the same table."""
        schema = f" --schema {self.schema}" if self.schema else ""
        return (f" --input {source}" if self.prompt is not None else "") + schema


@dataclass(slots=True)
class _Missing:
    """Rows that can't be filled in."""

    rows: int = 0
    shown: list[str] = field(default_factory=list)

    def note(self, row: int, column: str) -> None:
        self.rows += 1
        if len(self.shown) < _SHOWN_ROWS:
            self.shown.append(f"row {row} has no {column!r}")


@contextmanager
def requests_of(
    source: Source, prompting: Prompting, console: Console, *, model: str | None, skip_invalid: bool
) -> Iterator[Source]:
    """The requests: FILE itself, or a file that is filled in from it and deleted in the end.

    `model`: what the lines name; None where the batch names it. Raises CommandError.
    """
    if prompting.prompt is None:
        yield source
        return
    if isinstance(source, S3Uri):
        raise CommandError(f"--prompt fills in a table on this machine: fetch {source} first.", Exit.USAGE)
    chosen = _template(prompting, console)
    with tempfile.TemporaryDirectory(prefix="batchsvc-") as folder:
        path = Path(folder) / f"{source.name.split('.')[0] or 'rows'}.jsonl"
        try:
            with reading(source) as table, path.open("wb") as out:
                missing = _write(table, chosen, bodies_of(prompting, model), prompting, out)
        except OSError as error:
            raise CommandError(f"{error.filename or source} can't be used: {error.strerror}.") from error
        _tell(missing, console, skip_invalid=skip_invalid)
        yield path


def bodies_of(prompting: Prompting, model: str | None) -> Bodies:
    """What makes the bodies of the requests. Raises CommandError for a schema that can't be read."""
    schema, named = schema_of(prompting.schema), None
    if schema is not None:
        assert prompting.schema is not None, "the schema was read from it"
        named = "".join(c if c.isascii() and c.isalnum() else "_" for c in prompting.schema.stem)[:64], schema
    return Bodies(
        bodies.named_endpoint(prompting.endpoint or "chat"),
        model=model,
        system=prompting.system,
        schema=named,
        max_tokens=prompting.max_tokens,
        temperature=prompting.temperature,
        dimensions=prompting.dimensions,
    )


@contextmanager
def reading(source: Path) -> Iterator[TableReader]:
    """A table on this machine. Raises CommandError with the line or the reason."""
    from batchsvc.files.table_reader import TableReader

    try:
        with TableReader(source) as table:
            yield table
    except UnreadableFileError as error:
        raise CommandError(f"{source} can't be read. {error.problem.message}", Exit.REFUSED) from error


def schema_of(path: Path | None) -> dict[str, Any] | None:
    """The JSON schema in a file. Raises CommandError."""
    if path is None:
        return None
    try:
        found = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CommandError(f"{path} can't be read: {error.strerror}.", Exit.USAGE) from error
    except orjson.JSONDecodeError as error:
        raise CommandError(f"{path} is not JSON: {error.msg}.", Exit.USAGE) from error
    if not isinstance(found, dict):
        raise CommandError(f"{path} is no JSON schema: it must be an object.", Exit.USAGE)
    return found


def _template(prompting: Prompting, console: Console) -> Template:
    try:
        found = template.parse(prompting.prompt or "")
    except TemplateError as error:
        raise CommandError(str(error), Exit.USAGE) from error
    if not found.unshared:
        return found
    if not prompting.static_first:
        or_system = ", or --system holds it" if prompting.url in _HAVE_SYSTEM else ""
        console.say(
            f"The template's text after its last column ({len(found.unshared)} characters) is computed for every row; "
            f"--static-first puts it first{or_system}, where all rows share it."
        )
        return found
    moved = found.static_first()
    console.say(f"The template is now: {moved}")
    return moved


def _write(table: TableReader, chosen: Template, made: Bodies, prompting: Prompting, out: BinaryIO) -> _Missing:
    from batchsvc.files.table_reader import values_of

    id_column, url = prompting.id_column, prompting.url or ENDPOINT
    needed = list(dict.fromkeys([*chosen.columns, *([id_column] if id_column else [])]))
    _check_columns(needed, table.schema.names)
    missing, written = _Missing(), 0
    for batch in table.batches():
        values = {name: values_of(batch.columns.column(name)) for name in needed}
        for index, line in enumerate(batch.lines):
            out.write(b"\n" * (line - written - 1))  # blank lines stay, so that numbers of lines do
            written = line
            texts: dict[str, str | None] = {}
            for name in needed:
                try:
                    texts[name] = text_of(values[name][index])
                except NoTextError:
                    texts[name] = None
            absent = next((name for name in needed if texts[name] is None), None)
            request: dict[str, Any] = {"custom_id": texts[id_column] if id_column else f"row-{line}"}
            request |= {"method": "POST", "url": url}
            if absent is None:
                request["body"] = made.asking(chosen.fill([texts[name] or "" for name in chosen.columns]))
            else:
                missing.note(line, absent)
            out.write(orjson.dumps(request) + b"\n")
    return missing


def _check_columns(needed: list[str], there: list[str]) -> None:
    for name in needed:
        if name not in there:
            more = ", ..." if len(there) > _SHOWN_COLUMNS else ""
            raise CommandError(
                f"The table has no column {name!r}; it has {', '.join(there[:_SHOWN_COLUMNS])}{more}. "
                "In the template, write {{ and }} for braces of the text.",
                Exit.USAGE,
            )


def _tell(missing: _Missing, console: Console, *, skip_invalid: bool) -> None:
    if not missing.rows:
        return
    says = ", ".join(missing.shown) + (", ..." if missing.rows > len(missing.shown) else "")
    if not skip_invalid:
        raise CommandError(
            f"{missing.rows:,} rows have no value to ask about ({says}): "
            "fill them in, or add --skip-invalid to turn each into an error line.",
            Exit.REFUSED,
        )
    console.say(f"{missing.rows:,} rows have no value to ask about and become error lines: {says}.")
