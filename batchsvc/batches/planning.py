"""Planning a batch: read, check, render, tokenize, plan, write units; one window a call, resumable at every point.

1. Claim the plan lease: `plan_epoch` goes up and fences all that follows.
2. Read one window of the input from where the last one ended, check and tokenize its lines (batches/reading.py).
3. Plan it: fold duplicates, order by shared prefix, price, cut into units (batches/unit_plan.py).
4. Store units, the part of rejected lines and the window's line numbers; then commit their rows at once.
5. After the last window: `in_progress` with the money reserved and the units claimable, or `failed` with all problems.

No transaction is open while the store or the tokenizer works. A planner that is killed leaves objects that no row
names; whoever comes next repeats its window. If the custom_ids of a finished window are found damaged, planning
starts over: nothing runs yet. Knows no torch and no task queue; quotes use it as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from batchsvc import counters, failpoints
from batchsvc.batches import plan_queries, window_file
from batchsvc.batches.damage import DamagedObjectError
from batchsvc.batches.kept_lease import KeptLease, LeaseLostError
from batchsvc.batches.plan_queries import NewUnit, NewWindow, PinnedModel, PlanClaim, RejectedPart
from batchsvc.batches.reading import BatchFailedError, PlanContext, WindowReader, limits_of, why_not
from batchsvc.batches.unit_plan import by_model, error_part, unit_objects
from batchsvc.batches.window import PlannedRequest, UnusableModelError, WindowDraft
from batchsvc.batches.window_file import WindowLines
from batchsvc.billing.pricing import most_nanos
from batchsvc.errors import InvalidRequestError
from batchsvc.files.importing import PutOffError
from batchsvc.files.lines import Problem, UnreadableFileError
from batchsvc.money import TOKENS_PER_RATE
from batchsvc.store import keys

log = structlog.get_logger(__name__)


class PlanProgress(StrEnum):
    """AGAIN: call again for the next window. DONE: nothing is left to plan. LOST: somebody else plans this batch, or
    it is put off."""

    AGAIN = "again"
    DONE = "done"
    LOST = "lost"


def plan_next_window(context: PlanContext, batch_id: str, owner: str) -> PlanProgress:
    """Plans one window of a batch, and ends its planning after the last. Safe to call at any time, twice at once."""
    db, lease_s = context.db, context.settings.lease_s
    claim = db.run(lambda session: plan_queries.claim(session, batch_id, owner, lease_s))
    if isinstance(claim, bool):
        return PlanProgress.DONE if claim else PlanProgress.LOST
    failpoints.reach("plan.claimed")
    context = context.pinned(claim)
    lease = KeptLease(
        lambda: db.run(lambda s: plan_queries.keep(s, batch_id, claim.epoch, lease_s)), context.settings.renew_s
    )
    planner = _WindowPlanner(context, claim, lease)
    try:
        with lease:
            return planner.run()
    except LeaseLostError:
        planner.let_go()
        with db.transaction() as session:
            if plan_queries.is_validating(session, batch_id):
                return PlanProgress.LOST
            plan_queries.discard_unstarted(session, batch_id)
            return PlanProgress.DONE
    except PutOffError as error:
        planner.let_go(wait_s=error.wait_s)
        return PlanProgress.LOST
    except DamagedObjectError as error:
        log.warning("window.damaged", batch=batch_id, key=error.key, reason=error.reason)
        planner.let_go()
        db.run(lambda s: plan_queries.start_over(s, batch_id, claim.epoch))
        return PlanProgress.AGAIN
    except Exception:
        with suppress(SQLAlchemyError):  # the lease ends by itself, and the audit finds the objects
            planner.let_go()
        raise


class _WindowPlanner:
    """One claim: one window, fenced by one epoch."""

    def __init__(self, context: PlanContext, claim: PlanClaim, lease: KeptLease) -> None:
        self._context = context
        self._claim = claim
        self._lease = lease
        self._written: list[str] = []  # objects that no row names yet
        self._models: dict[str, PinnedModel] = {}
        self._reader = WindowReader(
            context, claim, keep=lease.check, path_of=lambda model_id: self._pinned(model_id).path
        )

    def run(self) -> PlanProgress:
        try:
            return self._plan()
        except (BatchFailedError, UnreadableFileError) as error:
            return self._fail(reason=error.problem)

    def _plan(self) -> PlanProgress:
        claim = self._claim
        draft = self._read()
        if (reason := why_not(draft, claim, self._context.settings)) is not None:
            return self._fail(draft, reason=reason)
        if draft.line_nos:
            self._commit_window(draft)
        if not draft.is_last:
            return PlanProgress.AGAIN
        if claim.num_problems + draft.num_problems:
            return self._fail()
        quota_tokens = self._context.settings.quota_tokens
        self._fenced(lambda s: plan_queries.start(s, claim.batch_id, claim.epoch, quota_tokens))
        failpoints.reach("plan.ended")
        return PlanProgress.DONE

    def let_go(self, *, wait_s: float = 0) -> None:
        """Ends the lease early and leaves what was stored for nothing to the garbage collector."""
        claim, written = self._claim, self._written
        self._context.db.run(lambda s: plan_queries.let_go(s, claim.batch_id, claim.epoch, written, wait_s=wait_s))

    def _read(self) -> WindowDraft:
        return self._reader.read(limits_of(self._claim, self._context.settings))

    def _pinned(self, model_id: str) -> PinnedModel:
        """What lines of this model run on; the first call settles it."""
        if model_id not in self._models:
            claim = self._claim
            try:
                model = self._context.db.run(lambda s: plan_queries.pin_model(s, claim.batch_id, claim.epoch, model_id))
            except InvalidRequestError as error:
                if error.code == "quote_changed":
                    raise BatchFailedError("quote_changed", error.message, "model") from error
                raise UnusableModelError(error.code or "model_not_priced", error.message) from error
            if model is None:
                raise LeaseLostError
            self._models[model_id] = model
        return self._models[model_id]

    def _commit_window(self, draft: WindowDraft) -> None:
        claim = self._claim
        units, reserve_nanos, high_nanos = self._write_units(draft.requests) if draft.requests else ([], 0, 0)
        rejected = self._write_rejected(draft) if draft.rejected else None
        lines = WindowLines(draft.line_nos, draft.custom_ids)
        line_nos_key = keys.window_lines(claim.batch_id, claim.epoch, claim.window_no)
        line_nos = window_file.write(lines)
        self._put(line_nos_key, line_nos)
        planned = NewWindow(
            first_line=draft.line_nos[0],
            last_line=draft.line_nos[-1],
            num_lines=len(draft.line_nos),
            next_offset=draft.next_offset,
            input_tokens=draft.input_tokens,
            num_prompts=draft.num_prompts,
            line_nos_key=line_nos_key,
            line_nos_sha256=hashlib.sha256(line_nos).hexdigest(),
            reserve_nanos=reserve_nanos,
            high_nanos=high_nanos,
            units=units,
            rejected=rejected,
            problems=draft.problems,
            num_problems=draft.num_problems,
            notes=draft.notes,
            keeps_lease=draft.is_last,
        )
        failpoints.reach("window.stored")
        most = self._context.settings.max_problems
        self._fenced(
            lambda s: plan_queries.add_window(
                s, claim.batch_id, claim.epoch, claim.window_no, planned, max_problems=most
            )
        )
        self._written.clear()
        counters.LINES_UNRUN.labels("rejected").inc(rejected.num_lines if rejected else 0)
        failpoints.reach("window.planned")

    def _write_units(self, requests: Sequence[PlannedRequest]) -> tuple[list[NewUnit], int, int]:
        """Stores the units of a window; also the most that its lines can cost, and their cost if answers are long."""
        claim = self._claim
        units: list[NewUnit] = []
        reserve_nanos = high_nanos = 0
        for model_id, group in by_model(requests).items():
            pinned, most, unlikely_tokens = self._pinned(model_id), 0, 0
            for no, unit in enumerate(unit_objects(group, self._context.settings), start=claim.unit_no + len(units)):
                self._lease.check()
                key = keys.unit(claim.batch_id, claim.epoch, no)
                self._put(key, unit.data)
                units.append(
                    NewUnit(
                        no=no,
                        s3_key=key,
                        sha256=unit.sha256,
                        num_lines=unit.num_lines,
                        est_tokens=unit.est_tokens,
                        sure_tokens=unit.sure_tokens,
                        model_id=model_id if claim.is_by_line else None,
                        model_digest=pinned.digest,
                    )
                )
                most += sum(
                    most_nanos(
                        pinned.rates,
                        input_tokens=len(row.prompt_ids),
                        planned_cached_tokens=row.cached_tokens(member),
                        max_tokens=row.most_output_tokens,
                    )
                    for row in unit.rows
                    for member in range(len(row.line_nos))
                )
                unlikely_tokens += sum(
                    (row.most_output_tokens - row.high_output_tokens) * len(row.line_nos) for row in unit.rows
                )
            reserve_nanos += most
            high_nanos += max(0, most - unlikely_tokens * pinned.rates.output // TOKENS_PER_RATE)
        return units, reserve_nanos, high_nanos

    def _write_rejected(self, draft: WindowDraft) -> RejectedPart:
        part, data = error_part(self._claim.batch_id, self._claim.epoch, draft.rejected)
        self._put(part.s3_key, data)
        return part

    def _put(self, key: str, data: bytes) -> None:
        self._written.append(key)  # before the call: an answer may get lost
        self._context.store.put(key, data)

    def _fail(self, uncommitted: WindowDraft | None = None, *, reason: Problem | None = None) -> PlanProgress:
        """Ends the batch for a reason of the whole file, for the problems of its lines, or for both.

        `uncommitted`: the window that was read last, if it isn't among the committed ones.
        """
        claim, most = self._claim, self._context.settings.max_problems
        problems, number = (uncommitted.problems, uncommitted.num_problems) if uncommitted else ([], 0)
        self._fenced(
            lambda s: plan_queries.fail(
                s, claim.batch_id, claim.epoch, reason, problems, num_problems=number, max_problems=most
            )
        )
        return PlanProgress.DONE

    def _fenced(self, work: Callable[[Session], bool]) -> None:
        if not self._context.db.run(work):
            raise LeaseLostError
