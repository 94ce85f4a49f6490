"""Sends to an address that a tenant named: to the addresses that were judged, within a time, following nothing.

The name is resolved once, and what was judged is what is connected to; TLS and the Host header still have the name.
No proxy of the environment, no redirect, no cookie; of the answer only its status is looked at.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpcore
import httpx

from batchsvc.clock import monotonic_s
from batchsvc.egress import Address, Egress, EgressError, Lookup

_MAX_REASON_CHARS = 200


class OutboundError(Exception):
    """Nobody answered; the message says in a few words why."""


class Outbound:
    """Posts under the rules of a deployment. `timeout_s` is for all of a request, however slowly it is answered."""

    def __init__(self, egress: Egress, timeout_s: float, lookup: Lookup | None = None) -> None:
        self._egress = egress
        self._timeout_s = timeout_s
        self._lookup = lookup
        self._tls = httpx.create_ssl_context()  # the roots of certifi, or SSL_CERT_FILE

    def post(self, url: str, headers: Mapping[str, str], body: bytes) -> int:
        """The status that the receiver answered. Raises OutboundError; never EgressError."""
        deadline = _Deadline(self._timeout_s)
        try:
            place = self._egress.place(url)
            addresses = self._egress.addresses(place, self._lookup)
        except EgressError as error:
            raise OutboundError(error.message) from error
        where = httpcore.URL(scheme=place.scheme, host=place.host, port=place.port, target=place.target)
        backend = _JudgedAddresses(addresses, deadline)
        given = [("Host", place.authority), *headers.items()]
        try:
            with (
                httpcore.ConnectionPool(ssl_context=self._tls, network_backend=backend, max_connections=1) as pool,
                pool.stream(
                    "POST", where, headers=given, content=body, extensions=_timeouts(self._timeout_s)
                ) as answer,
            ):
                return answer.status
        except httpcore.TimeoutException as error:
            raise OutboundError(f"no answer within {self._timeout_s:g} s") from error
        except httpcore.ProtocolError as error:  # whose words may quote what was answered, which isn't for tenants
            raise OutboundError("the connection failed: no valid HTTP answer came") from error
        except (httpcore.NetworkError, OSError, ValueError) as error:
            reason = str(error)[:_MAX_REASON_CHARS] or type(error).__name__
            raise OutboundError(f"the connection failed: {reason}") from error


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._end_s = monotonic_s() + seconds

    def left_s(self) -> float:
        left = self._end_s - monotonic_s()
        if left <= 0:
            raise httpcore.ReadTimeout
        return left


class _JudgedAddresses(httpcore.NetworkBackend):
    """Connects to these addresses, whatever the host is called."""

    def __init__(self, addresses: Sequence[Address], deadline: _Deadline) -> None:
        self._addresses = addresses
        self._deadline = deadline
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        failed: Exception | None = None
        for number, address in enumerate(self._addresses):
            share_s = self._deadline.left_s() / (len(self._addresses) - number)
            try:
                found = self._sockets.connect_tcp(str(address), port, share_s, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
            else:
                return _TimedStream(found, self._deadline)
        raise failed or httpcore.ConnectError("no address")


class _TimedStream(httpcore.NetworkStream):
    """A connection whose every wait ends with the request's time: a receiver that drips holds nobody up."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: _Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left_s())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left_s())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        secured = self._stream.start_tls(ssl_context, server_hostname, self._deadline.left_s())
        return _TimedStream(secured, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _timeouts(seconds: float) -> dict[str, Any]:
    return {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), seconds)}
