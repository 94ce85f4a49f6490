"""What a worker does with messages that it can't use: refuses them, in a log event without their contents.

Whoever can write to Redis can put anything into a queue. Celery would end its connection over text that is no JSON, and
log the body of what it can't decode or doesn't know. Here such a message is dropped: every message is a hint, and the
reaper sends what is missing.
"""

from __future__ import annotations

from queue import Empty
from typing import Any

import structlog
from celery.worker.consumer import Consumer
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as redis_transport

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)  # what parsing an envelope raises

log = structlog.get_logger(__name__)


def install() -> None:
    """Have every connection of this process survive what is no message at all."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:Transport"


def refuse(reason: str, error: BaseException | None = None) -> None:
    """Say that a message was dropped."""
    log.warning("message.refused", reason=reason, error=type(error).__name__ if error else None)


def _read(channel: Any, **options: Any) -> Any:
    try:
        return redis_transport.Channel._brpop_read(channel, **options)
    except _MALFORMED as error:
        refuse("it is no message", error)
        raise Empty from error


def _on_decode_error(_consumer: Any, message: Any, error: BaseException) -> None:
    refuse("it can't be decoded", error)
    message.ack()


def _on_unknown_message(_consumer: Any, _body: Any, message: Any) -> None:
    refuse("it names no task")
    message.reject()


def _on_unknown_task(_consumer: Any, _body: Any, message: Any, error: BaseException) -> None:
    refuse("it names a task that isn't ours", error)
    message.reject()


def _on_invalid_task(_consumer: Any, _body: Any, message: Any, error: BaseException) -> None:
    refuse("its task can't be called like that", error)
    message.reject()


_Channel = type("_Channel", (redis_transport.Channel,), {"_brpop_read": _read})
Transport = type("Transport", (redis_transport.Transport,), {"Channel": _Channel})
QuietConsumer = type(
    "QuietConsumer",
    (Consumer,),
    {
        "on_decode_error": _on_decode_error,
        "on_unknown_message": _on_unknown_message,
        "on_unknown_task": _on_unknown_task,
        "on_invalid_task": _on_invalid_task,
    },
)
