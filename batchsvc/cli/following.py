"""Follows the result lines of a batch as they come, into a file or to standard output, and goes on where it stopped.

Each line carries its cursor, so the file itself says how far it is: a line that was cut off is taken away, and what is
asked for begins behind the last whole one. Nothing is written twice, whatever ends this command.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.follow import ENDED
from batchsvc.cli.merge import lines_of

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

_POLL_S = 1.0
_PATIENCE_S = 60.0  # how long the server may be away
_BLOCK_BYTES = 65_536


def follow_results(
    client: Client,
    console: Console,
    batch_id: str,
    output: Path | None,
    *,
    order: str,
    after: str | None,
    check: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Write lines until the batch has ended and all are there; returns the batch as it is then."""
    with _sink(output) as (file, kept):
        if kept is not None and after is not None:
            raise CommandError(f"{output} says itself how far it is: leave out --after.", Exit.USAGE)
        reader = _Reader(client, batch_id, order, after or kept, file)
        try:
            reader.read_all(check)
        except KeyboardInterrupt:
            raise CommandError(_interrupted(batch_id, output, reader.after), Exit.INTERRUPTED) from None
        if output is not None:
            console.say(f"{reader.count:,} new lines are in {output}.")
    return client.batch(batch_id)


class _Reader:
    def __init__(self, client: Client, batch_id: str, order: str, after: str | None, file: BinaryIO) -> None:
        self.after = after
        self.count = 0
        self._client = client
        self._batch_id = batch_id
        self._order = order
        self._file = file

    def read_all(self, check: Callable[[dict[str, Any]], None]) -> None:
        seen_s = time.monotonic()
        while True:
            before, status = self.count, ""
            try:
                with self._client.results(self._batch_id, after=self.after, order=self._order) as (status, chunks):
                    for line in lines_of(chunks):
                        self._take(line)
                seen_s = time.monotonic()
                if self.count == before:
                    if status in ENDED:
                        return
                    check(self._client.batch(self._batch_id))
            except CommandError as error:  # what was read before it broke off is written, and isn't asked for again
                if error.code != Exit.UNREACHABLE or time.monotonic() - seen_s > _PATIENCE_S:
                    raise
            finally:
                self._file.flush()
            if self.count == before:
                time.sleep(_POLL_S)

    def _take(self, line: bytes) -> None:
        cursor = orjson.loads(line)["cursor"]
        self._file.write(line + b"\n")
        self.after = cursor
        self.count += 1


@contextmanager
def _sink(output: Path | None) -> Iterator[tuple[BinaryIO, str | None]]:
    """Where lines go, and the cursor of the last line that is there already."""
    if output is None:
        yield sys.stdout.buffer, None
        return
    try:
        with output.open("ab+") as file:
            end, line = last_line(file)
            file.truncate(end)
            yield file, _cursor_in(line, output) if line else None
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CommandError(f"{output} can't be written: {error.strerror}.", Exit.FAILED) from error


def last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Where the last whole line of a file ends, and the line."""
    start = size = file.seek(0, os.SEEK_END)
    tail = b""
    while start and tail.count(b"\n") < 2:
        step = min(_BLOCK_BYTES, start)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    whole = tail[: tail.rfind(b"\n") + 1]
    return size - len(tail) + len(whole), whole[:-1].rpartition(b"\n")[2]


def _cursor_in(line: bytes, output: Path) -> str:
    try:
        return str(orjson.loads(line)["cursor"])
    except (ValueError, TypeError, KeyError):
        raise CommandError(
            f"{output} is there, and its lines don't come from --follow: name another file with -o.", Exit.USAGE
        ) from None


def _interrupted(batch_id: str, output: Path | None, after: str | None) -> str:
    if output is not None:
        return f"Stopped: {output} has all lines so far; repeat the command to go on in it. {batch_id} goes on."
    behind = f" --after {after}" if after else ""
    return f"Stopped: `batchsvc results {batch_id} --follow{behind}` goes on behind the last line."
