"""A bucket of a tenant's: reached with keys of its own, and only at addresses that the rules of egress permit.

Whoever names the server, its name is asked for once a connection, every answer is judged, and the judged address is
the one that is connected to. All requests of a client go through here, so also those that follow an answer which
names another region; no proxy and no setting of the shell (`AWS_ENDPOINT_URL_S3` is our own store's) leads elsewhere.
What a server can't be asked for now is an UnavailableError; what it refuses is a RefusedError, and asking again won't
help. The messages name the object and the server's own code, never a key.
"""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from socket import SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any, cast

import boto3
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
    AWSPreparedRequest,
    AWSRequest,
    AWSResponse,
)
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError, HTTPClientError
from botocore.httpsession import URLLib3Session
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, NewConnectionError
from urllib3.util.connection import create_connection

from batchsvc.clock import monotonic_s
from batchsvc.egress import Egress, EgressError, Lookup
from batchsvc.errors import InvalidRequestError, NotFoundError, ServiceError, UnavailableError
from batchsvc.store.s3 import MISSING, OTHER_VERSION, Bucket, OtherVersionError, code_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_CONNECT_S, _READ_S = 10.0, 15.0  # a part has to be sent within the former
_ATTEMPTS = 2  # whoever copies tries again later, too
_CONNECTIONS = 8
_MAX_ANSWER_BYTES, _ANSWER_S = 1 << 20, 60.0
_TWINS = 4 * _CONNECTIONS  # sockets that are kept to be cut; older ones have long since been given up
_CODE = re.compile(r"[A-Za-z0-9.]{1,64}")  # of a server that may answer anything
_AGAIN = {"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "OperationAborted", "ConditionalRequestConflict"}
_making = threading.Lock()  # a session of boto3 makes one client at a time


class RefusedError(InvalidRequestError):
    """The server knows better: no such bucket, wrong keys, not allowed. Asking again gets the same answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a bucket is reached. `endpoint` None: AWS."""

    bucket: str
    endpoint: str | None
    region: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)


class ForeignBucket(Bucket):
    """One bucket of a tenant. `lookup` answers what a name's addresses are, where it isn't the system that does."""

    def __init__(self, access: Access, egress: Egress, lookup: Lookup | None = None) -> None:
        self._connections = _Connections(egress, lookup)
        super().__init__(access.bucket, _client(access, self._connections))

    def cut(self) -> None:
        """End every connection at once, whoever waits for what comes over it, and make no other."""
        self._connections.cut()

    def close(self) -> None:
        """End the connections."""
        self._client.close()
        self._connections.cut()

    def _failure(self, what: str, error: Exception) -> ServiceError:
        named = f"s3://{self.bucket}/{what}"
        if not isinstance(error, ClientError):
            return UnavailableError(f"The store of {named} doesn't answer.", code="store_unavailable")
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = code_of(error)
        if code in MISSING:
            return NotFoundError(f"There is no object {named}.", code="object_not_found")
        if code in OTHER_VERSION:
            return OtherVersionError(f"{named} was replaced.", code="object_replaced")
        shown = code if _CODE.fullmatch(code) else str(status)
        if 300 <= status < 500 and status not in (408, 409, 429) and code not in _AGAIN:
            return RefusedError(f"The store of {named} refuses this: {shown}.", code="store_refused")
        return UnavailableError(f"The store of {named} can't do this now: {shown}.", code="store_unavailable")


@cache
def _session() -> boto3.session.Session:
    return boto3.session.Session()


def _client(access: Access, connections: _Connections) -> S3Client:
    options: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": _ATTEMPTS},
        "s3": {"addressing_style": "path" if access.endpoint else "auto"},
        "proxies": {},
        "ignore_configured_endpoint_urls": True,
        "use_fips_endpoint": False,
        "use_dualstack_endpoint": False,
        # other makers' servers don't know the checksums that AWS began with in 2025
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    with _making:
        client: S3Client = _session().client(
            "s3",
            endpoint_url=access.endpoint,
            aws_access_key_id=access.access_key,
            aws_secret_access_key=access.secret_key,
            region_name=access.region,
            config=Config(**options),
        )
    endpoint = cast(Any, client)._endpoint
    endpoint.http_session = _JudgedSession(connections, verify=endpoint.http_session._verify)
    return client


