"""What a quote holds a new batch to, and why a batch can't have it: everything that has changed is named.

The price version, the model's digest and template, and the settings of the planner are pinned to the batch, so that
it is planned and paid as it was quoted. Options that the call leaves out are those of the quote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.batches import model_pins, models, quote_queries
from batchsvc.batches.model_pins import BY_LINE
from batchsvc.batches.schemas import CreateBatch
from batchsvc.batches.tables import Model, Quote
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError


def quote_of(session: Session, project_id: str, body: CreateBatch) -> Quote | None:
    """The quote that a call names, or None for a call without. Raises NotFoundError."""
    if body.quote_id is None:
        return None
    row = quote_queries.quote(session, project_id, body.quote_id)
    if row is None:
        raise NotFoundError(f"No quote found with id '{body.quote_id}'.", param="quote_id")
    return row


def with_options_of(body: CreateBatch, row: Quote) -> CreateBatch:
    """The call with the quote's options where it names none itself."""
    quoted = {"model": row.model_requested, "models": _mode(row), "on_invalid": row.on_invalid}
    return body.model_copy(update={name: value for name, value in quoted.items() if name not in body.model_fields_set})


def pins(session: Session, body: CreateBatch, row: Quote, input_sha256: str) -> dict[str, Any]:
    """The columns of a batch that its quote fills.

    Raises InvalidRequestError for a quote that is no use now, or that names all in which a batch of this input would
    differ from what was quoted.
    """
    _check_usable(session, row)
    found = {pin.id: models.resolve(session, pin.id, {}, project_id=row.project_id) for pin in model_pins.pins_of(row)}
    _check_same(body, row, input_sha256, found)
    model = found.get(row.model_id or "")
    return {
        "quote_id": row.id,
        "price_version": row.price_version,
        "aliases": row.aliases,
        "model_id": row.model_id,
        "model_digest": row.model_digest,
        "template_sha256": row.template_sha256,
        "rates": row.rates,
        "models": None if row.models is None else {name: _pinned(pin, found[name]) for name, pin in row.models.items()},
        "plan_limits": row.plan_limits,
        **({} if model is None else model_pins.formats_of(model)),
    }


def _mode(row: Quote) -> str:
    return "one" if row.models is None else BY_LINE


def _pinned(pin: dict[str, Any], model: Model | None) -> dict[str, Any]:
    """What a batch pins of a model that was quoted."""
    formats = {} if model is None else model_pins.formats_of(model)
    return {**{name: pin.get(name) for name in ("digest", "rates", "template_sha256")}, **formats}


def _check_usable(session: Session, row: Quote) -> None:
    if row.sample_lines is not None:
        raise _refusal("quote_is_estimate", f"{row.id} is an estimate, which binds nobody: quote the whole file.")
    if row.status == quote_queries.QUEUED:
        raise _refusal("quote_not_ready", f"{row.id} is still being planned: poll it until it is ready.")
    if row.status == quote_queries.FAILED:
        raise _refusal("quote_failed", f"{row.id} has failed: its input was refused, so no batch can run it.")
    if (row.expires_ms or 0) <= database_now_ms(session):
        raise _refusal("quote_expired", f"{row.id} has expired: ask for a new quote.")


def _check_same(body: CreateBatch, row: Quote, input_sha256: str, found: Mapping[str, Model | None]) -> None:
    quoted = {
        "endpoint": row.endpoint,
        "completion_window": row.completion_window,
        "model": row.model_requested,
        "models": _mode(row),
        "on_invalid": row.on_invalid,
    }
    changed: dict[str, str] = {}
    if input_sha256 != row.input_sha256:
        now = input_sha256 or "(not known before it was copied)"
        changed["input_file_id"] = f"the input has the SHA-256 {now}, not {row.input_sha256}"
    for name, value in quoted.items():
        if getattr(body, name) != value:
            changed[name] = f"{name} is {getattr(body, name)}, not {value}"
    for pin in model_pins.pins_of(row):
        model = found[pin.id]
        if model is None or model.digest != pin.digest:
            now = "is gone" if model is None else f"has the digest {model.digest}"
            changed["quote_id"] = f"the model {pin.id} {now}, not {pin.digest}"
    if changed:
        param = next(iter(changed))
        raise InvalidRequestError(
            f"{param}: {row.id} was made for something else: {'; '.join(changed.values())}. Ask for a new quote.",
            code="quote_changed",
            param=param,
        )


def _refusal(code: str, says: str) -> InvalidRequestError:
    return InvalidRequestError(f"quote_id: {says}", code=code, param="quote_id")
