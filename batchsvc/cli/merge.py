"""Puts output and error lines back into input order, by the number that each line carries, in bounded memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def latest(streams: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Join the result lines of a chain of batches, each stream in order of `line` and younger than those before it: of
    every line what the youngest says."""
    numbered = [_aged(stream, age) for age, stream in enumerate(streams)]
    last: tuple[int, int, bytes] | None = None
    for found in heapq.merge(*numbered, key=lambda item: item[:2]):
        if last is not None and found[0] != last[0]:
            yield last[2]
        last = found
    if last is not None:
        yield last[2]


def chain(client: Client, batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The batches whose lines a batch runs again, the first one first, and itself. All of them have ended."""
    found = [batch]
    while parent := found[-1].get("parent_batch_id"):
        found.append(client.batch(parent))
    return found[::-1]


def write_results(client: Client, batch: dict[str, Any], path: Path, lines: Iterator[bytes] | None = None) -> int:
    """Write all result lines of an ended batch, or these, to `path`, by way of `<path>.partial`. Returns how many."""
    partial = partial_of(path)
    count = 0
    try:
        with partial.open("wb") as file:
            for line in lines or results(client, batch):
                file.write(line + b"\n")
                count += 1
        partial.replace(path)
    except OSError as error:
        raise CommandError(f"{path} can't be written: {error.strerror}.", Exit.FAILED) from error
    return count


def results(client: Client, batch: dict[str, Any]) -> Iterator[bytes]:
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


def _aged(lines: Iterable[bytes], age: int) -> Iterator[tuple[int, int, bytes]]:
    return ((number, age, line) for number, line in _numbered(lines))


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    last = 0
    for line in lines:
        if not line.strip():
            continue
        number = orjson.loads(line).get("line")
        last = number if isinstance(number, int) else last
        yield last, line
