"""Puts output and error lines back into input order, by the number that each line carries, in bounded memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from batchsvc.cli.exits import CommandError, Exit

if TYPE_CHECKING:
    from batchsvc.cli.client import Client


def lines_of(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their newline. Only `\\n` ends one: U+2028 and the like are text."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


def in_input_order(output: Iterable[bytes], errors: Iterable[bytes]) -> Iterator[bytes]:
    """Merge two streams of result lines, each in order of `line`. Lines of a server that doesn't number them keep
    their order, the answers first."""
    return (line for _, line in heapq.merge(_numbered(output), _numbered(errors), key=lambda pair: pair[0]))


def write_results(client: Client, batch: dict[str, object], path: Path) -> int:
    """Write all result lines of an ended batch to `path`, by way of `<path>.partial`. Returns how many."""
    partial = partial_of(path)
    count = 0
    try:
        with partial.open("wb") as file:
            for line in results(client, batch):
                file.write(line + b"\n")
                count += 1
        partial.replace(path)
    except OSError as error:
        raise CommandError(f"{path} can't be written: {error.strerror}.", Exit.FAILED) from error
    return count


def results(client: Client, batch: dict[str, object]) -> Iterator[bytes]:
    """All result lines of an ended batch in input order."""
    return in_input_order(_download(client, batch.get("output_file_id")), _download(client, batch.get("error_file_id")))


def partial_of(path: Path) -> Path:
    """Where the results stand until they are whole."""
    return path.with_name(path.name + ".partial")


def _download(client: Client, file_id: object) -> Iterator[bytes]:
    if not file_id:
        return
    with client.content(str(file_id)) as chunks:
        yield from lines_of(chunks)


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    last = 0
    for line in lines:
        if not line.strip():
            continue
        number = orjson.loads(line).get("line")
        last = number if isinstance(number, int) else last
        yield last, line
