"""The money of interactive calls: what one may cost is held before it runs, what it cost is posted once, and no more.

A hold is no posting: nothing of a call that was lost shall stay in the books. It counts against the limits of its
project until its call ends, or until it expires with a call whose process died.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy.orm import Session

from batchsvc.billing import ledger, queries, service
from batchsvc.billing.pricing import STANDARD_TIER
from batchsvc.db.session import database_now_ms
from batchsvc.money import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedCall:
    """A call and the prices that hold for all of it: those at its beginning."""

    id: str
    project_id: str
    api_key_id: str
    model_id: str
    endpoint: str
    price_version: int
    rates: Rates
    created_ms: int


def price(
    session: Session, call_id: str, *, project_id: str, api_key_id: str, model_id: str, endpoint: str
) -> PricedCall:
    """A call that begins now. Raises InvalidRequestError (code `model_not_priced`) where its model has no price."""
    now_ms = database_now_ms(session)
    version = service.current_version(session, now_ms)
    return PricedCall(
        id=call_id,
        project_id=project_id,
        api_key_id=api_key_id,
        model_id=model_id,
        endpoint=endpoint,
        price_version=version,
        rates=service.rates_for(session, model_id, STANDARD_TIER, version),
        created_ms=now_ms,
    )


def is_limited(session: Session, project_id: str) -> bool:
    """Whether what the project's calls may cost has to be held at all."""
    return not service.limits_of(session, project_id).is_none


class Lack(NamedTuple):
    """What a project has left, which isn't enough, and what its other calls hold of its limits meanwhile."""

    left_nanos: int
    held_nanos: int


def hold(session: Session, call: PricedCall, most_nanos: int, life_s: float) -> Lack | None:
    """Hold the most that a call can cost, for so long or until it is renewed. If the project hasn't that much left,
    nothing is held. Holds that have expired are forgotten on the way."""
    queries.drop_expired_holds(session, call.project_id, database_now_ms(session))
    held_nanos = service.held_by_calls_nanos(session, call.project_id)  # before the room: a hold may end in between
    room = service.room_nanos(session, call.project_id)
    if room is not None and room < most_nanos:
        return Lack(room, held_nanos)
    expires_ms = database_now_ms(session) + round(life_s * 1000)
    queries.insert_hold(session, call.id, call.project_id, most_nanos, expires_ms)
    return None


def renew_hold(session: Session, call_id: str, life_s: float) -> None:
    """A call that holds something goes on for so long at least."""
    queries.renew_hold(session, call_id, database_now_ms(session) + round(life_s * 1000))


def drop_hold(session: Session, call_id: str) -> None:
    """A call ended without an answer: it costs nothing."""
    queries.drop_hold(session, call_id)


def post(
    session: Session, call: PricedCall, *, input_tokens: int, cached_tokens: int, output_tokens: int, cost_nanos: int
) -> bool:
    """Adds a call's usage row and charges what it cost. False when that was done before."""
    now_ms = database_now_ms(session)
    queries.drop_hold(session, call.id)
    posting = ledger.call(call.project_id, call.id, cost_nanos)
    if not queries.insert_posting(session, posting, price_version=call.price_version, created_ms=now_ms):
        return False
    queries.insert_usage(
        session,
        {
            "part_id": call.id,
            "project_id": call.project_id,
            "api_key_id": call.api_key_id,
            "batch_id": queries.NO_BATCH,
            "model": call.model_id,
            "tier": STANDARD_TIER,
            "endpoint": call.endpoint,
            "price_version": call.price_version,
            "created_ms": now_ms,
            "requests": 1,
            "input_tokens": input_tokens,
            "cached_tokens": cached_tokens,
            "output_tokens": output_tokens,
            "cost_nanos": cost_nanos,
        },
    )
    return True
