"""The fault proxy for S3: the same weather, and HTTP answers that a store gives on its bad days.

A `Rule` picks requests (method, a pattern over path and query, a probability, at most so many times) and says what
becomes of them. The generator of random numbers is the test's, so a run with the same seed draws the same way.

    answer      the store isn't asked; an S3 error comes back: 503 SlowDown, 409 ConditionalRequestConflict, 507 ...
    late_error  the request goes through, and then an error comes back: a write that "failed" and is there
    lost_reply  the request goes through, and the connection ends without a word
    truncate    the answer's body stops in the middle and the connection ends
    corrupt     one bit of the answer's body is flipped
"""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

from tests.faults.proxy import Connection, Direction, FaultProxy, Target

Effect = Literal["answer", "late_error", "lost_reply", "truncate", "corrupt"]

_REASONS = {200: "OK", 409: "Conflict", 500: "Internal Server Error", 503: "Slow Down", 507: "Insufficient Storage"}


@dataclass(kw_only=True)
class Rule:
    """Which requests, and what becomes of them. `num_hits` counts."""

    effect: Effect
    methods: str = "GET PUT POST HEAD DELETE"
    pattern: str = ""  # searched for in the path with its query
    probability: float = 1.0
    times: int | None = None
    status: int = 503
    code: str = "SlowDown"
    num_hits: int = field(default=0)


@dataclass(frozen=True, slots=True)
class _Message:
    """A request or an answer: its first line, its headers as they came, and its body."""

    first: bytes
    headers: list[bytes]
    body: bytes

    def header(self, name: str) -> str:
        wanted = name.lower().encode() + b":"
        return next(
            (line[len(wanted) :].strip().decode() for line in self.headers if line.lower().startswith(wanted)), ""
        )

    def encoded(self) -> bytes:
        return b"\r\n".join([self.first, *self.headers, b"", self.body])


class S3Proxy(FaultProxy):
    """A fault proxy that reads HTTP/1.1. `rules` may be changed at any time; the first that fits wins."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        super().__init__(target)
        self.rules: list[Rule] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def heal(self) -> None:
        self.rules = []
        super().heal()

    def serve(self, connection: Connection) -> None:
        client, server = connection.client.makefile("rb"), connection.server.makefile("rb")
        passed: dict[Direction, int] = {"up": 0, "down": 0}
        try:
            while not connection.is_cut and (request := _read_message(client, client=connection.client)) is not None:
                answer = self._answer(connection, server, request, passed)
                if answer is None:
                    connection.cut()
                    return
                passed["down"] += self.send(connection, "down", connection.client, answer, passed["down"])
        except (OSError, ValueError, EOFError, IndexError):
            pass  # either side ended in the middle of a message
        finally:
            connection.cut()

    def _answer(
        self, connection: Connection, server: BinaryIO, request: _Message, passed: dict[Direction, int]
    ) -> bytes | None:
        """The bytes of the answer; None: end the connection."""
        method, target = request.first.decode("latin-1").split(" ")[:2]
        rule = self.pick(method, target)
        if rule is not None and rule.effect == "answer":
            return _error(rule)
        passed["up"] += self.send(connection, "up", connection.server, request.encoded(), passed["up"])
        answer = _read_message(server, answers=method)
        if answer is None:
            return None
        if rule is None:
            return answer.encoded()
        if rule.effect == "late_error":
            return _error(rule)
        if rule.effect == "corrupt" and answer.body:
            middle = len(answer.body) // 2
            body = answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
            return _Message(answer.first, answer.headers, body).encoded()
        if rule.effect == "truncate" and answer.body:
            whole = answer.encoded()
            self.send(connection, "down", connection.client, whole[: len(whole) - (len(answer.body) + 1) // 2], 0)
        elif rule.effect not in ("lost_reply", "truncate"):
            return answer.encoded()
        return None

    def pick(self, method: str, target: str) -> Rule | None:
        with self._lock:
            for rule in self.rules:
                if method not in rule.methods.split() or not re.search(rule.pattern, target):
                    continue
                if rule.times is not None and rule.num_hits >= rule.times:
                    continue
                if self._random.random() < rule.probability:
                    rule.num_hits += 1
                    return rule
        return None


def _read_message(
    stream: BinaryIO, *, answers: str | None = None, client: socket.socket | None = None
) -> _Message | None:
    """One message; None at the end of the stream. `answers`: the method of the request that this answers.

    `client` is told to go on where it asks before it sends its body; the store is spared the question.
    """
    first = stream.readline().rstrip(b"\r\n")
    if not first:
        return None
    headers = []
    while line := stream.readline().rstrip(b"\r\n"):
        headers.append(line)
    message = _Message(first, headers, b"")
    if answers is not None and first.split(b" ")[1] == b"100":
        return _read_message(stream, answers=answers)
    if message.header("expect").lower() == "100-continue" and client is not None:
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        headers = [line for line in headers if not line.lower().startswith(b"expect:")]
    has_body = answers != "HEAD" and (answers is None or first.split(b" ")[1] not in (b"204", b"304"))
    return _Message(first, headers, _read_body(stream, message) if has_body else b"")


def _read_body(stream: BinaryIO, message: _Message) -> bytes:
    """A body as it came, with its chunk sizes if it has any."""
    if message.header("transfer-encoding").lower() != "chunked":
        return _exactly(stream, int(message.header("content-length") or 0))
    body = b""
    while True:
        line = stream.readline()
        size = int(line.split(b";")[0], 16)
        body += line + _exactly(stream, size + 2)
        if size == 0:
            return body


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other side ended in the middle of a message")
    return data


def _error(rule: Rule) -> bytes:
    """An S3 error as the store itself would write it."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{rule.code}</Code><Message>A fault of the test.</Message><RequestId>1</RequestId></Error>"
    ).encode()
    headers = [b"Content-Type: application/xml", b"Content-Length: %d" % len(body)]
    return _Message(f"HTTP/1.1 {rule.status} {_REASONS[rule.status]}".encode(), headers, body).encoded()


@contextmanager
def in_front_of_s3(endpoint: str, seed: int = 0) -> Iterator[S3Proxy]:
    """A running proxy before an S3 server at http://host:port."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    with S3Proxy((host, int(port)), seed) as proxy:
        yield proxy
