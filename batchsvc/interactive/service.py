"""What surrounds a call: its model and prices, what it may cost, and what it did cost.

A call is priced when it begins and charged when its whole answer has come from its worker, before its client gets the
end of it, and whether or not the client is still there. One that ends before that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc import ids, mode
from batchsvc.accounts import service as accounts
from batchsvc.accounts.service import Caller
from batchsvc.batches import models
from batchsvc.batches.answers import Answered
from batchsvc.batches.choices import REASONS
from batchsvc.batches.texts_here import NotHereError, text_here
from batchsvc.batches.unit_file import line_seed
from batchsvc.billing import call_service
from batchsvc.billing.call_service import PricedCall
from batchsvc.billing.pricing import most_nanos
from batchsvc.db.session import Database
from batchsvc.errors import NoFundsError, NotFoundError, OverloadedError, UnavailableError
from batchsvc.interactive.asked import Asked, Body, ask, read_body, with_magic
from batchsvc.interactive.shapes import Head
from batchsvc.interactive.wire import Ended, NewCall
from batchsvc.money import format_dollars, line_cost_nanos
from batchsvc.settings import Settings
from engine.errors import ModelError
from engine.text import TextModel

_CACHE_STEP_TOKENS = 16  # cached tokens are billed in steps of so many, as those of a plan are
HOLD_S = 30.0
"""How long what a call may cost is held without a sign of it: so a process that died soon holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """A call that can be passed on. `is_held`: what it may cost is held until it ends."""

    digest: str
    priced: PricedCall
    asked: Asked
    streams: bool
    includes_usage: bool
    salt: str
    is_held: bool

    @property
    def head(self) -> Head:
        return Head(
            ident=self.priced.id.removeprefix("call_"),
            model=self.priced.model_id,
            created_s=self.priced.created_ms // 1000,
            params=self.asked.params,
            includes_usage=self.includes_usage,
        )

    def message(self, api: str) -> NewCall:
        """What the worker gets; `api` is who wants to hear of it."""
        seed = self.asked.params.get("seed")
        return NewCall(
            id=self.priced.id,
            api=api,
            prompt_ids=self.asked.prompt_ids,
            params=self.asked.params,
            seed=line_seed(self.priced.id, 0) if seed is None else seed,
            salt=self.salt,
            streams=self.streams,
        )


def prepare(db: Database, settings: Settings, caller: Caller, endpoint: str, data: bytes) -> PreparedCall:
    """Reads a body, finds its model and prices, and holds what it may cost. Raises ServiceError."""
    body = read_body(data)
    call_id = ids.call_id()
    with db.reading() as session:
        row = models.resolve(session, body.model, project_id=caller.project_id)
        if row is None:
            raise NotFoundError(f"The model '{body.model}' does not exist.", code="model_not_found", param="model")
        model_id, digest, path = row.id, row.digest, row.path
        priced = call_service.price(
            session,
            call_id,
            project_id=caller.project_id,
            api_key_id=caller.api_key_id,
            model_id=model_id,
            endpoint=endpoint,
        )
        salt = accounts.salts(session, [caller.project_id])[caller.project_id]
        is_held = call_service.is_limited(session, caller.project_id)
    asked = ask(endpoint, body, _text(model_id, path, digest), default_max_tokens=settings.default_max_tokens)
    if mode.is_test(caller.project_id):
        asked = with_magic(asked, body)
    if is_held:
        _hold(db, priced, asked)
    return _prepared(mode.served_by(caller.project_id, digest), priced, asked, body, salt, is_held)


def _prepared(digest: str, priced: PricedCall, asked: Asked, body: Body, salt: str, is_held: bool) -> PreparedCall:
    return PreparedCall(
        digest=digest,
        priced=priced,
        asked=asked,
        streams=body.streams,
        includes_usage=body.includes_usage,
        salt=salt,
        is_held=is_held,
    )


def let_go(db: Database, call: PreparedCall) -> None:
    """A call ended without a whole answer, or was charged already: it holds nothing more."""
    if call.is_held:
        db.run(lambda session: call_service.drop_hold(session, call.priced.id))


def keep_hold(db: Database, call: PreparedCall) -> None:
    """A call goes on: so does what is held for it."""
    db.run(lambda session: call_service.renew_hold(session, call.priced.id, HOLD_S))


def charge(db: Database, call: PreparedCall, ended: Ended) -> Answered:
    """The answer with its usage and its cost, which are in the books from now on; doing it again changes nothing."""
    completion, params = ended.completion, call.asked.params
    usage, head = completion.usage, call.head
    tokens = {
        "input_tokens": usage.prompt_tokens,
        "cached_tokens": usage.hit_tokens // _CACHE_STEP_TOKENS * _CACHE_STEP_TOKENS,
        "output_tokens": usage.output_tokens,
    }
    cost_nanos = line_cost_nanos(call.priced.rates, **tokens)

    def post(session: Session) -> bool:
        return call_service.post(session, call.priced, **tokens, cost_nanos=cost_nanos)

    db.run(post)
    return Answered(
        line_ident=head.ident,
        model=head.model,
        created_s=head.created_s,
        params=params,
        text=completion.text,
        finish_reason=REASONS.get(completion.finish_reason, "stop"),
        vectors=(),
        choices=completion.answers,
        system_fingerprint=ended.fingerprint,
        **tokens,
        cost_nanos=cost_nanos,
    )


def _hold(db: Database, priced: PricedCall, asked: Asked) -> None:
    most = most_nanos(
        priced.rates,
        input_tokens=len(asked.prompt_ids),
        planned_cached_tokens=0,
        max_tokens=asked.most_output_tokens,
    )
    lack = db.run(lambda session: call_service.hold(session, priced, most, HOLD_S))
    if lack is None:
        return
    costs = f"This call can cost up to {format_dollars(most)}"
    whose = "of the budget or balance of its project"
    if most <= lack.left_nanos + lack.held_nanos:  # the others will cost less than the most that they could
        says = (
            f"{costs}; {format_dollars(lack.left_nanos)} {whose} are left, and {format_dollars(lack.held_nanos)} are"
            " held for calls that run: try again soon, or with a lower max_tokens."
        )
        raise OverloadedError(says, code="budget_held")
    says = f"{costs}, and {format_dollars(lack.left_nanos)} {whose} are left: a lower max_tokens may fit."
    raise NoFundsError(says, code="insufficient_quota")


def _text(model_id: str, path: str, digest: str) -> TextModel:
    try:
        return text_here(path, digest)
    except (NotHereError, ModelError) as error:
        says = f"The model {model_id} isn't on the machine of this API server, which has to read its tokenizer."
        raise UnavailableError(says, code="model_not_available") from error
