"""Rebuilds the damaged objects of a planned window from the pinned input: read it again, plan it again, compare.

Planning is a function of the input and the settings, so what is made again has the same SHA-256 as what was lost; only
then does it take its place, under the key of a new plan epoch, and a unit's done bitmap means what it meant. What
can't be made again (the input was replaced, the model is gone, limits of units were changed) is given up: its lines
become error lines, and the batch ends. An error part may differ in its bytes, as long as it rejects as many lines.
"""

from __future__ import annotations

import hashlib

import structlog

from batchsvc.batches import repair_queries, window, window_file
from batchsvc.batches.damage import DamagedObjectError
from batchsvc.batches.kept_lease import KeptLease, LeaseLostError
from batchsvc.batches.plan_queries import RejectedPart, WindowObject
from batchsvc.batches.reading import BatchFailedError, PlanContext, WindowReader
from batchsvc.batches.repair_queries import Broken, Rebuilt
from batchsvc.batches.unit_plan import by_model, error_part, unit_objects
from batchsvc.batches.window import WindowDraft
from batchsvc.batches.window_file import WindowLines
from batchsvc.files.lines import UnreadableFileError
from batchsvc.store import keys

_NO_LIMIT = 1 << 62

log = structlog.get_logger(__name__)


def rebuild_next_window(context: PlanContext, batch_id: str, owner: str) -> bool:
    """Rebuild the first damaged window of a batch. False: there is none, or somebody else is at it, or was faster."""
    db, lease_s = context.db, context.settings.lease_s
    broken = db.run(lambda session: repair_queries.claim(session, batch_id, owner, lease_s))
    if broken is None:
        return False
    context = context.pinned(broken.claim)
    epoch = broken.claim.epoch
    lease = KeptLease(
        lambda: db.run(lambda s: repair_queries.keep(s, batch_id, epoch, lease_s)), context.settings.renew_s
    )
    try:
        with lease:
            rebuilt = _rebuild(context, broken, lease)
    except LeaseLostError:
        return False
    log.warning(
        "window.rebuilt",
        batch=batch_id,
        window=broken.claim.window_no,
        units=len(rebuilt.units),
        lost_units=len(broken.units) - len(rebuilt.units),
        rejected=rebuilt.rejected.num_lines if rebuilt.rejected else 0,
    )
    return db.run(lambda session: repair_queries.commit(session, broken, rebuilt))


def _rebuild(context: PlanContext, broken: Broken, lease: KeptLease) -> Rebuilt:
    nothing = Rebuilt(units={}, rejected=None, line_nos=None)
    claim = broken.claim
    reader = WindowReader(context, claim, keep=lease.check, path_of=lambda name: broken.model_paths.get(name, ""))
    limits = window.Limits(
        window_lines=broken.num_lines,
        window_tokens=_NO_LIMIT,
        lines_left=broken.num_lines,
        max_problems=0,
        default_max_tokens=context.settings.default_max_tokens,
    )
    try:
        draft = reader.read(limits)
    except (BatchFailedError, UnreadableFileError, DamagedObjectError) as error:
        log.warning("window.not_read", batch=claim.batch_id, window=claim.window_no, says=str(error))
        return nothing
    if len(draft.line_nos) != broken.num_lines or reader.model_id != (claim.model_id or reader.model_id):
        return nothing
    return Rebuilt(
        units=_units(context, broken, draft, lease) if broken.units else {},
        rejected=_rejected(context, broken, draft),
        line_nos=_line_nos(context, broken, draft),
    )


def _units(context: PlanContext, broken: Broken, draft: WindowDraft, lease: KeptLease) -> dict[str, str]:
    wanted: dict[str, list[str]] = {}
    for unit_id, sha256 in broken.units.items():
        wanted.setdefault(sha256, []).append(unit_id)
    made: dict[str, str] = {}
    groups = by_model(draft.requests).values()
    for no, unit in enumerate(unit for group in groups for unit in unit_objects(group, context.settings)):
        lease.check()
        if unit.sha256 in wanted:
            key = keys.unit(broken.claim.batch_id, broken.claim.epoch, no)
            context.store.put(key, unit.data)
            made.update(dict.fromkeys(wanted[unit.sha256], key))
    return made


def _rejected(context: PlanContext, broken: Broken, draft: WindowDraft) -> RejectedPart | None:
    if not broken.num_rejected or len(draft.rejected) != broken.num_rejected:
        return None
    part, data = error_part(broken.claim.batch_id, broken.claim.epoch, draft.rejected)
    context.store.put(part.s3_key, data)
    return part


def _line_nos(context: PlanContext, broken: Broken, draft: WindowDraft) -> WindowObject | None:
    data = window_file.write(WindowLines(draft.line_nos, draft.custom_ids))
    sha256 = hashlib.sha256(data).hexdigest()
    if broken.line_nos_sha256 not in ("", sha256):
        return None
    key = keys.window_lines(broken.claim.batch_id, broken.claim.epoch, broken.claim.window_no)
    context.store.put(key, data)
    return WindowObject(key=key, sha256=sha256)
