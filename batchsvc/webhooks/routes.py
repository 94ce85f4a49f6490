"""Routes of webhook endpoints, as the official client's `client.webhooks` calls them, and of their deliveries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends

from batchsvc.accounts.caller import CallerDep
from batchsvc.egress import Egress
from batchsvc.errors import InvalidRequestError, UnavailableError
from batchsvc.http.deps import Context, ContextDep
from batchsvc.http.paging import PageArgs, page_args, page_object
from batchsvc.outbound import Outbound
from batchsvc.webhooks import schemas, service
from batchsvc.webhooks.events import EventType
from batchsvc.webhooks.schemas import CreateEndpoint, RotateSecret, SendTest, UpdateEndpoint

router = APIRouter(prefix="/v1")
_WAITING = threading.BoundedSemaphore(4)  # receivers and name servers may be slow, and threads of the API are few
EndpointPage = Annotated[PageArgs, Depends(page_args(default=20, most=100))]


@router.get("/webhook_event_types")
def list_event_types(_caller: CallerDep) -> dict[str, Any]:
    """The events that a receiver can ask for."""
    return {"object": "list", "data": [str(kind) for kind in EventType]}


@router.post("/webhook_endpoints")
def create_endpoint(caller: CallerDep, context: ContextDep, body: CreateEndpoint) -> dict[str, Any]:
    """A new receiver; the field `signing_secret` holds its secret this once."""
    _check_url(context, body.url)
    return context.db.run(lambda session: schemas.with_secret(service.create(session, caller.project_id, body)))


@router.get("/webhook_endpoints")
def list_endpoints(caller: CallerDep, context: ContextDep, page: EndpointPage) -> dict[str, Any]:
    """Receivers of the project, newest first unless `order=asc`."""
    with context.db.reading() as session:
        found = service.list_endpoints(session, caller.project_id, page)
        return page_object(found, page.limit, schemas.endpoint_object)


@router.get("/webhook_endpoints/{webhook_endpoint_id}")
def retrieve_endpoint(caller: CallerDep, context: ContextDep, webhook_endpoint_id: str) -> dict[str, Any]:
    """One receiver."""
    with context.db.reading() as session:
        return schemas.endpoint_object(service.get(session, caller.project_id, webhook_endpoint_id))


@router.post("/webhook_endpoints/{webhook_endpoint_id}")
def update_endpoint(
    caller: CallerDep, context: ContextDep, webhook_endpoint_id: str, body: UpdateEndpoint
) -> dict[str, Any]:
    """Change name, URL or events of a receiver."""
    _check_owned(caller.project_id, context, webhook_endpoint_id)
    if body.url is not None:
        _check_url(context, body.url)
    return context.db.run(
        lambda session: schemas.endpoint_object(service.update(session, caller.project_id, webhook_endpoint_id, body))
    )


@router.delete("/webhook_endpoints/{webhook_endpoint_id}")
def delete_endpoint(caller: CallerDep, context: ContextDep, webhook_endpoint_id: str) -> dict[str, Any]:
    """Delete a receiver, with what is on its way to it."""
    context.db.run(lambda session: service.delete(session, caller.project_id, webhook_endpoint_id))
    return schemas.deleted_object(webhook_endpoint_id)


@router.post("/webhook_endpoints/{webhook_endpoint_id}/rotate_secret")
def rotate_secret(
    caller: CallerDep, context: ContextDep, webhook_endpoint_id: str, body: RotateSecret | None = None
) -> dict[str, Any]:
    """A new secret, shown this once."""
    is_old_kept = body is not None and body.keep_old_secret_active_for_24_hours
    return context.db.run(
        lambda session: schemas.with_secret(
            service.rotate(session, caller.project_id, webhook_endpoint_id, is_old_kept=is_old_kept)
        )
    )


@router.post("/webhook_endpoints/{webhook_endpoint_id}/test")
def send_test(caller: CallerDep, context: ContextDep, webhook_endpoint_id: str, body: SendTest) -> dict[str, Any]:
    """Send a sample event now, and say what the receiver answered."""
    with context.db.reading() as session:
        kind, sending = service.sample_sending(session, caller.project_id, webhook_endpoint_id, body.event_type)
    settings = context.settings
    with _turn():
        outcome = service.send(Outbound(Egress.parse(settings.egress_allow), settings.webhook_timeout_s), sending)
    if outcome.status is None:
        raise InvalidRequestError(f"The test event could not be sent: {outcome.error}.", code="webhook_test_failed")
    return schemas.tested_object(webhook_endpoint_id, kind, outcome.status)


@router.get("/webhook_endpoints/{webhook_endpoint_id}/deliveries")
def list_deliveries(
    caller: CallerDep, context: ContextDep, webhook_endpoint_id: str, page: EndpointPage
) -> dict[str, Any]:
    """What was sent to a receiver, attempt by attempt, newest first unless `order=asc`."""
    with context.db.reading() as session:
        found = service.list_deliveries(session, caller.project_id, webhook_endpoint_id, page)
        return page_object(found, page.limit, lambda pair: schemas.delivery_object(*pair))


def _check_owned(project_id: str, context: ContextDep, endpoint_id: str) -> None:
    """Before a name server is asked about another URL for it."""
    with context.db.reading() as session:
        service.get(session, project_id, endpoint_id)


def _check_url(context: Context, url: str) -> None:
    with _turn():
        service.check_url(url, Egress.parse(context.settings.egress_allow))


@contextmanager
def _turn() -> Iterator[None]:
    """The right to wait for somebody else's server."""
    if not _WAITING.acquire(blocking=False):
        raise UnavailableError("Too many receivers are being looked at; try again in a moment.", code="busy")
    try:
        yield
    finally:
        _WAITING.release()
