"""Buckets and prefixes that an operator registers for a project, each with keys of its own; nothing else is reached.

The service's own bucket is refused by its name, at the registration and whenever a store is used, so that another
address of our own server, or a bucket that became ours later, isn't a way in. Of the stores that cover an object the
one with the longest prefix is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network

from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.db.session import database_now_ms
from batchsvc.egress import Egress
from batchsvc.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, UnavailableError
from batchsvc.files import s3_uri, store_queries
from batchsvc.files.s3_uri import S3Uri
from batchsvc.files.store_schemas import RegisterStore
from batchsvc.files.tables import TenantStore
from batchsvc.sealing import Seals
from batchsvc.settings import Settings
from batchsvc.store.foreign import Access, ForeignBucket

_ANYWHERE = Egress((IPv4Network("0.0.0.0/0"), IPv6Network("::/0")))


@dataclass(frozen=True, slots=True)
class OwnStore:
    """The service's own bucket, the key that reaches it, and what seals secrets."""

    bucket: str
    access_key: str | None
    seals: Seals

    @classmethod
    def of(cls, settings: Settings) -> OwnStore:
        return cls(settings.bucket, settings.s3_access_key, Seals.of(settings.secret_key))


def check_endpoint(endpoint: str | None, egress: Egress) -> None:
    """Raises InvalidRequestError for a server that would be refused. Asks a name server: never inside a transaction."""
    if endpoint is not None:
        egress.addresses(egress.place(endpoint, "endpoint"), None, "endpoint")


def register(session: Session, body: RegisterStore, own: OwnStore) -> TenantStore:
    """Let a project reach a prefix. What is registered for it already gets these keys, this server and this region.

    Where the server may be, is judged whenever it is reached.
    """
    uri = s3_uri.parse_prefix(body.uri, "uri")
    if body.endpoint is not None and _ANYWHERE.place(body.endpoint, "endpoint").target != "/":
        raise InvalidRequestError(  # it would stand before the bucket, and make another bucket of it
            "endpoint: it is the address of a server, without a path.", code="invalid_url", param="endpoint"
        )
    if uri.bucket == own.bucket:
        raise PermissionDeniedError(
            f"uri: {uri.bucket} is the bucket of this service itself, which no project may reach.",
            code="own_bucket",
            param="uri",
        )
    if body.access_key == own.access_key:
        raise InvalidRequestError(
            "access_key: this is the service's own key; make one for this project that reaches only its prefix.",
            code="invalid_value",
            param="access_key",
        )
    project = accounts.existing_project(session, body.project)
    accounts.locked_project(session, project.id)  # two registrations of one prefix come one after the other
    now = database_now_ms(session)
    row = store_queries.store(session, project.id, uri.bucket, uri.key)
    if row is None:
        row = TenantStore(
            id=ids.store_id(), project_id=project.id, bucket=uri.bucket, prefix=uri.key, created_ms=now, updated_ms=now
        )
        session.add(row)
    row.endpoint, row.region, row.updated_ms = body.endpoint, body.region, now
    row.access_key, row.secret_key = body.access_key, ""
    row.sealed_secret = own.seals.seal(body.secret_key.get_secret_value(), _purpose(row))
    session.flush()
    return row


def list_stores(session: Session) -> list[TenantStore]:
    """All stores of all projects."""
    return store_queries.stores(session)


def remove(session: Session, store_id: str) -> None:
    """Forget a store and its keys. Batches that still need it are told that it isn't registered."""
    if not store_queries.remove(session, store_id):
        raise NotFoundError(f"There is no store {store_id}.", param="store_id")


def access(session: Session, project_id: str, uri: S3Uri, settings: Settings, param: str) -> Access:
    """How a project reaches an object or a prefix. Raises PermissionDeniedError where it may not; nothing is sent."""
    covering = [
        row
        for row in store_queries.of_bucket(session, project_id, uri.bucket)
        if S3Uri(row.bucket, row.prefix).covers(uri) and uri.bucket != settings.bucket
    ]
    if not covering:
        raise PermissionDeniedError(
            f"{param}: {uri} isn't registered for this project: ask the operator, who registers stores with "
            "`batchsvc admin stores add`.",
            code="store_not_registered",
            param=param,
        )
    row = max(covering, key=lambda one: len(one.prefix))
    secret_key = row.secret_key
    if row.sealed_secret is not None:
        secret_key = Seals.of(settings.secret_key).opened(row.sealed_secret, _purpose(row))
    return Access(
        bucket=row.bucket,
        endpoint=row.endpoint,
        region=row.region,
        access_key=row.access_key,
        secret_key=secret_key,
    )


def num_sealed_shut(session: Session, seals: Seals) -> int:
    """How many stores have secrets that none of these keys opens."""
    num = 0
    for row in store_queries.stores(session):
        if row.sealed_secret is not None:
            try:
                seals.opened(row.sealed_secret, _purpose(row))
            except UnavailableError:
                num += 1
    return num


def _purpose(row: TenantStore) -> str:
    return f"the store {row.id}"


def opened(found: Access, settings: Settings) -> ForeignBucket:
    """The bucket, ready to be asked. Close it in the end."""
    return ForeignBucket(found, Egress.parse(settings.egress_allow))
