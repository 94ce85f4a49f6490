"""What a worker does with messages that it can't use: refuses them, in a log event without their contents.

Whoever can write to Redis can put anything into a queue. Celery would end its connection over text that is no JSON, and
log the body of what it can't decode or doesn't know. Here such a message is dropped: every message is a hint, and the
reaper sends what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty
from typing import Any

import structlog
from celery.worker.consumer import Consumer
from kombu.transport import TRANSPORT_ALIASES
from kombu.transport import redis as redis_transport
from redis.exceptions import OutOfMemoryError

_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)  # what parsing an envelope raises

_brpop_read: Callable[..., Any] = redis_transport.Channel._brpop_read

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
        return _brpop_read(channel, **options)
    except _MALFORMED as error:
        refuse("it is no message", error)
        raise Empty from error


def _create_task_handler(consumer: Any) -> Callable[[Any], None]:
    handle = Consumer.create_task_handler(consumer)

    def on_message(message: Any) -> None:
        if not _is_plain(message):
            _drop(consumer, message, "it isn't a message of ours")
            return
        try:
            handle(message)
        except consumer.connection_errors:
            raise
        except Exception as error:  # left alone, the message would stay unacknowledged and block the next one for ever
            _drop(consumer, message, "its envelope can't be used", error)

    return on_message


def _is_plain(message: Any) -> bool:
    """Whether a message looks like those that we send: a task by name, to be done now, as JSON."""
    headers = message.headers
    return (
        isinstance(headers, dict)
        and isinstance(headers.get("task"), str)
        and isinstance(headers.get("id"), str)
        and message.content_type == "application/json"
        and all(headers.get(name) is None for name in ("eta", "expires"))
        and headers.get("timelimit") in (None, [None, None])
    )


def _on_decode_error(consumer: Any, message: Any, error: BaseException) -> None:
    _drop(consumer, message, "it can't be decoded", error)


def _on_unknown_message(consumer: Any, _body: Any, message: Any) -> None:
    _drop(consumer, message, "it names no task")


def _on_unknown_task(consumer: Any, _body: Any, message: Any, error: BaseException) -> None:
    _drop(consumer, message, "it names a task that isn't ours", error)


def _on_invalid_task(consumer: Any, _body: Any, message: Any, error: BaseException) -> None:
    _drop(consumer, message, "its task can't be called like that", error)


def _drop(consumer: Any, message: Any, reason: str, error: BaseException | None = None) -> None:
    refuse(reason, error)
    if not message.acknowledged:
        message.reject_log_error(logging.getLogger(__name__), consumer.connection_errors)


_Channel = type("_Channel", (redis_transport.Channel,), {"_brpop_read": _read})
Transport = type(
    "Transport",
    (redis_transport.Transport,),
    # a Redis that is full refuses writes for a while: connect again, as when it is away, instead of ending the worker
    {"Channel": _Channel, "connection_errors": (*redis_transport.Transport.connection_errors, OutOfMemoryError)},
)
QuietConsumer = type(
    "QuietConsumer",
    (Consumer,),
    {
        "create_task_handler": _create_task_handler,
        "on_decode_error": _on_decode_error,
        "on_unknown_message": _on_unknown_message,
        "on_unknown_task": _on_unknown_task,
        "on_invalid_task": _on_invalid_task,
    },
)
