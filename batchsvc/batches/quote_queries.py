"""SQL of quotes: the lease of their planners, one window at a time, and how a quote becomes ready or fails.

As with batches, a claim raises `plan_epoch`, and every later write names it and finds the quote `queued`, or changes
nothing. Every function may be run again after a lost answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Select, and_, delete, exists, func, or_, select
from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.batches import garbage_queries, model_pins, quote_figures
from batchsvc.batches.model_pins import ModelPin
from batchsvc.batches.plan_queries import Input, PlanClaim, WindowObject
from batchsvc.batches.prompt_advice import Advice
from batchsvc.batches.quote_figures import Figures, Lengths
from batchsvc.batches.tables import Batch, Model, Part, Quote, Unit
from batchsvc.billing import service as billing
from batchsvc.billing.pricing import STANDARD_TIER
from batchsvc.db.session import database_now_ms
from batchsvc.files import importing
from batchsvc.files import service as files
from batchsvc.files.lines import Problem
from batchsvc.files.tables import File
from batchsvc.money import Rates, divide_half_even

QUEUED, READY, FAILED = "queued", "ready", "failed"
_KEEP_MS = 30 * 86_400_000  # how long a quote can be looked at
_NO_RATES = {"input": 0, "cached_input": 0, "output": 0}  # of a quote that no line runs of
_LATEST_BATCHES, _LATEST_PARTS = 20, 1_000  # whose answers tell how long the next ones get


@dataclass(frozen=True, slots=True, kw_only=True)
class QuoteClaim:
    """The right to plan the next window of a quote. `sample_lines`: of an estimate, which is one window."""

    plan: PlanClaim
    sample_lines: int | None
    input_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedModel:
    """What a quote is about, from now on."""

    path: str
    rates: Rates
    lengths: Lengths | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedWindow:
    """What a planned window adds to its quote. `ids` is where its custom_ids are, None if no window follows;
    `estimate` is what an estimate has instead of figures."""

    last_line: int
    next_offset: int
    num_lines: int
    num_prompts: int
    ids: WindowObject | None
    templates: Mapping[str, str]
    figures: Mapping[str, Figures]
    estimate: Mapping[str, Any] | None
    rejected: Sequence[Problem]
    num_rejected: int
    problems: Sequence[Problem]
    num_problems: int
    advice: Advice | None


def quote(session: Session, project_id: str, quote_id: str) -> Quote | None:
    """One quote of a project, as it is now."""
    found = select(Quote).where(Quote.id == quote_id, Quote.project_id == project_id)
    return session.scalars(found.execution_options(populate_existing=True)).first()


def due(session: Session) -> list[str]:
    """Quotes that nobody is planning. Served by ix_quotes_status."""
    waiting = (Quote.status == QUEUED, Quote.plan_lease_ms < database_now_ms(session))
    return list(session.scalars(select(Quote.id).where(*waiting).order_by(Quote.created_ms)))


def forget_old(session: Session) -> int:
    """Forget the quotes that nobody looks at any more. Returns how many. Served by ix_quotes_status."""
    old = Quote.created_ms < database_now_ms(session) - _KEEP_MS
    return len(session.scalars(delete(Quote).where(Quote.status.in_((READY, FAILED)), old).returning(Quote.id)).all())


def claim(session: Session, quote_id: str, owner: str, lease_s: float) -> QuoteClaim | bool:
    """Take the plan lease. False: somebody else has it. True: there is nothing to plan (any more)."""
    row = session.get(Quote, quote_id, with_for_update=True, populate_existing=True)
    now = database_now_ms(session)
    if row is None or row.status != QUEUED:
        return True
    if row.plan_lease_ms > now:
        return False
    row.plan_epoch += 1
    row.plan_owner, row.plan_lease_ms = owner, now + _ms(lease_s)
    file = files.find_stored(session, row.project_id, row.input_file_id)
    last = row.windows[-1] if row.windows else None
    plan = PlanClaim(
        batch_id=row.id,
        project_id=row.project_id,
        epoch=row.plan_epoch,
        endpoint=row.endpoint,
        is_strict=row.on_invalid != "skip",
        model_requested=row.model_requested,
        model_id=row.model_id,
        aliases=row.aliases,
        input=Input.of(file),
        window_no=len(row.windows),
        unit_no=0,
        first_line=last["last_line"] + 1 if last else 1,
        offset=last["next_offset"] if last else 0,
        num_lines=row.num_lines,
        num_problems=row.errors_total,
        num_listed=len(row.errors or ()),
        num_prompts=sum(window.get("num_prompts", 0) for window in row.windows),
        finished_windows=[WindowObject(key=window["key"], sha256=window["sha256"]) for window in row.windows],
        limits=row.plan_limits,
        template_sha256=row.template_sha256,
        models=row.models,
    )
    return QuoteClaim(plan=plan, sample_lines=row.sample_lines, input_sha256=row.input_sha256)


def foreign_input(quote_id: str) -> Select[str]:
    """The project of a quote whose input has to be copied from a tenant's store before it can be planned."""
    quote = (Quote.id == quote_id, Quote.status == QUEUED, Quote.input_file_id == File.id)
    return select(Quote.project_id).where(*quote, *importing.is_abroad())


