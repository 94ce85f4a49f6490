"""URLs and proxies: where a URL's server listens, and the URL that leads there through a proxy."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit, urlunsplit

from tests.faults.proxy import FaultProxy, Target

_POSTGRES_PORT = 5432


def tcp_target(url: str) -> Target:
    """The server of redis://host:port or http://host:port."""
    parts = urlsplit(url)
    assert parts.hostname and parts.port, f"{url} names no port"
    return parts.hostname, parts.port


def postgres_target(url: str) -> Target:
    """The server of a postgresql:// URL; the one of the tests listens on a unix socket."""
    parts = urlsplit(url)
    directory = parse_qs(parts.query).get("host", [""])[0]
    if directory:
        return f"{directory}/.s.PGSQL.{parts.port or _POSTGRES_PORT}"
    return parts.hostname or "127.0.0.1", parts.port or _POSTGRES_PORT


def through(url: str, proxy: FaultProxy) -> str:
    """The same URL, by way of the proxy."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    query = "&".join(item for item in parts.query.split("&") if item and not item.startswith("host="))
    return urlunsplit(parts._replace(netloc=f"{user}{at}127.0.0.1:{proxy.port}", query=query))
