"""How many unfinished batches a key and its project may have: a new one is refused beyond that."""

from __future__ import annotations

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.accounts.limits import Limits
from batchsvc.accounts.service import Caller
from batchsvc.batches import queries
from batchsvc.batches.lifecycle import UNFINISHED
from batchsvc.errors import LimitError

_RETRY_AFTER_S = 60


def check(session: Session, caller: Caller, default: Limits) -> None:
    """Whether there may be one more. Raises LimitError; holds the project's row where it has a limit, so that two new
    batches at once are counted one by one."""
    of_project = caller.project_limits.or_else(default).max_open_batches
    of_key = caller.limits.max_open_batches
    if of_project is None and of_key is None:
        return
    accounts.locked_project(session, caller.project_id)
    for owner, limit, key_id in (("project", of_project, None), ("API key", of_key, caller.api_key_id)):
        if limit is None:
            continue
        num_open = queries.num_open(session, caller.project_id, key_id, UNFINISHED)
        if num_open >= limit:
            raise LimitError(
                f"The {owner} has {num_open:,} unfinished batches, and may have {limit:,}: try again when one has "
                "ended.",
                code="open_batches_exceeded",
                retry_after_s=_RETRY_AFTER_S,
                headers={
                    "x-ratelimit-limit-batches": str(limit),
                    "x-ratelimit-remaining-batches": str(max(0, limit - num_open)),
                },
                is_passing=False,
            )