def keep(session: Session, quote_id: str, epoch: int, lease_s: float) -> bool:
    """Prolong the lease. False: it is lost."""
    row = _mine(session, quote_id, epoch)
    if row is not None:
        row.plan_lease_ms = database_now_ms(session) + _ms(lease_s)
    return row is not None


def let_go(session: Session, quote_id: str, epoch: int, *, wait_s: float = 0) -> None:
    """End the lease of a planner that stops early. `wait_s`: for so long nobody else need try."""
    if (row := _mine(session, quote_id, epoch)) is not None:
        row.plan_lease_ms = database_now_ms(session) + _ms(wait_s) if wait_s else 0


def start_over(session: Session, quote_id: str, epoch: int) -> None:
    """Forget what was planned of a quote so far."""
    if (row := _mine(session, quote_id, epoch)) is not None:
        _discard_windows(session, row)
        row.found = row.problems = row.errors = row.advice = None
        row.models = None if row.models is None else {}
        row.num_lines = row.num_rejected = row.errors_total = row.plan_lease_ms = 0


def pin_model(session: Session, quote_id: str, epoch: int, model_id: str) -> QuotedModel | None:
    """Settle model, rates and what is known of the lengths of answers. None: the lease is lost.

    Raises InvalidRequestError when the model has no price.
    """
    row = _mine(session, quote_id, epoch)
    if row is None:
        return None
    model = session.get_one(Model, model_id)
    pin, digest = model_pins.pin_of(row, model_id), mode.served_by(row.project_id, model.digest)
    if pin is None:
        tier, standard = (
            billing.rates_for(session, model_id, name, row.price_version) for name in (row.tier, STANDARD_TIER)
        )
        rates = {"tier": asdict(tier), "standard": asdict(standard)}
        found = quote_figures.lengths_of(_finished(session, row, digest))
        lengths = None if found is None else asdict(found)
        pin = ModelPin(model.id, digest, rates)
        if row.models is None:
            row.model_id, row.model_digest, row.rates, row.lengths = model.id, digest, rates, lengths
        else:
            row.models = {**row.models, model.id: {"digest": digest, "rates": rates, "lengths": lengths}}
    known = row.lengths if row.models is None else row.models[model_id]["lengths"]
    rates_now = Rates(**pin.rates["tier"])
    return QuotedModel(path=model.path, rates=rates_now, lengths=Lengths(**known) if known else None)


def add_window(
    session: Session, quote_id: str, epoch: int, no: int, window: QuotedWindow, *, max_problems: int
) -> bool:
    """Make a window count. False: the lease is lost."""
    row = _mine(session, quote_id, epoch)
    if row is None:
        return False
    if len(row.windows) > no:
        return True  # ours, as the epoch says: the answer to the commit was lost
    ids = window.ids
    place = {"last_line": window.last_line, "next_offset": window.next_offset, "num_prompts": window.num_prompts}
    row.windows = [*row.windows, {**place, "key": ids.key if ids else "", "sha256": ids.sha256 if ids else ""}]
    row.num_lines += window.num_lines
    if row.models is None:
        row.template_sha256 = next(iter(window.templates.values()), row.template_sha256)
        added = sum(window.figures.values(), figures_of(row))
        row.found = asdict(added) if window.estimate is None else dict(window.estimate)
    else:
        row.models = {name: _with_window(name, pin, window) for name, pin in row.models.items()}
    row.problems = _listed(row.problems, window.rejected, max_problems)
    row.num_rejected += window.num_rejected
    row.errors = _listed(row.errors, window.problems, max_problems)
    row.errors_total += window.num_problems
    if window.advice is not None:
        row.advice = asdict(Advice(**row.advice) + window.advice if row.advice else window.advice)
    if ids is not None:
        row.plan_lease_ms = 0  # its planner goes on only when there is no further window
    return True


def finish(session: Session, quote_id: str, epoch: int, ttl_s: float) -> bool:
    """End the planning well: from now on batches can be created with the quote. False: the lease is lost."""
    row = _mine(session, quote_id, epoch)
    if row is None:
        return False
    if not row.input_sha256 and (file := files.find_stored(session, row.project_id, row.input_file_id)):
        row.input_sha256 = file.sha256  # of an input that was copied for this quote
    row.status, row.ended_ms = READY, database_now_ms(session)
    row.expires_ms = row.ended_ms + _ms(ttl_s) if row.sample_lines is None else None
    row.plan_owner, row.plan_lease_ms = None, 0
    _discard_windows(session, row, keeps_rows=True)
    return True


