"""What can be done with receivers: create, change, list, delete, rotate the secret, test; and what sends to them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.clock import monotonic_s
from batchsvc.db.keyset import Cursor
from batchsvc.db.session import database_now_ms
from batchsvc.egress import Egress
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.http.paging import PageArgs
from batchsvc.outbound import Outbound, OutboundError
from batchsvc.webhooks import delivery_queries, queries, signing
from batchsvc.webhooks.delivery_queries import Outcome, Sending
from batchsvc.webhooks.events import EventType, body_of, sample_data
from batchsvc.webhooks.schemas import CreateEndpoint, UpdateEndpoint
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEndpoint, WebhookEvent

MOST_ENDPOINTS = 50
_KEEP_OLD_MS = 86_400_000
_MOST_OLD = 4
_AGENT = "batchsvc-webhooks/1"


def check_url(url: str, egress: Egress) -> None:
    """Raises EgressError for a receiver that would be refused. Asks a name server: never inside a transaction."""
    egress.addresses(egress.place(url))


def create(session: Session, project_id: str, body: CreateEndpoint) -> WebhookEndpoint:
    """A new receiver, whose URL was checked."""
    types = _known_types(body.event_types)
    _check_name(body.name)
    accounts.locked_project(session, project_id)  # so that the limit holds
    if queries.num_endpoints(session, project_id) >= MOST_ENDPOINTS:
        raise InvalidRequestError(
            f"A project has at most {MOST_ENDPOINTS} webhook endpoints: delete one first.", code="too_many_endpoints"
        )
    now = database_now_ms(session)
    row = WebhookEndpoint(
        id=ids.endpoint_id(),
        project_id=project_id,
        name=body.name,
        url=body.url,
        event_types=types,
        secret=signing.new_secret(),
        old_secrets=[],
        created_ms=now,
        updated_ms=now,
        failures=0,
        open_until_ms=0,
        epoch=0,
        owner=None,
        lease_ms=0,
    )
    session.add(row)
    session.flush()
    return row


def get(session: Session, project_id: str, endpoint_id: str, *, is_locked: bool = False) -> WebhookEndpoint:
    """A receiver of this project. Raises NotFoundError."""
    row = queries.endpoint(session, project_id, endpoint_id, is_locked=is_locked)
    if row is None:
        raise NotFoundError(f"No webhook endpoint found with id '{endpoint_id}'.", param="webhook_endpoint_id")
    return row


def update(session: Session, project_id: str, endpoint_id: str, body: UpdateEndpoint) -> WebhookEndpoint:
    """Change a receiver. Another URL gets a fresh chance: what its breaker knew was about the old one."""
    row = get(session, project_id, endpoint_id, is_locked=True)
    before = (row.name, row.url, row.event_types)
    if body.name is not None:
        _check_name(body.name)
        row.name = body.name
    if body.event_types is not None:
        row.event_types = _known_types(body.event_types)
    if body.url is not None and body.url != row.url:
        row.url, row.failures, row.open_until_ms = body.url, 0, 0
    if (row.name, row.url, row.event_types) != before:
        row.updated_ms = database_now_ms(session)
    session.flush()
    return row


def list_endpoints(session: Session, project_id: str, page: PageArgs) -> list[WebhookEndpoint]:
    """One more receiver than the page holds, if there is one."""
    after = None
    if page.after is not None:
        row = page.known(queries.endpoint(session, project_id, page.after))
        after = Cursor(row.created_ms, row.id)
    return queries.endpoints(session, project_id, after=after, limit=page.limit + 1, ascending=page.is_ascending)


def delete(session: Session, project_id: str, endpoint_id: str) -> None:
    """Delete a receiver; what is on its way to it is forgotten."""
    queries.delete_endpoint(session, get(session, project_id, endpoint_id, is_locked=True).id)


def rotate(session: Session, project_id: str, endpoint_id: str, *, is_old_kept: bool) -> WebhookEndpoint:
    """A new secret. The old one ends now, or signs beside it for a day, so that receivers can change over.

    So does one that was kept before: who rotates again, because the answer was lost, doesn't end what receivers have.
    """
    row = get(session, project_id, endpoint_id, is_locked=True)
    now = database_now_ms(session)
    live = [kept for kept in row.old_secrets if kept[1] > now]
    row.old_secrets = [[row.secret, now + _KEEP_OLD_MS], *live][:_MOST_OLD] if is_old_kept else []
    row.secret, row.updated_ms = signing.new_secret(), now
    session.flush()
    return row


def list_deliveries(
    session: Session, project_id: str, endpoint_id: str, page: PageArgs
) -> list[tuple[WebhookDelivery, WebhookEvent]]:
    """One more delivery to a receiver than the page holds, if there is one."""
    endpoint = get(session, project_id, endpoint_id)
    after = None
    if page.after is not None:
        row = page.known(queries.delivery(session, endpoint.id, page.after))
        after = Cursor(row.created_ms, row.id)
    return queries.deliveries(session, endpoint.id, after=after, limit=page.limit + 1, ascending=page.is_ascending)


def sample_sending(session: Session, project_id: str, endpoint_id: str, event_type: str) -> tuple[EventType, Sending]:
    """A sample event to send to a receiver now. It isn't in the outbox, and nobody tries it again."""
    row = get(session, project_id, endpoint_id)
    kind = EventType(_known_types([event_type], param="event_type")[0])
    now = database_now_ms(session)
    return kind, Sending(
        delivery_id="",
        event_id=ids.event_id(),
        event_type=kind,
        created_ms=now,
        data=sample_data(kind),
        url=row.url,
        secrets=delivery_queries.secrets_of(row, now),
        now_ms=now,
    )


def send(outbound: Outbound, sending: Sending) -> Outcome:
    """Make one attempt, signed with the time at which it is made."""
    body = body_of(sending.event_id, sending.event_type, sending.created_ms, sending.data)
    signed = signing.headers(sending.event_id, sending.now_ms // 1000, body, sending.secrets)
    headers = {"Content-Type": "application/json", "User-Agent": _AGENT, **signed}
    began_s = monotonic_s()
    status: int | None = None
    error: str | None = None
    try:
        status = outbound.post(sending.url, headers, body)
    except OutboundError as failed:
        error = str(failed)
    if status is not None and 300 <= status < 400:
        error = "it answered with a redirect, which isn't followed"
    return Outcome(status=status, error=error, took_ms=round((monotonic_s() - began_s) * 1000))


def _known_types(given: Sequence[str], param: str = "event_types") -> list[str]:
    known = [str(kind) for kind in EventType]
    if not given:
        raise InvalidRequestError(f"{param}: name at least one of {', '.join(known)}.", param=param)
    for kind in given:
        if kind not in known:
            raise InvalidRequestError(
                f"{param}: there is no event {kind[:64]!r}; there are {', '.join(known)}.",
                code="invalid_value",
                param=param,
            )
    return [kind for kind in known if kind in given]


def _check_name(name: str) -> None:
    if not (name.isprintable() and name.strip()):
        raise InvalidRequestError("name: it must be printable characters.", code="invalid_value", param="name")