class _JudgedSession(URLLib3Session):
    """What a client of boto3 sends its requests with."""

    def __init__(self, connections: _Connections, *, verify: bool) -> None:
        timeout: Any = (_CONNECT_S, _READ_S)
        super().__init__(verify, proxies={}, timeout=timeout, max_pool_connections=_CONNECTIONS)
        self._connections = connections
        cast(Any, self)._manager.pool_classes_by_scheme = _pools(connections)

    def send(self, request: AWSRequest | AWSPreparedRequest) -> AWSResponse:
        """As the base does, but headers come within _ANSWER_S and what is no object has an end; and a refusal of ours
        is none of the network's errors, which are tried again."""
        is_object, request.stream_output = request.stream_output, True
        limit = threading.Timer(_ANSWER_S, self._connections.cut)  # a byte now and then is no time-out to a socket
        limit.daemon = True
        limit.start()
        try:
            answer = super().send(request)
            if self._connections.is_cut:  # half of the headers pass for all of them
                raise ConnectionClosedError(endpoint_url=request.url or "")
            if not is_object or answer.status_code >= 300:
                cast(Any, answer)._content = _bounded(answer.raw)
        except HTTPClientError as error:
            cause = error.kwargs.get("error")
            raise (cause if isinstance(cause, EgressError) else error) from None
        except HTTPError as error:
            raise ConnectionClosedError(endpoint_url=request.url or "") from error
        finally:
            limit.cancel()
        return answer


def _bounded(raw: Any) -> bytes:
    """The body of an answer that is no object: a server could send for ever."""
    data, until_s = bytearray(), monotonic_s() + _ANSWER_S
    while piece := raw.read1(_MAX_ANSWER_BYTES):
        data += piece
        if len(data) > _MAX_ANSWER_BYTES or monotonic_s() > until_s:
            raw.close()
            raise UnavailableError("The store's answer has no end.", code="store_unavailable")
    return bytes(data)


class _Connections:
    """Connects to judged addresses, and can end all that it has made."""

    def __init__(self, egress: Egress, lookup: Lookup | None) -> None:
        self._egress = egress
        self._lookup = lookup
        self._lock = threading.Lock()
        self._made: list[socket] = []  # twins: TLS takes the sockets themselves over
        self.is_cut = False

    def connect(self, connection: HTTPConnection, scheme: str) -> socket:
        """A socket for this connection. Raises EgressError, or what urllib3 expects."""
        host = f"[{connection.host}]" if ":" in connection.host else connection.host
        place = self._egress.place(f"{scheme}://{host}:{connection.port}/", "endpoint")
        failed: OSError | None = None
        for address in self._egress.addresses(place, self._lookup, "endpoint"):
            try:
                made = create_connection(
                    (str(address), place.port), connection.timeout, socket_options=connection.socket_options
                )
            except OSError as error:
                failed = error
                continue
            with self._lock:
                if not self.is_cut:
                    self._made.append(made.dup())
                    if len(self._made) > _TWINS:
                        self._made.pop(0).close()
                    return made
            made.close()
            break
        raise NewConnectionError(connection, f"no connection to {place.host}: {failed}") from failed

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            for one in self._made:
                with suppress(OSError):  # the other side was faster
                    one.shutdown(SHUT_RDWR)
                one.close()
            self._made.clear()


def _pools(connections: _Connections) -> dict[str, type]:
    """Pools by scheme, whose connections are these."""

    class Plain(AWSHTTPConnection):
        def _new_conn(self) -> socket:
            return connections.connect(self, "http")

    class Secure(AWSHTTPSConnection):
        def _new_conn(self) -> socket:
            return connections.connect(self, "https")

    class PlainPool(AWSHTTPConnectionPool):
        ConnectionCls = Plain

    class SecurePool(AWSHTTPSConnectionPool):
        ConnectionCls = Secure

    return {"http": PlainPool, "https": SecurePool}
