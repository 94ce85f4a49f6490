"""Planning a quote: the planner's own pipeline (read, check, render, tokenize, plan), and sums instead of units.

1. Claim the plan lease of the quote: `plan_epoch` goes up and fences all that follows.
2. Read the next window as the planner of the batch will, with the settings that the quote pins.
3. Plan it, add its lines up (quote_figures.py), and see what another order of the prompts would bring.
4. Commit the window's sums. After the last one the quote is ready; or it has failed, with all the problems for which
   the batch would be refused.

A planner that is killed has lost one window; whoever comes next goes on there. An estimate is one window: all lines
are read, and those of a random sample are planned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from batchsvc import failpoints
from batchsvc.batches import prompt_advice, quote_figures, quote_queries, quote_sample, window_file
from batchsvc.batches.damage import DamagedObjectError
from batchsvc.batches.kept_lease import KeptLease, LeaseLostError
from batchsvc.batches.part_file import PartLine
from batchsvc.batches.plan_queries import WindowObject
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.prompt_advice import Advice
from batchsvc.batches.quote_figures import Figures
from batchsvc.batches.quote_queries import QuoteClaim, QuotedModel, QuotedWindow
from batchsvc.batches.reading import (
    BatchFailedError,
    PlanContext,
    WindowReader,
    limits_of,
    template_sha256,
    why_not,
)
from batchsvc.batches.unit_plan import by_model, planned_units
from batchsvc.batches.window import PlannedRequest, UnusableModelError, WindowDraft
from batchsvc.batches.window_file import WindowLines
from batchsvc.errors import InvalidRequestError
from batchsvc.files.importing import PutOffError
from batchsvc.files.lines import Problem, UnreadableFileError
from batchsvc.store import keys
from engine.errors import RequestError
from engine.text import TextModel

_NO_LIMIT = 1 << 62
_ADVICE_TOKENS = 8_000_000  # of a window, that advice is computed from

log = structlog.get_logger(__name__)


def plan_next_window(context: PlanContext, quote_id: str, owner: str) -> PlanProgress:
    """Plans one window of a quote, and ends its planning after the last. Safe to call at any time, twice at once."""
    db, lease_s = context.db, context.settings.lease_s
    claim = db.run(lambda session: quote_queries.claim(session, quote_id, owner, lease_s))
    if isinstance(claim, bool):
        return PlanProgress.DONE if claim else PlanProgress.LOST
    epoch = claim.plan.epoch
    lease = KeptLease(
        lambda: db.run(lambda s: quote_queries.keep(s, quote_id, epoch, lease_s)), context.settings.renew_s
    )
    try:
        with lease:
            return _QuotePlanner(context.pinned(claim.plan), claim, lease).run()
    except LeaseLostError:
        with db.reading() as session:
            return PlanProgress.LOST if quote_queries.is_queued(session, quote_id) else PlanProgress.DONE
    except PutOffError as error:
        wait_s = error.wait_s
        db.run(lambda s: quote_queries.let_go(s, quote_id, epoch, wait_s=wait_s))
        return PlanProgress.LOST
    except DamagedObjectError as error:
        log.warning("window.damaged", quote=quote_id, key=error.key, reason=error.reason)
        db.run(lambda s: quote_queries.start_over(s, quote_id, epoch))
        return PlanProgress.AGAIN
    except Exception:
        with suppress(SQLAlchemyError):  # the lease ends by itself
            db.run(lambda s: quote_queries.let_go(s, quote_id, epoch))
        raise


class _QuotePlanner:
    """One claim: one window, fenced by one epoch."""

    def __init__(self, context: PlanContext, claim: QuoteClaim, lease: KeptLease) -> None:
        self._context = context
        self._claim = claim
        self._plan = claim.plan
        self._lease = lease
        self._models: dict[str, QuotedModel] = {}
        self._reader = WindowReader(
            context, claim.plan, keep=lease.check, path_of=lambda model_id: self._pinned(model_id).path
        )

    def run(self) -> PlanProgress:
        try:
            return self._run()
        except (BatchFailedError, UnreadableFileError) as error:
            return self._fail(reason=error.problem)

    def _run(self) -> PlanProgress:
        plan, settings = self._plan, self._context.settings
        limits = limits_of(plan, settings)
        sample = None
        if self._claim.sample_lines is None:
            draft = self._reader.read(limits, keeps_chats=0 if plan.is_by_line else _ADVICE_TOKENS)
        else:
            sample = quote_sample.Reservoir(self._claim.sample_lines, self._claim.input_sha256)
            all_drawn = replace(limits, window_lines=_NO_LIMIT, window_tokens=_NO_LIMIT)
            draft = self._reader.read(all_drawn, chosen=sample.choose)
            draft.has_too_many |= sample.num_lines > settings.max_lines
        if (reason := why_not(draft, plan, settings)) is not None:
            return self._fail(draft, reason=reason)
        if draft.line_nos:
            self._commit_window(draft, sample)
        if not draft.is_last:
            return PlanProgress.AGAIN
        if plan.num_problems + draft.num_problems:
            return self._fail()
        ttl_s = settings.quote_ttl_s
        self._fenced(lambda s: quote_queries.finish(s, plan.batch_id, plan.epoch, ttl_s))
        return PlanProgress.DONE

    def _pinned(self, model_id: str) -> QuotedModel:
        """What lines of this model are quoted by; the first call settles it."""
        if model_id not in self._models:
            plan = self._plan
            try:
                model = self._context.db.run(lambda s: quote_queries.pin_model(s, plan.batch_id, plan.epoch, model_id))
            except InvalidRequestError as error:
                raise UnusableModelError(error.code or "model_not_priced", error.message) from error
            if model is None:
                raise LeaseLostError
            self._models[model_id] = model
        return self._models[model_id]

    def _text(self, model_id: str) -> TextModel:
        return self._context.text_loader(self._pinned(model_id).path)

    def _figures(self, requests: Sequence[PlannedRequest]) -> dict[str, Figures]:
        """What the lines of each model add up to."""
        found: dict[str, Figures] = {}
        for model_id, group in by_model(requests).items():
            model, total = self._pinned(model_id), Figures()
            for rows, _ in planned_units(group, self._context.settings):
                self._lease.check()
                total += quote_figures.figures(rows, model.rates, model.lengths)
            found[model_id] = total
        return found

    def _added(self, requests: Sequence[PlannedRequest]) -> Figures:
        """The same in one sum."""
        return sum(self._figures(requests).values(), Figures())

    def _estimated(self, draft: WindowDraft, sample: quote_sample.Reservoir) -> dict[str, Any]:
        """What the sample says of the whole file: intervals, and the outputs of the sample scaled up."""
        settings, requests = self._context.settings, draft.requests
        mean_tokens = max(1, draft.input_tokens // max(1, len(requests)))
        window_lines = max(1, min(settings.window_lines, settings.window_tokens // mean_tokens))
        windows: dict[int, list[PlannedRequest]] = {}
        for request in requests:
            windows.setdefault(sample.ordinal(request.line_no) // window_lines, []).append(request)
        drawn = Figures()
        for window in windows.values():
            drawn += self._added(window)
        found = quote_sample.estimate(
            list(windows.values()),
            drawn.input_tokens - drawn.cached_tokens,
            drawn=len(draft.line_nos),
            num_lines=sample.num_lines,
        )
        return {**asdict(found), "drawn": len(draft.line_nos), "sample": asdict(drawn)}

    def _commit_window(self, draft: WindowDraft, sample: quote_sample.Reservoir | None) -> None:
        plan, settings = self._plan, self._context.settings
        window = QuotedWindow(
            last_line=draft.line_nos[-1],
            next_offset=draft.next_offset,
            num_lines=sample.num_lines if sample else len(draft.line_nos),
            num_prompts=draft.num_prompts,
            ids=None if draft.is_last else self._write_ids(draft),
            templates={model_id: template_sha256(self._text(model_id)) for model_id in by_model(draft.requests)},
            figures={} if sample else self._figures(draft.requests),
            estimate=self._estimated(draft, sample) if sample else None,
            rejected=[_problem(line) for line in draft.rejected[: settings.max_problems]],
            num_rejected=len(draft.rejected),
            problems=draft.problems,
            num_problems=draft.num_problems,
            advice=self._advice(draft) if draft.chats else None,
        )
        most = settings.max_problems
        self._fenced(
            lambda s: quote_queries.add_window(s, plan.batch_id, plan.epoch, plan.window_no, window, max_problems=most)
        )
        failpoints.reach("quote.planned")

    def _write_ids(self, draft: WindowDraft) -> WindowObject:
        key = keys.window_lines(self._plan.batch_id, self._plan.epoch, self._plan.window_no)
        data = window_file.write(WindowLines(draft.line_nos, draft.custom_ids))
        self._context.store.put(key, data)
        return WindowObject(key=key, sha256=hashlib.sha256(data).hexdigest())

    def _advice(self, draft: WindowDraft) -> Advice | None:
        """What the other order of these prompts would bring, by planning them in both. None: nothing moves."""
        other = prompt_advice.other_order(draft.chats)
        if other is None:
            return None
        requests = draft.requests[: len(draft.chats)]
        text = self._text(requests[0].model_id)
        try:
            prompts = text.encode_prompts([text.render(chat) for chat in other.chats])
        except RequestError:  # the template wants the messages as they are
            return None
        moved = [
            replace(request, prompt=np.array(prompt, dtype=">u4").tobytes())
            for request, prompt in zip(requests, prompts, strict=True)
        ]
        now, then = self._added(requests), self._added(moved)
        return Advice(
            lines=len(requests),
            moved_lines=other.num_moved,
            cached_tokens=now.cached_tokens,
            then_cached_tokens=then.cached_tokens,
            saved_nanos=now.input_nanos - then.input_nanos,
            misplaced=[
                {"text": one.text, "lines": one.chats, "line": requests[one.chat].line_no, "message": one.message}
                for one in other.misplaced
            ],
        )

    def _fail(self, uncommitted: WindowDraft | None = None, *, reason: Problem | None = None) -> PlanProgress:
        plan, most = self._plan, self._context.settings.max_problems
        problems, number = (uncommitted.problems, uncommitted.num_problems) if uncommitted else ([], 0)
        self._fenced(
            lambda s: quote_queries.fail(
                s, plan.batch_id, plan.epoch, reason, problems, num_problems=number, max_problems=most
            )
        )
        return PlanProgress.DONE

    def _fenced(self, work: Callable[[Session], bool]) -> None:
        if not self._context.db.run(work):
            raise LeaseLostError


def _problem(line: PartLine) -> Problem:
    """Why a line would get an error line."""
    row = orjson.loads(line.row)
    error = row["error"] or row["response"]["body"]["error"]
    return Problem(line=line.line_no, code=error["code"], message=error["message"], param=error.get("param"))
