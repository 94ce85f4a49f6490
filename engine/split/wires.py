"""Addresses of prefill engines, and the transport that each kind of address means.

    shm:///run/prefill.sock      shared memory, for processes of one host
    gloo://10.0.0.5:4100         torch.distributed between CPU processes
    nccl://10.0.0.5:4100         torch.distributed between GPUs
    nixl://10.0.0.5:4100         NVIDIA's NIXL, where it is installed

A host and port that other hosts can reach need a key, by which the sides know each other (signed.py). Nothing is
encrypted, so it is for a network that only they can read. A path in the file system is open to its owner alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from engine.errors import PeerError
from engine.split import shared
from engine.split.link import SILENCE_S, Wire
from engine.split.signed import NO_KEY, SAME_KEY, SplitKey

_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
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


def check_reach(text: str, key: SplitKey) -> None:
    """Raises PeerError for an address that other hosts can reach, where there is no key."""
    address = parse(text)
    if address.kind == "shm" or key.is_set:
        return
    with contextlib.suppress(OSError):  # whoever listens or connects there is told that nobody knows the host
        if not all(ip.is_loopback for ip in _found(address)):
            raise PeerError(
                f"{text} is beyond this host, where anybody would be taken for a side of the split: {SAME_KEY}, as "
                "`openssl rand -hex 32` makes one, or use 127.0.0.1 or shm:///PATH."
            )


def listen(text: str, *, key: SplitKey = NO_KEY, silence_s: float = SILENCE_S) -> Listener:
    """Raises PeerError when the address is none, is taken, needs a key, or its library is missing."""
    address = parse(text)
    if address.kind == "shm":
        return shared.SharedListener(address.path, silence_s=silence_s)
    if _is_everywhere(address):
        raise PeerError(f"{text} is no address that others could connect to: name this host's own.")
    check_reach(text, key)
    if address.kind == "nixl":
        from engine.split import nixl_wire

        return nixl_wire.NixlListener(address.host, address.port, silence_s=silence_s)
    from engine.split import groups

    return groups.GroupListener(address.kind, address.host, address.port, silence_s=silence_s)


def connect(text: str, *, key: SplitKey = NO_KEY, silence_s: float = SILENCE_S) -> Wire:
    """Raises PeerError when nobody listens there, it needs a key, or the library is missing."""
    address = parse(text)
    check_reach(text, key)
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
        return any(ip.is_unspecified for ip in _found(address))
    except OSError as error:
        raise PeerError(f"Can't listen at {address.kind}://{address.host}:{address.port}: {error.strerror}.") from error


def _found(address: Address) -> list[_Ip]:
    """What a host's name means. Raises OSError where nobody knows it."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return [_plain(ipaddress.ip_address(str(where[0]).partition("%")[0])) for *_, where in found]


def _plain(ip: _Ip) -> _Ip:
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip
