"""A TCP proxy that misbehaves on demand, to stand in front of Redis, PostgreSQL or S3 in fault tests.

A process under test gets the proxy's address instead of the server's; the test then changes the weather while both
run. Per direction (`up`: client to server, `down`: server to client): latency, bandwidth, a cut after so many bytes.
For the whole proxy: refuse (connecting fails at once) and black hole (everything is swallowed, nothing is closed, no
reset ever comes; what was swallowed flows on when the hole is healed, as TCP would retransmit it). `Tripwire` looks at
what passes and may cut the connection: that is how the answer to a COMMIT gets lost. `heal()` undoes everything.

It understands no protocol; tests/faults/s3_proxy.py does HTTP.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

Direction = Literal["up", "down"]
Target = tuple[str, int] | str  # host and port, or the path of a unix socket

_CHUNK = 64 * 1024
_SLICES_PER_S = 20  # how smoothly a limited bandwidth flows
_POLL_S = 0.1
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How one direction of every connection behaves. The cut counts the bytes of each connection from its start."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    cut_after_bytes: int | None = None
    is_reset: bool = False  # the cut is a reset instead of an orderly end


@dataclass(slots=True, eq=False)
class Connection:
    """One client, and the server that it is joined to."""

    client: socket.socket
    server: socket.socket
    is_cut: bool = False
    is_answer_lost: bool = False  # whatever the server says from now on is swallowed, then the connection ends

    def cut(self, *, reset: bool = False) -> None:
        """End the connection on both sides; the threads that read it notice and close the sockets."""
        self.is_cut = True
        for side in (self.client, self.server):
            with contextlib.suppress(OSError):
                if reset:
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                side.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)


class FaultProxy:
    """Listens on a loopback port of its own and joins each client with `target`. Start it with `with`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.links: dict[Direction, Link] = {"up": Link(), "down": Link()}
        self.tripwire: Callable[[Connection, Direction, bytes], None] | None = None
        self.num_accepted = 0
        self._changed = threading.Condition()
        self._is_hole = False
        self._is_refusing = False
        self._is_closed = False
        self._connections: set[Connection] = set()
        self._listener: socket.socket | None = self._listen(0)
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name=f"proxy-{self.port}", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._stop_listening()
        self.cut_all()

    # ---- the weather

    def set(self, direction: Direction, link: Link) -> None:
        """Change one direction, also of the connections that are open."""
        self.links[direction] = link

    def refuse(self) -> None:
        """From now on connecting fails at once, and open connections are reset."""
        with self._changed:
            self._is_refusing = True
        self._stop_listening()
        self.cut_all(reset=True)

    def black_hole(self) -> None:
        """From now on nothing passes, and nobody is told."""
        with self._changed:
            self._is_hole = True

    def cut_all(self, *, reset: bool = False) -> None:
        """End all open connections once."""
        with self._changed:
            connections = list(self._connections)
        for connection in connections:
            connection.cut(reset=reset)

    def heal(self) -> None:
        """Good weather again."""
        self.tripwire = None
        self.links = {"up": Link(), "down": Link()}
        with self._changed:
            self._is_hole = False
            if self._is_refusing:
                self._is_refusing = False
                self._listener = self._listen(self.port)
            self._changed.notify_all()

    @property
    def num_open(self) -> int:
        with self._changed:
            return len(self._connections)

    # ---- the connections

    def _listen(self, port: int) -> socket.socket:
        return socket.create_server(("127.0.0.1", port), backlog=256)

    def _stop_listening(self) -> None:
        with self._changed:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which a mere close doesn't
            listener.close()

    def _accept(self) -> None:
        while True:
            with self._changed:
                while self._listener is None and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                listener = self._listener
            try:
                client, _ = listener.accept() if listener else (None, None)
            except OSError:
                time.sleep(0.005)  # it was closed just now, to refuse or to end
                continue
            if client is not None:
                self.num_accepted += 1
                threading.Thread(target=self._begin, args=(client,), daemon=True).start()

    def _begin(self, client: socket.socket) -> None:
        self.wait_for_passage()
        try:
            server = _connect(self.target)
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            client.close()
            return
        for side in (client, server):
            if side.family != socket.AF_UNIX:
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(client, server)
        with self._changed:
            self._connections.add(connection)
        try:
            if self._is_closed or self._is_refusing:
                connection.cut(reset=True)
            self.serve(connection)
        finally:
            with self._changed:
                self._connections.discard(connection)
            client.close()
            server.close()

    def serve(self, connection: Connection) -> None:
        """Carry a connection until both directions are over."""
        down = threading.Thread(target=self._carry, args=(connection, "down"), daemon=True)
        down.start()
        self._carry(connection, "up")
        down.join()

    def _carry(self, connection: Connection, direction: Direction) -> None:
        source, sink = connection.client, connection.server
        if direction == "down":
            source, sink = sink, source
        passed = 0
        try:
            while data := source.recv(_CHUNK):
                if direction == "down" and connection.is_answer_lost:
                    connection.cut()
                    return
                if self.tripwire is not None:
                    self.tripwire(connection, direction, data)
                passed += self.send(connection, direction, sink, data, passed)
                if connection.is_cut:
                    return
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            connection.cut()

    def send(self, connection: Connection, direction: Direction, sink: socket.socket, data: bytes, passed: int) -> int:
        """Send as the weather allows; returns how many bytes went. `passed`: what this direction had sent before."""
        link = self.links[direction]
        if link.latency_s:
            time.sleep(link.latency_s)
        sent = 0
        while sent < len(data) and not connection.is_cut:
            self.wait_for_passage()
            link = self.links[direction]  # the weather may have changed meanwhile
            step = len(data) - sent
            if link.bytes_per_s is not None:
                step = max(1, min(step, int(link.bytes_per_s / _SLICES_PER_S)))
            if link.cut_after_bytes is not None:
                step = min(step, max(0, link.cut_after_bytes - passed - sent))
            sink.sendall(data[sent : sent + step])
            sent += step
            if link.cut_after_bytes is not None and passed + sent >= link.cut_after_bytes:
                connection.cut(reset=link.is_reset)
            elif link.bytes_per_s is not None:
                time.sleep(step / link.bytes_per_s)
        return sent

    def wait_for_passage(self) -> None:
        """Wait while the proxy is a black hole."""
        with self._changed:
            while self._is_hole and not self._is_closed:
                self._changed.wait(_POLL_S)


class Tripwire:
    """Loses the server's answer to a message that contains `pattern`, on the passes that `is_hit` chooses.

    The message itself arrives: the server has done what it was told, and the client will never know.
    """

    def __init__(self, pattern: bytes, is_hit: Callable[[int], bool]) -> None:
        self._pattern = pattern
        self._is_hit = is_hit
        self._lock = threading.Lock()
        self._passes = 0
        self.num_lost = 0

    def __call__(self, connection: Connection, direction: Direction, data: bytes) -> None:
        if direction == "down" or self._pattern not in data:
            return
        with self._lock:
            self._passes += 1
            if not self._is_hit(self._passes):
                return
            self.num_lost += 1
        connection.is_answer_lost = True


# libpq sends a commit as a simple query of its own: type, length (4 + 7), text, zero
POSTGRES_COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"


@contextlib.contextmanager
def in_front_of(target: Target) -> Iterator[FaultProxy]:
    """A running proxy before `target`."""
    with FaultProxy(target) as proxy:
        yield proxy


def _connect(target: Target) -> socket.socket:
    if isinstance(target, tuple):
        return socket.create_connection(target, timeout=None)
    server = socket.socket(socket.AF_UNIX)
    server.connect(target)
    return server
