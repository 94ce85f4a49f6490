"""What can be done with quotes: ask for one, plan it while the caller waits if it is small, look at it."""

from __future__ import annotations

from sqlalchemy.orm import Session

from batchsvc.accounts.service import Caller
from batchsvc.batches import quote_queries, terms
from batchsvc.batches.model_pins import BY_LINE
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.quote_planning import plan_next_window
from batchsvc.batches.quote_schemas import CreateQuote
from batchsvc.batches.reading import PlanContext
from batchsvc.batches.tables import Quote
from batchsvc.batches.texts_here import NotHereError
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError, UnavailableError
from batchsvc.files import service as files
from batchsvc.files.formats import HEAD_BYTES, is_plain
from batchsvc.files.lines import UnreadableFileError
from batchsvc.files.plain import limits_of, plain_file
from batchsvc.settings import Settings

INLINE_LINES = 2_000
_INLINE_BYTES = 64 * 1024 * 1024
_INLINE_DECODED_BYTES = 256 * 1024  # of a file that has to be decoded first, and grows by it
_PINNED_SETTINGS = ("window_lines", "window_tokens", "default_max_tokens", "max_line_bytes", "max_input_bytes")


def create_quote(session: Session, caller: Caller, body: CreateQuote, settings: Settings, *, quote_id: str) -> Quote:
    """A new quote, queued, with prices, names and settings pinned. Raises InvalidRequestError, naming the param.

    `quote_id` is fresh, and chosen by the caller, so that a transaction whose answer was lost can be run again.
    """
    if (made := quote_queries.quote(session, caller.project_id, quote_id)) is not None:
        return made
    window = terms.window_of(body.endpoint, body.completion_window, settings)
    now = database_now_ms(session)
    file = terms.input_file(session, caller.project_id, body.input_file_id)
    _check(body)
    pinned = terms.pinned_now(session, window, body.model, now, project_id=caller.project_id)
    row = Quote(
        id=quote_id,
        project_id=caller.project_id,
        api_key_id=caller.api_key_id,
        status=quote_queries.QUEUED,
        sample_lines=body.sample,
        endpoint=body.endpoint,
        input_file_id=file.id,
        input_sha256=file.sha256,
        completion_window=body.completion_window,
        tier=window.tier,
        on_invalid=body.on_invalid,
        created_ms=now,
        model_requested=body.model,
        models={} if body.models == BY_LINE else None,
        price_version=pinned.price_version,
        aliases=pinned.aliases,
        plan_limits={name: getattr(settings, name) for name in _PINNED_SETTINGS},
        windows=[],
    )
    session.add(row)
    session.flush()
    return row


def _check(body: CreateQuote) -> None:
    terms.check_models(body.models, body.model)
    if body.models == BY_LINE and body.sample is not None:
        raise InvalidRequestError(
            "sample: an estimate is of one model; quote the whole file where each line names its own.",
            code="invalid_value",
            param="sample",
        )


def get(session: Session, project_id: str, quote_id: str) -> Quote:
    """A quote of this project. Raises NotFoundError."""
    row = quote_queries.quote(session, project_id, quote_id)
    if row is None:
        raise NotFoundError(f"No quote found with id '{quote_id}'.", param="quote_id")
    return row


def is_small(context: PlanContext, s3_key: str, etag: str, size_bytes: int) -> bool:
    """Whether a quote's input has so few lines that the caller can wait for its planning."""
    store = context.store
    is_jsonl = is_plain(b"".join(store.stream(s3_key, end=HEAD_BYTES)))
    if size_bytes > (_INLINE_BYTES if is_jsonl else _INLINE_DECODED_BYTES):
        return False
    try:
        plain = plain_file(store, s3_key, etag, size_bytes, limits_of(context.settings), lambda: None)
    except UnreadableFileError:
        return True  # planning says why
    breaks = 0
    for chunk in store.stream(plain.s3_key):
        breaks += chunk.count(b"\n")
        if breaks > INLINE_LINES:
            return False
    return True


def plan_here(context: PlanContext, row: Quote, owner: str) -> bool:
    """Plan a small quote in this process. False: it is for another one to plan, or to go on with."""
    with context.db.reading() as session:
        file = files.find_stored(session, row.project_id, row.input_file_id)
    try:
        if file is None or not is_small(context, file.s3_key, file.etag, file.size_bytes):
            return False
        progress = PlanProgress.AGAIN
        while progress == PlanProgress.AGAIN:
            progress = plan_next_window(context, row.id, owner)
    except (NotHereError, NotFoundError, UnavailableError):
        return False
    return progress == PlanProgress.DONE
