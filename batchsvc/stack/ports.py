"""The ports of one stack: chosen free, kept in run/ports.json, chosen anew only when another program took them."""

from __future__ import annotations

from batchsvc.errors import UnavailableError
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.services import GRPC_OFFSET, WEED_PORTS, choose_ports, is_free

API_PORT = 8080
_API_TRIES = 200
_INNER = ("valkey", *WEED_PORTS)


class PortTakenError(UnavailableError):
    """The port that the user named is taken."""


def choose(directory: DataDir, *, host: str, port: int | None) -> dict[str, int]:
    """Ports by name (`api`, `valkey` and SeaweedFS's), remembered for the next start.

    A remembered port that is taken is replaced. `port` is the user's wish for the API: if that is taken,
    PortTakenError says so.
    """
    found = directory.read_json("ports.json")
    remembered: dict[str, int] = {}
    if isinstance(found, dict):
        remembered = {name: port for name, port in found.items() if isinstance(port, int)}
    kept = {name: remembered[name] for name in _INNER if name in remembered and _is_usable(name, remembered[name])}
    api = _api_port(host, port, remembered.get("api"), avoid=frozenset(kept.values()))
    missing = tuple(name for name in _INNER if name not in kept)
    taken = frozenset({api, api - GRPC_OFFSET, *kept.values()})
    ports = {"api": api, **kept, **choose_ports(missing, taken=taken)}
    directory.write_json("ports.json", ports)
    return ports


def _api_port(host: str, wish: int | None, remembered: int | None, *, avoid: frozenset[int]) -> int:
    if wish is not None and wish != 0:
        if not is_free(wish, host):
            raise PortTakenError(f"Port {wish} on {host} is taken: choose another one with --port.")
        return wish
    if wish == 0:
        return choose_ports(("api",), taken=avoid)["api"]
    candidates: list[int] = [remembered] if remembered else []
    for port in candidates + list(range(API_PORT, API_PORT + _API_TRIES)):
        if port not in avoid and is_free(port, host):
            return port
    return choose_ports(("api",), taken=avoid)["api"]


def _is_usable(name: str, port: int) -> bool:
    return is_free(port) and (name == "valkey" or is_free(port + GRPC_OFFSET))
