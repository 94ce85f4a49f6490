"""How many bytes of files a key and its project may keep: whoever adds one counts it here, in the same transaction.

Results of batches count, and are never refused: what was paid for is delivered. Pending uploads count to their project,
so that many begun at once don't go beyond it; to a key, which they aren't noted with, each counts alone. Where there is
no limit, nothing is added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.accounts.limits import Limits
from batchsvc.accounts.service import Caller
from batchsvc.db.session import database_now_ms
from batchsvc.errors import LimitError
from batchsvc.files import queries, upload_queries
from batchsvc.files.tables import File

_RETRY_AFTER_S = 60


class _Held(NamedTuple):
    """A limit, who has it, and what its owner keeps already or has announced."""

    owner: str
    limit: int
    stored_bytes: int


def count(session: Session, caller: Caller, row: File, default: Limits) -> File:
    """Count a file that was just recorded to the key that brought it. Raises LimitError where it is too much, which
    takes the file back with the transaction. One that was counted before stays as it is."""
    if row.api_key_id is None:
        row.api_key_id = caller.api_key_id
        session.flush()
        for held in _held(session, caller, default, is_locked=True):
            if held.stored_bytes > held.limit:
                raise _refusal(held, held.stored_bytes - row.size_bytes)
    return row


def count_upload(session: Session, caller: Caller, upload_id: str, num_bytes: int, default: Limits) -> None:
    """Count an upload that was just begun for `num_bytes`, or has got a part of so many. Raises LimitError where it is
    too much, which takes it back with the transaction."""
    for held in _held(session, caller, default, is_locked=True, upload_id=upload_id):
        if held.stored_bytes > held.limit:
            raise _refusal(held, max(0, held.stored_bytes - num_bytes))


def check_room(session: Session, caller: Caller, num_bytes: int, default: Limits) -> None:
    """Refuse a file by the size that its sender announces, before its bytes come. Raises LimitError."""
    for held in _held(session, caller, default, is_locked=False):
        if held.stored_bytes + num_bytes > held.limit:
            raise _refusal(held, held.stored_bytes)


def _held(
    session: Session, caller: Caller, default: Limits, *, is_locked: bool, upload_id: str | None = None
) -> Iterator[_Held]:
    of_project = caller.project_limits.or_else(default).max_stored_bytes
    of_key = caller.limits.max_stored_bytes
    if of_project is None and of_key is None:
        return
    if is_locked:  # two files at once must not both see room for one
        accounts.locked_project(session, caller.project_id)
    now_ms = database_now_ms(session)
    for owner, limit, key_id in (("project", of_project, None), ("API key", of_key, caller.api_key_id)):
        if limit is None:
            continue
        num_bytes = queries.stored_bytes(session, caller.project_id, key_id, now_ms)
        if key_id is None:
            num_bytes += upload_queries.pending_bytes(session, caller.project_id, now_ms)
        elif upload_id is not None:
            num_bytes += upload_queries.pending_bytes(session, caller.project_id, now_ms, upload_id)
        yield _Held(owner, limit, num_bytes)


def _refusal(held: _Held, stored_bytes: int) -> LimitError:
    return LimitError(
        f"This file is too much: the {held.owner} keeps {stored_bytes:,} bytes of files and begun uploads, and may "
        f"keep {held.limit:,}. Delete files, cancel uploads, or wait until some expire.",
        code="stored_bytes_exceeded",
        retry_after_s=_RETRY_AFTER_S,
        headers={
            "x-ratelimit-limit-bytes": str(held.limit),
            "x-ratelimit-remaining-bytes": str(max(0, held.limit - stored_bytes)),
        },
        is_passing=False,
    )
