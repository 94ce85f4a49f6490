"""What a route needs besides its arguments: the parts of this process, handed over by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from sqlalchemy.orm import Session

from batchsvc.db.session import Database
from batchsvc.dispatch import Dispatcher
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The parts of an API process.

    Files come before batches, so what a file must know of them arrives as two functions: `live_batch_of` names a
    batch that still reads a file, `discard` has an object removed later.
    """

    settings: Settings
    db: Database
    store: ObjectStore
    dispatcher: Dispatcher
    live_batch_of: Callable[[Session, str], str | None]
    discard: Callable[[Session, str], None]


def _context(request: Request) -> Context:
    return cast(Context, request.app.state.context)


ContextDep = Annotated[Context, Depends(_context)]
