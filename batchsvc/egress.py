"""Where an address that a tenant names may lead: the rules against requests into our own network (SSRF). Pure.

A URL is judged by its form; then every address that its host has is judged, because one public address among private
ones is how a guard is passed by. Whoever connects uses the addresses that were judged and never asks for the name
again (outbound.py), so that a name which changes its mind leads nowhere.

`BATCHSVC_EGRESS_ALLOW` permits private receivers, other ports and plain http; services of clouds that hand out
credentials (the metadata addresses) are refused even then. IPv6 addresses that carry an IPv4 address are judged by
both.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from batchsvc.errors import InvalidRequestError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Lookup = Callable[[str, int], Sequence[str]]

_MAX_URL_CHARS, _MAX_HOST_CHARS = 2048, 253
_PORTS = {"https": 443, "http": 80}
_PUBLIC_PORTS = (443, 8443)
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)

# written out: what Python's `is_global` knows differs by its version, and it takes NAT64, 6to4 and multicast for global
_NEVER: tuple[Network, ...] = tuple(
    map(
        ip_network,
        (
            "169.254.0.0/16",  # link-local: metadata of nearly every cloud, credentials of containers
            "100.100.100.200",  # Alibaba
            "168.63.129.16",  # Azure
            "192.0.0.192",  # Oracle
            "fd00:ec2::/32",  # AWS
            "fd20:ce::/32",  # Google
            "fe80::/10",
        ),
    )
)
_SPECIAL_V4: tuple[Network, ...] = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_SPECIAL_V6: tuple[Network, ...] = tuple(
    map(ip_network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))  # Teredo, documentation, 6to4
)
_NAT64, _LOCAL_NAT64 = IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48")
_COMPATIBLE = IPv6Network("::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)


class EgressError(InvalidRequestError):
    """An address that a tenant named is one that we don't send to; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """A URL in the parts that a request needs, so that nobody reads it a second time and understands it otherwise."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """What the header Host says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Egress:
    """The rules of a deployment. `networks` and `hosts` are what its operator permits beyond public addresses."""

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Egress:
        """From a list of networks, addresses and host names with commas between. Raises ValueError for another item."""
        networks: list[Network] = []
        hosts: set[str] = set()
        for item in filter(None, (part.strip().lower() for part in text.split(","))):
            try:
                networks.append(ip_network(item))
            except ValueError as error:
                if "/" in item or not _HOST.fullmatch(item) or _is_number(item):
                    raise ValueError(f"{item} is neither a network such as 10.1.0.0/16 nor a host name") from error
                hosts.add(item)
        return cls(tuple(networks), frozenset(hosts))

    def place(self, url: str, param: str = "url") -> Place:
        """The parts of a URL whose form is acceptable. Raises EgressError; asks no name server."""

        def refuse(says: str) -> EgressError:
            return EgressError(f"{param}: {says}", code="invalid_url", param=param)

        if len(url) > _MAX_URL_CHARS or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise refuse(f"a URL is at most {_MAX_URL_CHARS} visible ASCII characters, without a backslash.")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").removesuffix("."), parts.port
        except ValueError as error:
            raise refuse("this is not a URL.") from error
        if parts.scheme not in _PORTS or not parts.netloc:
            raise refuse("a URL begins with https://.")
        if "@" in parts.netloc:
            raise refuse("a URL with a user name or password is not accepted.")
        if parts.fragment or "#" in url:
            raise refuse("a URL with a fragment (#...) is not accepted.")
        if "[" in parts.netloc:
            is_host = isinstance(_literal(host), IPv6Address) and "%" not in host
        else:
            is_host = _HOST.fullmatch(host) is not None and len(host) <= _MAX_HOST_CHARS
        if not is_host:
            raise refuse("its host is not a name or an address; write international names as punycode (xn--...).")
        place = Place(
            parts.scheme,
            host,
            _PORTS[parts.scheme] if port is None else port,
            (parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
        )
        # by address they may be permitted yet: `addresses` sees to it
        is_open = bool(self.networks) or host in self.hosts
        if place.scheme == "http" and not is_open:
            raise refuse("a URL begins with https://: plain http is refused.")
        if place.port not in _PUBLIC_PORTS and not is_open:
            raise refuse(f"port {place.port} is refused: use {' or '.join(map(str, _PUBLIC_PORTS))}.")
        return place

    def addresses(self, place: Place, lookup: Lookup | None = None, param: str = "url") -> list[Address]:
        """The addresses of a place, all of them judged, to connect to in this order. Raises EgressError.

        A name that doesn't exist is refused like a private one, so that nobody learns the names of our network.
        """
        try:
            found = list(dict.fromkeys(ip_address(text) for text in (lookup or _look_up)(place.host, place.port)))
        except (OSError, ValueError):
            found = []
        is_plain = place.scheme == "http" or place.port not in _PUBLIC_PORTS
        if not found or not all(self.permits(place.host, one, only_named=is_plain) for one in found):
            raise EgressError(
                f"{param}: {place.host} has no public address that may be sent to by "
                f"{place.scheme} on port {place.port}.",
                code="address_refused",
                param=param,
            )
        return found

    def permits(self, host: str, address: Address, *, only_named: bool = False) -> bool:
        """Whether a host's address may be connected to; `only_named`: only if the operator named host or network."""
        faces = faces_of(address)
        if any(_within(face, _NEVER) for face in faces):
            return False
        if host in self.hosts:
            return True
        return all(_within(face, self.networks) or (is_public(face) and not only_named) for face in faces)


def is_public(address: Address) -> bool:
    """Whether anybody may be reached at an address as far as its own number says: not private, not reserved."""
    if isinstance(address, IPv4Address):
        return not _within(address, _SPECIAL_V4) and not _within(address, _NEVER)
    if address in _NAT64:
        return True  # it is what the IPv4 address in it is
    return address in _GLOBAL_V6 and not _within(address, _SPECIAL_V6)


def faces_of(address: Address) -> list[Address]:
    """An address and the IPv4 addresses that are written in it, at which its packets may arrive in the end."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    number = int(address)
    low = IPv4Address(number & 0xFFFFFFFF)
    faces: list[Address] = [address]
    if address in _NAT64 or address in _LOCAL_NAT64 or (address in _COMPATIBLE and number > 1):
        faces.append(low)
    if address.sixtofour is not None:
        faces.append(address.sixtofour)
    if address.teredo is not None:
        faces += address.teredo
    if (number >> 32) & 0xFFFFFFFF in _ISATAP:
        faces.append(low)
    return faces


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks if network.version == address.version)


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_number(host: str) -> bool:
    """Whether a resolver may read it as an address: 127.1, 0x7f.1 and 2130706433 are 127.0.0.1."""
    last = host.rsplit(".", 1)[-1]
    return last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last) is not None


def _look_up(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
