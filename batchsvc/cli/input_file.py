"""The input that a command is given: a file that can be read, and what its first request says of the whole; or an
object in S3, which the server reads."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.errors import InvalidRequestError
from batchsvc.files.s3_uri import S3Uri, is_s3, parse_object
from batchsvc.stack.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from batchsvc.cli.target import Target

Source = Path | S3Uri
ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "responses": "/v1/responses",
}
ENDPOINT = ENDPOINTS["chat"]
_FIRST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """The input of a command, under either name."""

    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="Requests, or with --prompt any table: JSONL, Parquet or CSV; plain, gz, zst. "
            "Requests may be in S3, too: s3://bucket/key.",
        ),
    ] = None
    input_file: Annotated[str | None, typer.Option("-i", "--input", metavar="F", help="The same as FILE.")] = None

    def chosen(self) -> Source:
        """The one input that was named, a file if it can be read. Raises CommandError in one sentence."""
        if (self.file is None) == (self.input_file is None):
            raise CommandError("Name one input: FILE or -i FILE.", Exit.USAGE)
        named = str(self.input_file if self.file is None else self.file)
        if is_s3(named):
            try:
                return parse_object(named, "FILE")
            except InvalidRequestError as error:
                raise CommandError(error.message, Exit.USAGE) from error
        source = Path(named)
        check_input(source)
        return source


def check_input(source: Path) -> None:
    """Sees that a file can be read and holds something. Raises CommandError."""
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


def endpoint_of(source: Source, asked: str | None = None) -> str:
    """The endpoint of a file of requests: the one `asked` for, else what its first line names, else that of chats.
    Raises CommandError if the first line contradicts."""
    named = first_request(source).get("url")
    if asked is not None:
        if isinstance(named, str) and named != asked:
            raise CommandError(
                f"--endpoint asks for {asked}, and the first line of {source} for {named}: leave --endpoint out.",
                Exit.USAGE,
            )
        return asked
    return str(named) if named in ENDPOINTS.values() else ENDPOINT


def model_to_serve(target: Target, source: Source) -> str | None:
    """The model that a stack for this file has to serve: what its first line names, if that was registered."""
    if target.directory is None:
        return None
    body = first_request(source).get("body")
    named = body.get("model") if isinstance(body, dict) else None
    if not isinstance(named, str) or named == DEFAULT_MODEL:
        return None
    from batchsvc.stack.prepare import registered_path

    return registered_path(target.directory, named)


def first_request(source: Source) -> dict[str, Any]:
    """The request on the first line; {} of a table, of a line that the planner will refuse, or of an object in S3."""
    if isinstance(source, S3Uri):
        return {}
    with source.open("rb") as file:
        head = file.read(_FIRST_LINE_BYTES)
    try:
        found = orjson.loads(_unpacked(head).lstrip(b"\xef\xbb\xbf \t\r\n").split(b"\n", 1)[0])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _unpacked(head: bytes) -> bytes:
    """The beginning of what a file holds that begins so, as long as `head` may be. Raises ValueError."""
    from batchsvc.files.formats import Packing, packing_of

    match packing_of(head):
        case Packing.GZIP:
            try:
                return zlib.decompressobj(wbits=31).decompress(head, _FIRST_LINE_BYTES)
            except zlib.error as error:
                raise ValueError("no gzip") from error
        case Packing.ZSTD:
            import io

            import zstandard

            try:
                with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(head)) as reader:
                    return reader.read(_FIRST_LINE_BYTES)
            except zstandard.ZstdError as error:
                raise ValueError("no zstd") from error
        case None:
            return head
