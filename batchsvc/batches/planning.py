"""Planning a batch: read, check, render, tokenize, plan, write units; one window a call, resumable at every point.

1. Claim the plan lease: `plan_epoch` goes up and fences all that follows.
2. Read one window of the input from where the last one ended, check and tokenize its lines (batches/window.py).
3. Plan it: fold duplicates, order by shared prefix, price, cut into units (engine/sched/order.py).
4. Store units, the part of rejected lines and the window's line numbers; then commit their rows at once.
5. After the last window: `in_progress` with the money reserved and the units claimable, or `failed` with all problems.

No transaction is open while the store or the tokenizer works. A planner that is killed leaves objects that no row
names; whoever comes next repeats its window. Knows no torch and no task queue; quotes use it as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from batchsvc import failpoints, ids
from batchsvc.batches import part_file, plan_queries, unit_file, window, window_file
from batchsvc.batches.plan_queries import NewUnit, NewWindow, PinnedModel, PlanClaim, RejectedPart
from batchsvc.batches.window import PlannedRequest, WindowDraft
from batchsvc.batches.window_file import WindowLines
from batchsvc.billing.pricing import most_nanos
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError
from batchsvc.files.envelope import EnvelopeCheck, SeenIds
from batchsvc.files.lines import Problem, Record, UnreadableFileError, jsonl_records
from batchsvc.files.parquet import MAGIC, RangeFile, parquet_records
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from engine.errors import ModelError
from engine.sched.order import WindowPlan, plan_window
from engine.text import TextModel


@dataclass(frozen=True, slots=True)
class PlanContext:
    """What planning works with. `text_loader` gives the text side of the model at a path; it may keep them."""

    db: Database
    store: ObjectStore
    settings: Settings
    text_loader: Callable[[str], TextModel]


class PlanProgress(StrEnum):
    """AGAIN: call again for the next window. DONE: nothing is left to plan. LOST: somebody else plans this batch."""

    AGAIN = "again"
    DONE = "done"
    LOST = "lost"


class _LeaseLostError(Exception):
    """Another planner has the batch, or it ended meanwhile."""


class _BatchFailedError(Exception):
    """The batch can't run, whatever its other lines say."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(line=None, code=code, message=message, param=param)


def plan_next_window(context: PlanContext, batch_id: str, owner: str) -> PlanProgress:
    """Plans one window of a batch, and ends its planning after the last. Safe to call at any time, twice at once."""
    lease_s = context.settings.lease_s
    claim = context.db.run(lambda session: plan_queries.claim(session, batch_id, owner, lease_s))
    if isinstance(claim, bool):
        return PlanProgress.DONE if claim else PlanProgress.LOST
    failpoints.reach("plan.claimed")
    planner = _WindowPlanner(context, claim)
    try:
        return planner.run()
    except _LeaseLostError:
        planner.let_go()
        with context.db.transaction() as session:
            if plan_queries.is_validating(session, batch_id):
                return PlanProgress.LOST
            plan_queries.discard_unstarted(session, batch_id)
            return PlanProgress.DONE
    except Exception:
        with suppress(SQLAlchemyError):  # the lease ends by itself, and the audit finds the objects
            planner.let_go()
        raise


