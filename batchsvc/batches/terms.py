"""The terms on which a batch may be created, or quoted: its window, its input, the prices and names in force."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc.batches import completion, endpoints, models
from batchsvc.batches.completion import CompletionWindow
from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.model_pins import BY_LINE
from batchsvc.billing import service as billing
from batchsvc.errors import InvalidRequestError
from batchsvc.files import service as files
from batchsvc.files.tables import File
from batchsvc.settings import Settings

ENDPOINT = endpoints.CHAT


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The version of the price book and the alias table that are in force now."""

    price_version: int
    aliases: dict[str, str]


def window_of(endpoint: str, name: str, settings: Settings) -> CompletionWindow:
    """The window that a call asks for. Raises InvalidRequestError."""
    if endpoint not in (*endpoints.PARSERS, MESSAGES):
        known = ", ".join(endpoints.PARSERS)
        raise InvalidRequestError(
            f"endpoint: this service runs {known}; it doesn't know {endpoint[:64]}.",
            code="invalid_value",
            param="endpoint",
        )
    windows = completion.offered(settings.windows)
    if name not in windows:
        raise InvalidRequestError(
            f"completion_window: it must be {' or '.join(windows)}.", code="invalid_value", param="completion_window"
        )
    return windows[name]


def input_file(session: Session, project_id: str, file_id: str) -> File:
    """The input that a call names, held till the transaction ends. Raises InvalidRequestError."""
    file = files.find_for_batch(session, project_id, file_id)
    if file is None:
        became = files.why_gone(session, project_id, file_id)
        says = f"there is no file {file_id[:64]}" if became is None else f"{file_id} is gone: {became}; upload it again"
        raise InvalidRequestError(f"input_file_id: {says}.", code="invalid_request", param="input_file_id")
    if file.purpose != files.PURPOSE:
        raise InvalidRequestError(
            f"input_file_id: {file.id} has purpose '{file.purpose}', and an input needs '{files.PURPOSE}'.",
            code="invalid_request",
            param="input_file_id",
        )
    return file


def check_models(models: str, model: str | None) -> None:
    """Raises InvalidRequestError for a call that names a model for all lines and lets each have its own."""
    if models == BY_LINE and model is not None:
        raise InvalidRequestError(
            'models: with "by_line" each line names its model; leave out `model`.', code="invalid_value", param="models"
        )


def pinned_now(
    session: Session, window: CompletionWindow, model: str | None, now_ms: int, *, project_id: str
) -> Pinned:
    """What a batch of this window pins now. Raises InvalidRequestError when the window, or `model`, has no price."""
    version = billing.current_version(session, now_ms)
    if not billing.has_tier(session, window.tier, version):
        raise InvalidRequestError(
            f"completion_window: {window.name} has no prices here, so nothing can run in it: "
            f"version {version} of the price book lacks the tier {window.tier}.",
            code="window_not_priced",
            param="completion_window",
        )
    aliases = models.alias_table(session)
    if model is not None:
        found = models.resolve(session, model, aliases, project_id=project_id)
        if found is None:
            raise InvalidRequestError(
                f"model: there is no model {model}; GET /v1/models lists what there is.",
                code="model_not_found",
                param="model",
            )
        billing.rates_for(session, found.id, window.tier, version)
    return Pinned(price_version=version, aliases=aliases)
