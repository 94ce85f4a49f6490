"""Puts fault proxies in front of a cluster's services: where a URL leads, and the URL that leads there by a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit, urlunsplit

from tests.faults.cluster import Cluster
from tests.faults.proxy import FaultProxy, Target
from tests.faults.s3_proxy import S3Proxy, in_front_of_s3

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


@contextmanager
def s3_proxied(cluster: Cluster, seed: int = 0) -> Iterator[S3Proxy]:
    """From now on, processes that start reach S3 by this proxy; the test itself reaches it directly."""
    with in_front_of_s3(cluster.services.s3_endpoint, seed) as proxy:
        cluster.env["AWS_ENDPOINT_URL_S3"] = through(cluster.services.s3_endpoint, proxy)
        yield proxy
        proxy.heal()


@contextmanager
def database_proxied(cluster: Cluster) -> Iterator[FaultProxy]:
    """The same for PostgreSQL."""
    url = cluster.services.database_url
    with FaultProxy(postgres_target(url)) as proxy:
        cluster.env["DATABASE_URL"] = through(url, proxy)
        yield proxy
        proxy.heal()


@contextmanager
def redis_proxied(cluster: Cluster) -> Iterator[FaultProxy]:
    """The same for Redis."""
    url = cluster.services.redis_url
    with FaultProxy(tcp_target(url)) as proxy:
        cluster.env["REDIS_URL"] = through(url, proxy)
        yield proxy
        proxy.heal()