class _WindowPlanner:
    """One claim: one window, fenced by one epoch."""

    def __init__(self, context: PlanContext, claim: PlanClaim) -> None:
        self._context = context
        self._claim = claim
        self._kept_s = monotonic_s()
        self._written: list[str] = []  # objects that no row names yet
        self._model: PinnedModel | None = None
        self._text: TextModel | None = None
        self._resolve = lru_cache(maxsize=1024)(self._resolve_anew)
        self._check: EnvelopeCheck | None = None

    def run(self) -> PlanProgress:
        try:
            return self._plan()
        except (_BatchFailedError, UnreadableFileError) as error:
            return self._fail(reason=error.problem)

    def _plan(self) -> PlanProgress:
        claim = self._claim
        draft = self._read()
        if draft.unreadable:
            return self._fail(draft, reason=draft.unreadable)
        if draft.has_too_many:
            says = f"The file has more than {self._context.settings.max_lines} requests."
            reason = Problem(line=None, code="too_many_tasks", message=says, param="input_file_id")
            return self._fail(draft, reason=reason)
        if draft.line_nos:
            self._commit_window(draft)
        elif claim.num_lines == 0:
            raise _BatchFailedError("empty_file", "The file has no requests.", "input_file_id")
        if not draft.is_last:
            return PlanProgress.AGAIN
        if claim.num_problems + draft.num_problems:
            return self._fail()
        quota_tokens = self._context.settings.quota_tokens
        self._fenced(lambda s: plan_queries.start(s, claim.batch_id, claim.epoch, quota_tokens))
        failpoints.reach("plan.ended")
        return PlanProgress.DONE

    def let_go(self) -> None:
        """Ends the lease early and leaves what was stored for nothing to the garbage collector."""
        claim, written = self._claim, self._written
        self._context.db.run(lambda s: plan_queries.let_go(s, claim.batch_id, claim.epoch, written))

    def _read(self) -> WindowDraft:
        claim, settings = self._claim, self._context.settings
        model_id = claim.model_id
        if claim.model_requested is not None:
            model_id = self._resolve(claim.model_requested)
            if model_id is None:
                raise _BatchFailedError(
                    "model_not_found", f"The model {claim.model_requested!r} does not exist here.", "model"
                )
        self._check = EnvelopeCheck(
            endpoint=claim.endpoint,
            resolve=self._resolve,
            seen=self._seen_ids(),
            model_id=model_id,
            is_model_given=claim.model_requested is not None,
        )
        with closing(self._records()) as records:
            return window.collect(
                self._check.check_all(records),
                batch_id=claim.batch_id,
                limits=window.Limits(
                    window_lines=settings.window_lines,
                    window_tokens=settings.window_tokens,
                    lines_left=settings.max_lines - claim.num_lines,
                    max_problems=max(0, settings.max_problems - claim.num_listed),
                    default_max_tokens=settings.default_max_tokens,
                ),
                offset=claim.offset,
                text_model=self._text_model,
                is_strict=claim.is_strict,
                is_failing=claim.num_problems > 0,
            )

    def _records(self) -> Generator[Record, None, None]:
        claim, settings, store = self._claim, self._context.settings, self._context.store
        source = claim.input
        info = None if source is None else store.head(source.s3_key)
        if source is None or info is None:
            raise _BatchFailedError("invalid_request", "The input file doesn't exist any more.", "input_file_id")
        if source.etag and info.etag != source.etag:
            raise _BatchFailedError("invalid_request", "The input file was replaced after its upload.", "input_file_id")

        def fetch(start: int, end: int) -> bytes:
            self._keep()
            return b"".join(store.stream(source.s3_key, start=start, end=end, etag=info.etag))

        if fetch(0, len(MAGIC)) == MAGIC:
            yield from parquet_records(
                RangeFile(info.size_bytes, fetch),
                endpoint=claim.endpoint,
                max_line_bytes=settings.max_line_bytes,
                max_decoded_bytes=settings.max_input_bytes,
                first_row=claim.offset,
            )
            return
        with closing(self._kept(store.stream(source.s3_key, start=claim.offset, etag=info.etag))) as chunks:
            yield from jsonl_records(
                chunks,
                max_line_bytes=settings.max_line_bytes,
                first_line=claim.first_line,
                offset=claim.offset,
            )

    def _seen_ids(self) -> SeenIds:
        seen = SeenIds()
        for key in self._claim.finished_windows:
            self._keep()
            seen.add_finished(*window_file.read(self._context.store.get(key)))
        return seen

    def _resolve_anew(self, name: str) -> str | None:
        with self._context.db.reading() as session:
            model = plan_queries.resolve(session, name, self._claim.aliases)
            return None if model is None else model.id

    def _text_model(self) -> TextModel:
        """The tokenizer and template of the model; the first call settles the model of the batch."""
        self._keep()
        if self._text is None:
            try:
                self._text = self._context.text_loader(self._pinned().path)
            except ModelError as error:
                raise _BatchFailedError("model_not_available", str(error), "model") from error
        return self._text

    def _pinned(self) -> PinnedModel:
        if self._model is None:
            claim = self._claim
            model_id = self._check.model_id if self._check else None
            assert model_id is not None, "a line is only rendered after the model is settled"
            try:
                model = self._context.db.run(lambda s: plan_queries.pin_model(s, claim.batch_id, claim.epoch, model_id))
            except InvalidRequestError as error:
                raise _BatchFailedError(error.code or "model_not_priced", error.message, "model") from error
            if model is None:
                raise _LeaseLostError
            self._model = model
        return self._model

    def _commit_window(self, draft: WindowDraft) -> None:
        claim = self._claim
        units, reserve_nanos = self._write_units(draft.requests) if draft.requests else ([], 0)
        rejected = self._write_rejected(draft) if draft.rejected else None
        lines = WindowLines(draft.line_nos, draft.custom_ids)
        line_nos_key = keys.window_lines(claim.batch_id, claim.epoch, claim.window_no)
        self._put(line_nos_key, window_file.write(lines))
        planned = NewWindow(
            first_line=draft.line_nos[0],
            last_line=draft.line_nos[-1],
            num_lines=len(draft.line_nos),
            next_offset=draft.next_offset,
            input_tokens=draft.input_tokens,
            line_nos_key=line_nos_key,
            reserve_nanos=reserve_nanos,
            units=units,
            rejected=rejected,
            problems=draft.problems,
            num_problems=draft.num_problems,
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
        failpoints.reach("window.planned")

    def _write_units(self, requests: Sequence[PlannedRequest]) -> tuple[list[NewUnit], int]:
        """Stores the units of a window; also the most that its lines can cost."""
        claim, settings, rates = self._claim, self._context.settings, self._pinned().rates
        plan = plan_window(
            [request.prompt for request in requests],
            [request.fold_key for request in requests],
            [request.params["max_tokens"] for request in requests],
            unit_lines=settings.unit_lines,
            unit_tokens=settings.unit_tokens,
        )
        units, reserve_nanos = [], 0
        for index, rows in enumerate(_unit_rows(plan, requests)):
            self._keep()
            data = unit_file.write(rows, plan.prefix_uses[index])
            no = claim.unit_no + index
            key = keys.unit(claim.batch_id, claim.epoch, no)
            self._put(key, data)
            units.append(
                NewUnit(
                    no=no,
                    s3_key=key,
                    sha256=hashlib.sha256(data).hexdigest(),
                    num_lines=sum(len(row.line_nos) for row in rows),
                    est_tokens=sum(row.est_tokens(0) for row in rows),
                )
            )
            reserve_nanos += sum(
                most_nanos(
                    rates,
                    input_tokens=len(row.prompt_ids),
                    planned_cached_tokens=row.cached_tokens(member),
                    max_tokens=row.max_tokens,
                )
                for row in rows
                for member in range(len(row.line_nos))
            )
        return units, reserve_nanos

    def _write_rejected(self, draft: WindowDraft) -> RejectedPart:
        claim = self._claim
        data = part_file.encode(draft.rejected)
        part_id = ids.part_id()
        key = keys.part(claim.batch_id, claim.epoch, part_id)
        self._put(key, data)
        return RejectedPart(
            id=part_id,
            s3_key=key,
            sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            num_lines=len(draft.rejected),
        )

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
            raise _LeaseLostError

    def _keep(self) -> None:
        """Prolongs the lease when it is time to."""
        settings = self._context.settings
        if monotonic_s() - self._kept_s < settings.renew_s:
            return
        started_s = monotonic_s()
        claim = self._claim
        self._fenced(lambda s: plan_queries.keep(s, claim.batch_id, claim.epoch, settings.lease_s))
        self._kept_s = started_s

    def _kept(self, chunks: Iterator[bytes]) -> Generator[bytes, None, None]:
        for chunk in chunks:
            self._keep()
            yield chunk


def _unit_rows(plan: WindowPlan, requests: Sequence[PlannedRequest]) -> Iterator[list[unit_file.UnitRow]]:
    """The rows of each unit."""
    for piece in plan.units:
        rows = []
        for planned in plan.rows[piece]:
            first = requests[planned.members[0]]
            rows.append(
                unit_file.UnitRow(
                    line_nos=tuple(requests[member].line_no for member in planned.members),
                    custom_ids=tuple(requests[member].custom_id for member in planned.members),
                    prompt_ids=np.frombuffer(first.prompt, dtype=">u4").astype(np.int32),
                    params=first.params,
                    planned_cached_tokens=planned.planned_cached_tokens,
                    max_tokens=first.params["max_tokens"],
                )
            )
        yield rows
