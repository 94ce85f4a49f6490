"""The ports of one stack: chosen free, kept in run/ports.json, chosen anew only when another program took them.

Between the choice and the moment when a process listens, another stack that starts at the same time must not choose
the same port. So a stack holds a name for each of its ports as long as it lives.
"""

from __future__ import annotations

import socket
import sys

from batchsvc.errors import UnavailableError
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.services import GRPC_OFFSET, WEED_PORTS, choose_ports, is_free

API_PORT = 8080
_API_TRIES = 200
_LAST = 65_535
_INNER = ("valkey", *WEED_PORTS)


class PortTakenError(UnavailableError):
    """The port that the user named is taken."""


class HeldPorts:
    """Names of ports in Linux's abstract socket namespace, which has the ports' own scope and frees them by itself.

    Elsewhere nothing is held: two stacks that start in the same second may then clash, and one says so.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def take(self, port: int) -> bool:
        """Whether the port is ours now; False when another stack has it."""
        if port in self._sockets or sys.platform != "linux":
            return True
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0batchsvc-port-{port}")
        except OSError:
            name.close()
            return False
        self._sockets[port] = name
        return True

    def release(self) -> None:
        for name in self._sockets.values():
            name.close()
        self._sockets.clear()


def choose(
    directory: DataDir, *, host: str, port: int | None, held: HeldPorts, workers: tuple[str, ...] = ()
) -> dict[str, int]:
    """Ports by name (`api`, `valkey`, SeaweedFS's, and one for each of `workers`), remembered for the next start.

    A remembered port that is taken is replaced. `port` is the user's wish for the API: if that is taken,
    PortTakenError says so.
    """
    found = directory.read_json("ports.json")
    remembered: dict[str, int] = {}
    if isinstance(found, dict):
        remembered = {name: port for name, port in found.items() if isinstance(port, int) and 0 < port <= _LAST}
    api = _api_port(host, port, remembered.get("api"), held)
    kept: dict[str, int] = {}
    used = {api}  # with gRPC twins
    for name in (*_INNER, *workers):
        if (old := remembered.get(name)) is None:
            continue
        own = {old, old + GRPC_OFFSET} if name in WEED_PORTS else {old}
        if max(own) <= _LAST and used.isdisjoint(own) and all(map(is_free, own)) and held.take(old):
            kept[name] = old
            used |= own
    missing = tuple(name for name in (*_INNER, *workers) if name not in kept)
    taken = frozenset({*used, *(port - GRPC_OFFSET for port in used)})  # nor one whose gRPC twin they are
    ports = {"api": api, **kept, **choose_ports(missing, taken=taken, take=held.take)}
    directory.write_json("ports.json", ports)
    return ports


def _api_port(host: str, wish: int | None, remembered: int | None, held: HeldPorts) -> int:
    if wish is not None and wish != 0:
        if not is_free(wish, host) or not held.take(wish):
            raise PortTakenError(f"Port {wish} on {host} is taken: choose another one with --port.")
        return wish
    if wish is None:
        candidates: list[int] = [remembered] if remembered else []
        for port in candidates + list(range(API_PORT, API_PORT + _API_TRIES)):
            if is_free(port, host) and held.take(port):
                return port
    return choose_ports(("api",), take=held.take)["api"]