def fail(
    session: Session,
    quote_id: str,
    epoch: int,
    reason: Problem | None,
    problems: Sequence[Problem],
    *,
    num_problems: int,
    max_problems: int,
) -> bool:
    """End the planning as that of the batch would end: the reason of the whole file first, then its problems."""
    row = _mine(session, quote_id, epoch)
    if row is None:
        return False
    first = [] if reason is None else [reason.as_json()]
    row.errors = [*first, *(_listed(row.errors, problems, max_problems) or ())][:max_problems]
    row.errors_total += len(first) + num_problems
    row.status, row.ended_ms = FAILED, database_now_ms(session)
    row.plan_owner, row.plan_lease_ms = None, 0
    _discard_windows(session, row, keeps_rows=True)
    return True


def is_queued(session: Session, quote_id: str) -> bool:
    """Whether a quote still waits for its planning to end."""
    return session.scalar(select(Quote.status).where(Quote.id == quote_id)) == QUEUED


def _with_window(model_id: str, pin: dict[str, Any], window: QuotedWindow) -> dict[str, Any]:
    """What a quote knows of one of its models, with what a window adds."""
    if model_id not in window.figures:
        return pin
    added = quote_figures.from_json(pin.get("found")) + window.figures[model_id]
    return {**pin, "template_sha256": window.templates[model_id], "found": asdict(added)}


def figures_of(row: Quote) -> Figures:
    """The figures of a quote (not of an estimate) so far."""
    if row.models is None:
        return quote_figures.from_json(row.found)
    return sum((quote_figures.from_json(pin.get("found")) for pin in row.models.values()), Figures())


def costs_of(row: Quote) -> dict[str, Any]:
    """What the lines of a quote cost, as the API shows it."""
    if row.models is None:
        return quote_figures.shown_costs(figures_of(row), rates_of(row) if row.rates else Rates(**_NO_RATES))
    costs = quote_figures.shown_costs(Figures(), Rates(**_NO_RATES))
    for pin in row.models.values():
        found = quote_figures.from_json(pin.get("found"))
        costs = quote_figures.sum_of(costs, quote_figures.shown_costs(found, Rates(**pin["rates"]["tier"])))
    return costs


def rates_of(row: Quote) -> Rates:
    """The rates that a quote has pinned."""
    assert row.rates is not None, "rates are pinned before anything is planned"
    return Rates(**row.rates["tier"])


def _finished(session: Session, row: Quote, digest: str) -> list[tuple[int, int]]:
    """Lines of the latest parts of the project's latest batches of the model at the same endpoint, and the output
    tokens that these lines had for one answer each. Of a batch of several models the units say which theirs is.

    Served by ix_batches_listing and ix_parts_window.
    """
    has_units = exists(select(Unit.id).where(Unit.batch_id == Batch.id, Unit.model_digest == digest))
    latest = (
        select(Batch.id)
        .where(
            Batch.project_id == row.project_id,
            or_(Batch.model_digest == digest, and_(Batch.model_digest.is_(None), has_units)),
            Batch.endpoint == row.endpoint,
            Batch.completed > 0,
        )
        .order_by(Batch.created_ms.desc(), Batch.id.desc())
        .limit(_LATEST_BATCHES)
    )
    batch_ids = session.scalars(latest).all()
    parts = (
        select(Part.lines_ok, Part.output_tokens, func.coalesce(Part.num_answers, Part.lines_ok))
        .join(Unit, Unit.id == Part.unit_id)
        .where(Part.batch_id.in_(batch_ids), Part.lines_ok > 0, Part.is_void.is_(False), Unit.model_digest == digest)
        .order_by(Part.created_ms.desc())
        .limit(_LATEST_PARTS)
    )
    return [(lines, divide_half_even(tokens * lines, answers)) for lines, tokens, answers in session.execute(parts)]


def _mine(session: Session, quote_id: str, epoch: int) -> Quote | None:
    row = session.get(Quote, quote_id, with_for_update=True, populate_existing=True)
    return row if row is not None and row.status == QUEUED and row.plan_epoch == epoch else None


def _discard_windows(session: Session, row: Quote, *, keeps_rows: bool = False) -> None:
    garbage_queries.discard(session, [window["key"] for window in row.windows if window["key"]])
    if not keeps_rows:
        row.windows = []


def _listed(listed: Sequence[Any] | None, more: Sequence[Problem], most: int) -> list[Any] | None:
    return [*(listed or ()), *(problem.as_json() for problem in more)][:most] or None


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
