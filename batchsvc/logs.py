"""Logs of every process: one JSON object a line on standard error, an event name and its fields.

Nothing here takes a body, a prompt or a key, and no exception's message either: messages quote what was sent to us.
An error is logged as its type and the places in our code that it passed.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterable
from pathlib import PurePath

import structlog

_SHOWN_FRAMES = 12


def configure(level: str) -> None:
    """Send structlog, and the standard library's logging of the packages we use, to standard error as JSON lines."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _without_exception,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(logging.INFO, getattr(logging, level.upper())), force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every URL, queries and all
    logging.getLogger("alembic").setLevel(logging.WARNING)  # each start looks at the schema: two lines that say nothing


def warn_of_settings(sentences: Iterable[str]) -> None:
    """Log what looks like a setting and is none: see batchsvc/setting_sources.py."""
    for says in sentences:
        structlog.get_logger(__name__).warning("setting.unknown", says=says)


def where(error: BaseException) -> dict[str, object]:
    """An error as fields of a log event: its type, and the last frames as `file:line function`."""
    frames = traceback.extract_tb(error.__traceback__)[-_SHOWN_FRAMES:]
    return {
        "error": type(error).__name__,
        "at": [f"{'/'.join(PurePath(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}" for frame in frames],
    }


def _without_exception(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.ProcessorReturnValue:
    exc_info = event.pop("exc_info", None)
    if isinstance(exc_info, tuple) and isinstance(exc_info[1], BaseException):
        event.update(where(exc_info[1]))
    return event
