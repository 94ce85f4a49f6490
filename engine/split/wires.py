"""Addresses of prefill engines, and the transport that each kind of address means.

    shm:///run/prefill.sock      shared memory, for processes of one host
    gloo://10.0.0.5:4100         torch.distributed between CPU processes
    nccl://10.0.0.5:4100         torch.distributed between GPUs
    nixl://10.0.0.5:4100         NVIDIA's NIXL, where it is installed

Nothing is encrypted and nobody proves who they are: whoever reaches a host and port is served as a decode engine. So
these are for a network that the engines alone can reach; a path in the file system is open to its owner alone.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from engine.errors import PeerError
from engine.split import shared
from engine.split.link import SILENCE_S, Wire

KINDS = ("shm", "gloo", "nccl", "nixl")


class Listener(Protocol):
    """Where a prefill engine takes connections. `address` is what decode engines are given."""

    @property
    def address(self) -> str: ...
    def accept(self) -> Wire:
        """Waits for the next connection. Raises PeerError once the listener is closed."""

    def close(self) -> None: ...


class Address(NamedTuple):
    """`path` of a shared memory's socket, or host and port."""

    kind: str
    path: str = ""
    host: str = ""
    port: int = 0


def parse(text: str) -> Address:
    """Raises PeerError in a sentence for what isn't an address."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if parts.scheme == "shm" and parts.path and not parts.netloc:
        return Address("shm", path=parts.path)
    if parts.scheme in KINDS and parts.scheme != "shm" and host and port is not None and not parts.path.strip("/"):
        return Address(parts.scheme, host=host, port=port)
    raise PeerError(f"{text!r} is no address of a prefill engine; it is shm:///PATH, or one of "
                    f"{', '.join(KINDS[1:])} as in gloo://HOST:PORT.")  # fmt: skip


def listen(text: str, *, silence_s: float = SILENCE_S) -> Listener:
    """Raises PeerError when the address is none, is taken, or its library is missing."""
    address = parse(text)
    if address.kind == "shm":
        return shared.SharedListener(address.path, silence_s=silence_s)
    if _is_everywhere(address):
        raise PeerError(f"{text} is no address that others could connect to: name this host's own.")
    if address.kind == "nixl":
        from engine.split import nixl_wire

        return nixl_wire.NixlListener(address.host, address.port, silence_s=silence_s)
    from engine.split import groups

    return groups.GroupListener(address.kind, address.host, address.port, silence_s=silence_s)


def connect(text: str, *, silence_s: float = SILENCE_S) -> Wire:
    """Raises PeerError when nobody listens there, or the library is missing."""
    address = parse(text)
    if address.kind == "shm":
        return shared.connect(address.path, silence_s=silence_s)
    if address.kind == "nixl":
        from engine.split import nixl_wire

        return nixl_wire.connect(address.host, address.port, silence_s=silence_s)
    from engine.split import groups

    return groups.connect(address.kind, address.host, address.port, silence_s=silence_s)


def _is_everywhere(address: Address) -> bool:
    """Whether this host would be found there on every interface, however that is written."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerError(f"Can't listen at {address.kind}://{address.host}:{address.port}: {error.strerror}.") from error
    return any(_is_wildcard(str(where[0]).partition("%")[0]) for *_, where in found)


def _is_wildcard(text: str) -> bool:
    ip = ipaddress.ip_address(text)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_unspecified
