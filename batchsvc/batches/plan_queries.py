"""SQL of planning: the lease, one window at a time, and how planning ends. `plan_epoch` is the fence of it all.

A claim raises `plan_epoch`; every later write names it and finds the batch `validating`, or changes nothing: then the
planner was overtaken, or the batch ended, and it must stop. Every function may be run again after a lost answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Select, delete, func, insert, select, update
from sqlalchemy.orm import Session

from batchsvc import ids, mode
from batchsvc.batches import (
    budget_queries,
    garbage_queries,
    lifecycle,
    model_pins,
    models,
    queries,
    quota_queries,
    result_queries,
)
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.model_pins import ModelPin
from batchsvc.batches.tables import Batch, Model, Part, Unit, Window
from batchsvc.billing import service as billing
from batchsvc.billing.pricing import STANDARD_TIER
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError
from batchsvc.files import importing
from batchsvc.files import service as files
from batchsvc.files.importing import Origin, origin_of
from batchsvc.files.lines import Problem
from batchsvc.files.tables import File
from batchsvc.money import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The file that a batch reads. `origin`: where it has to be copied from first."""

    s3_key: str
    etag: str
    size_bytes: int
    origin: Origin | None = None

    @classmethod
    def of(cls, file: File | None) -> Input | None:
        """The input that a row names; None: it is gone."""
        if file is None:
            return None
        return cls(s3_key=file.s3_key, etag=file.etag, size_bytes=file.size_bytes, origin=origin_of(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowObject:
    """The object of a finished window: its line numbers and custom_ids."""

    key: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClaim:
    """The right to plan the next window of a batch, and where it starts. `input` None: the file is gone."""

    batch_id: str
    project_id: str
    epoch: int
    endpoint: str
    is_strict: bool
    model_requested: str | None
    model_id: str | None
    aliases: dict[str, Any] | None
    input: Input | None
    window_no: int
    unit_no: int
    first_line: int
    offset: int
    num_lines: int
    num_problems: int
    num_listed: int
    num_prompts: int = 0
    finished_windows: list[WindowObject]
    limits: dict[str, Any] | None = None  # settings that a quote has pinned,
    template_sha256: str | None = None  # and the chat template
    chosen_lines: bytes | None = None  # only these: see line_set.py
    models: dict[str, Any] | None = None  # what is pinned of the models, if each line has its own: see model_pins.py

    @property
    def is_by_line(self) -> bool:
        return self.models is not None

    def quoted_template(self, model_id: str) -> str | None:
        """The SHA-256 of the chat template that a quote has seen of a model."""
        if self.models is None:
            return self.template_sha256
        quoted = self.models.get(model_id, {}).get("template_sha256")
        return None if quoted is None else str(quoted)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedModel:
    """What a batch runs on and at which rates, from now on."""

    id: str
    path: str
    digest: str
    rates: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class NewUnit:
    """A unit whose file is stored."""

    no: int
    s3_key: str
    sha256: str
    num_lines: int
    est_tokens: int
    sure_tokens: int = 0
    model_id: str | None = None  # where it isn't that of the batch
    model_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedPart:
    """The stored part of a window's rejected lines."""

    id: str
    s3_key: str
    sha256: str
    size_bytes: int
    num_lines: int
    line_nos: bytes  # see line_set.py


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWindow:
    """A planned window, all of its objects stored. `keeps_lease`: its planner goes on to end the planning."""

    first_line: int
    last_line: int
    num_lines: int
    next_offset: int
    input_tokens: int
    num_prompts: int = 0
    line_nos_key: str
    line_nos_sha256: str
    reserve_nanos: int
    high_nanos: int = 0
    units: Sequence[NewUnit] = ()
    rejected: RejectedPart | None = None
    problems: Sequence[Problem] = ()
    num_problems: int = 0
    notes: Sequence[Problem] = ()
    keeps_lease: bool = False


def claim(session: Session, batch_id: str, owner: str, lease_s: float) -> PlanClaim | bool:
    """Take the plan lease. False: somebody else has it. True: there is nothing to plan (any more)."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    now = database_now_ms(session)
    if batch is None:
        return True
    if batch.status != Status.VALIDATING or batch.expires_ms <= now:
        discard_unstarted(session, batch_id)
        return True
    if batch.plan_lease_ms > now:
        return False
    batch.plan_epoch += 1
    batch.plan_owner, batch.plan_lease_ms = owner, now + _ms(lease_s)
    file = files.find_stored(session, batch.project_id, batch.input_file_id)
    windows = session.scalars(select(Window).where(Window.batch_id == batch_id).order_by(Window.no)).all()
    last_unit = session.scalar(select(func.max(Unit.no)).where(Unit.batch_id == batch_id))
    return PlanClaim(
        batch_id=batch_id,
        project_id=batch.project_id,
        epoch=batch.plan_epoch,
        endpoint=batch.endpoint,
        is_strict=batch.on_invalid != "skip",
        model_requested=batch.model_requested,
        model_id=batch.model_id,
        aliases=batch.aliases,
        input=Input.of(file),
        window_no=len(windows),
        unit_no=0 if last_unit is None else last_unit + 1,
        first_line=windows[-1].last_line + 1 if windows else 1,
        offset=windows[-1].next_offset if windows else 0,
        num_lines=sum(window.num_lines for window in windows),
        num_problems=batch.errors_total,
        num_listed=len(batch.errors or ()),
        num_prompts=sum(window.num_prompts for window in windows),
        finished_windows=objects_of(windows),
        limits=batch.plan_limits,
        template_sha256=batch.template_sha256,
        chosen_lines=batch.chosen_lines,
        models=batch.models,
    )


def foreign_input(batch_id: str) -> Select[str]:
    """The project of a batch whose input has to be copied from a tenant's store before it can be planned."""
    batch = (Batch.id == batch_id, Batch.status == Status.VALIDATING, Batch.input_file_id == File.id)
    return select(Batch.project_id).where(*batch, *importing.is_abroad())


def keep(session: Session, batch_id: str, epoch: int, lease_s: float) -> bool:
    """Prolong the lease. False: it is lost."""
    return _change(session, batch_id, epoch, plan_lease_ms=database_now_ms(session) + _ms(lease_s))


def let_go(session: Session, batch_id: str, epoch: int, written: Sequence[str], *, wait_s: float = 0) -> None:
    """End the lease of a planner that stops early, and have deleted what it stored but nobody knows of.

    `wait_s`: for so long nobody else need try.
    """
    until_ms = database_now_ms(session) + _ms(wait_s) if wait_s else 0
    _change(session, batch_id, epoch, plan_owner=None, plan_lease_ms=until_ms)
    # a commit whose answer was lost has given the objects to a window after all: they stand and fall together
    if session.scalar(select(Window.no).where(Window.batch_id == batch_id, Window.line_nos_key.in_(written))) is None:
        garbage_queries.discard(session, written)


def resolve(session: Session, name: str, aliases: dict[str, Any] | None, project_id: str) -> Model | None:
    """The model behind a name, as the batch's aliases say, of those that its project may use."""
    return models.resolve(session, name, aliases, project_id=project_id)


def pin_model(session: Session, batch_id: str, epoch: int, model_id: str) -> PinnedModel | None:
    """Settle model, formats and rates of a batch, or of those of its lines that name this model. None: the lease is
    lost.

    Raises InvalidRequestError when the model has no price, or isn't the one that was quoted.
    """
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    model = session.get_one(Model, model_id)
    if batch is None or batch.status != Status.VALIDATING or batch.plan_epoch != epoch:
        return None
    pin, digest = model_pins.pin_of(batch, model_id), mode.served_by(batch.project_id, model.digest)
    if pin is None:
        tier, standard = (
            billing.rates_for(session, model_id, name, batch.price_version) for name in (batch.tier, STANDARD_TIER)
        )
        rates = {"tier": asdict(tier), "standard": asdict(standard)}
        pin = ModelPin(model.id, digest, rates)
        formats = model_pins.formats_of(model)
        if batch.models is not None:
            batch.models = {**batch.models, model.id: {"digest": digest, "rates": rates, **formats}}
        else:
            batch.model_id, batch.model_digest, batch.rates = model.id, digest, rates
            batch.weight_format, batch.kv_format, batch.quality = model.weight_format, model.kv_format, model.quality
    elif batch.quote_id is not None and digest != pin.digest:
        raise InvalidRequestError(f"The model {model_id} has changed since it was quoted.", code="quote_changed")
    return PinnedModel(id=model.id, path=model.path, digest=pin.digest, rates=Rates(**pin.rates["tier"]))


def add_window(session: Session, batch_id: str, epoch: int, no: int, window: NewWindow, *, max_problems: int) -> bool:
    """Make a window count: its row, units, error part and problems at once. False: the lease is lost."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    before = session.get(Window, (batch_id, no))
    if before is not None and before.line_nos_key == window.line_nos_key:
        return True  # ours: the answer to the commit was lost
    if batch is None or batch.status != Status.VALIDATING or batch.plan_epoch != epoch:
        return False
    rejected = window.rejected
    session.add(
        Window(
            batch_id=batch_id,
            no=no,
            first_line=window.first_line,
            last_line=window.last_line,
            num_lines=window.num_lines,
            num_rejected=rejected.num_lines if rejected else 0,
            next_offset=window.next_offset,
            input_tokens=window.input_tokens,
            num_prompts=window.num_prompts,
            line_nos_key=window.line_nos_key,
            line_nos_sha256=window.line_nos_sha256,
            reserve_nanos=window.reserve_nanos,
            high_nanos=window.high_nanos,
        )
    )
    if window.units:
        session.execute(insert(Unit), [_unit_row(batch, no, unit) for unit in window.units])
    if rejected is not None:
        add_rejected(session, batch, no, rejected)
    if window.num_problems:
        batch.errors = _listed(batch, window.problems, max_problems)
        batch.errors_total += window.num_problems
    if window.notes:
        batch.warnings = [*(batch.warnings or ()), *(note.as_json() for note in window.notes)][:max_problems]
    if not window.keeps_lease:
        batch.plan_lease_ms = 0
    return True


def add_rejected(session: Session, batch: Batch, window_no: int, rejected: RejectedPart) -> None:
    """Make the part of a window's rejected lines count."""
    session.add(
        Part(
            id=rejected.id,
            batch_id=batch.id,
            unit_id=None,
            window_no=window_no,
            epoch=batch.plan_epoch,
            s3_key=rejected.s3_key,
            sha256=rejected.sha256,
            size_bytes=rejected.size_bytes,
            bitmap=None,
            seq=result_queries.next_seq(batch),
            line_nos=rejected.line_nos,
            lines_ok=0,
            lines_err=rejected.num_lines,
            created_ms=database_now_ms(session),
        )
    )


def start(session: Session, batch_id: str, epoch: int, quota_tokens: int | None = None) -> bool:
    """End the planning well: reserve money and quota, and make the units claimable. False: the lease is lost.

    `quota_tokens` is the quota of projects that have none of their own. A batch that must not wait for it fails.
    """
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is None or batch.status != Status.VALIDATING or batch.plan_epoch != epoch:
        return False
    lines, rejected, high_nanos = session.execute(
        select(
            func.coalesce(func.sum(Window.num_lines), 0),
            func.coalesce(func.sum(Window.num_rejected), 0),
            func.coalesce(func.sum(Window.high_nanos), 0),
        ).where(Window.batch_id == batch_id)
    ).one()
    est_tokens, sure_tokens = session.execute(
        select(
            func.coalesce(func.sum(Unit.est_tokens), 0),
            func.coalesce(func.sum(Unit.sure_tokens), 0),
        ).where(Unit.batch_id == batch_id)
    ).one()
    refused = quota_queries.take(session, batch, int(est_tokens), quota_tokens) or budget_queries.start(
        session, batch, int(high_nanos)
    )
    if refused is not None:
        return fail(session, batch_id, epoch, refused, [], num_problems=0, max_problems=1)
    values = {
        "est_tokens": int(est_tokens),
        "sure_tokens": int(sure_tokens),
        "total": int(lines),
        "failed": int(rejected),
        "plan_owner": None,
        "plan_lease_ms": 0,
    }
    now = database_now_ms(session)
    fence = {"plan_epoch": epoch}
    if not lifecycle.move(session, batch_id, Status.IN_PROGRESS, now_ms=now, fence=fence, values=values):
        return False
    batch = session.get_one(Batch, batch_id, populate_existing=True)
    billing.post_reserve(session, batch)
    session.execute(update(Unit).where(Unit.batch_id == batch_id, Unit.state == "pending").values(state="ready"))
    return True


def fail(
    session: Session,
    batch_id: str,
    epoch: int,
    reason: Problem | None,
    problems: Sequence[Problem],
    *,
    num_problems: int,
    max_problems: int,
) -> bool:
    """End the planning: the reason of the whole file if there is one, then the problems of its windows, then these.

    `num_problems`: how many these are with those that don't fit the list. False: the lease is lost.
    """
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is None:
        return False
    first = [] if reason is None else [reason.as_json()]
    values = {
        "errors": [*first, *_listed(batch, problems, max_problems)][:max_problems],
        "errors_total": len(first) + batch.errors_total + num_problems,
        "why": Status.FAILED,
        "plan_owner": None,
        "plan_lease_ms": 0,
    }
    now = database_now_ms(session)
    fence = {"plan_epoch": epoch}
    if not lifecycle.move(session, batch_id, Status.FAILED, now_ms=now, fence=fence, values=values):
        return False
    discard_unstarted(session, batch_id)
    return True


def is_validating(session: Session, batch_id: str) -> bool:
    """Whether a batch still waits for its planning to end."""
    return session.scalar(select(Batch.status).where(Batch.id == batch_id)) == Status.VALIDATING


def discard_unstarted(session: Session, batch_id: str) -> None:
    """Forget the plan of a batch that ended while validating: rows go, objects are deleted later."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is not None and batch.status in lifecycle.TERMINAL and batch.in_progress_ms is None:
        _discard_plan(session, batch_id)


def start_over(session: Session, batch_id: str, epoch: int) -> bool:
    """Forget what was planned of a batch so far, and plan it from its first line. False: the lease is lost."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is None or batch.status != Status.VALIDATING or batch.plan_epoch != epoch:
        return False
    batch.errors, batch.errors_total, batch.warnings, batch.plan_lease_ms = None, 0, None, 0
    _discard_plan(session, batch_id)
    return True


def objects_of(windows: Sequence[Window]) -> list[WindowObject]:
    """Where the custom_ids of windows are."""
    return [WindowObject(key=window.line_nos_key, sha256=window.line_nos_sha256) for window in windows]


def _discard_plan(session: Session, batch_id: str) -> None:
    columns = ((Unit, Unit.s3_key), (Part, Part.s3_key), (Window, Window.line_nos_key))
    for table, column in columns:
        garbage_queries.discard(session, session.scalars(select(column).where(table.batch_id == batch_id)).all())
        session.execute(delete(table).where(table.batch_id == batch_id))


def _change(session: Session, batch_id: str, epoch: int, **values: Any) -> bool:
    return queries.update_batch(
        session, batch_id, from_={Status.VALIDATING}, fence={"plan_epoch": epoch}, values=values
    )


def _listed(batch: Batch, problems: Sequence[Problem], max_problems: int) -> list[Any]:
    return [*(batch.errors or ()), *(problem.as_json() for problem in problems)][:max_problems]


def _unit_row(batch: Batch, window_no: int, unit: NewUnit) -> dict[str, Any]:
    return {
        "id": ids.unit_id(),
        "batch_id": batch.id,
        "project_id": batch.project_id,
        "model_digest": unit.model_digest or batch.model_digest,
        "model_id": unit.model_id,
        "window_no": window_no,
        "no": unit.no,
        "s3_key": unit.s3_key,
        "sha256": unit.sha256,
        "num_lines": unit.num_lines,
        "est_tokens": unit.est_tokens,
        "sure_tokens": unit.sure_tokens,
        "state": "pending",
        "epoch": 0,
        "lease_ms": 0,
        "not_before_ms": 0,
        "ticket_ms": 0,
        "done_bitmap": bytes((unit.num_lines + 7) // 8),
        "num_done": 0,
        "crash_count": 0,
    }


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
