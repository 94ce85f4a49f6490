"""Messages to the workers: control tasks by name, tickets by model. With workers/app.py the only user of Celery.

A message is a hint. Losing one, or all of Redis, costs time and nothing else, because the reaper sends what is
missing. So sending never waits and never fails its caller: a thread sends in the background, and what doesn't fit
its buffer or meets a dead broker is dropped.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import redis
import structlog
from celery import Celery

from batchsvc import counters, mode

CONTROL_QUEUE = "ctl"
PLAN_TASK = "batch.plan"
FINALIZE_TASK = "batch.finalize"
QUOTE_TASK = "quote.plan"
TICKET_TASK = "unit.run"

_KEY_PREFIX = "batchsvc:"
_BUFFER = 10_000  # messages that wait to be sent; more are dropped
_CLOSE_S = 5.0
_TIMEOUT_S = 2.0

log = structlog.get_logger(__name__)


def queue_of(digest: str) -> str:
    """The queue of a model's tickets."""
    return "m." + digest[:16]


class Dispatcher(Protocol):
    """Sends hints to the workers. No method waits for the broker, except `waiting`, and none raises."""

    def plan(self, batch_id: str) -> None:
        """Ask a control worker to plan the next window of a batch."""

    def finalize(self, batch_id: str) -> None:
        """Ask a control worker to finalize a batch."""

    def quote(self, quote_id: str) -> None:
        """Ask a control worker to plan the next window of a quote."""

    def ticket(self, digest: str, count: int = 1) -> None:
        """Send `count` tickets: each is the right to claim one unit of this model."""

    def waiting(self, queue_name: str) -> int | None:
        """Messages in a queue, or None if the broker doesn't answer."""

    def close(self) -> None:
        """Send what is buffered, for a few seconds at most, and stop."""


@dataclass(frozen=True, slots=True)
class _Message:
    task: str
    args: tuple[str, ...]
    queue: str
    count: int = 1


class CeleryDispatcher:
    """Sends through Celery and Redis from one background thread."""

    def __init__(self, redis_url: str) -> None:
        self._app = celery_app(redis_url, is_worker=False)
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        self._buffer: queue.Queue[_Message | None] = queue.Queue(_BUFFER)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def plan(self, batch_id: str) -> None:
        self._send(_Message(PLAN_TASK, (batch_id,), CONTROL_QUEUE))

    def finalize(self, batch_id: str) -> None:
        self._send(_Message(FINALIZE_TASK, (batch_id,), CONTROL_QUEUE))

    def quote(self, quote_id: str) -> None:
        self._send(_Message(QUOTE_TASK, (quote_id,), CONTROL_QUEUE))

    def ticket(self, digest: str, count: int = 1) -> None:
        if count > 0 and digest != mode.DIGEST:  # the engine of test mode looks in SQL alone
            self._send(_Message(TICKET_TASK, (), queue_of(digest), count))

    def waiting(self, queue_name: str) -> int | None:
        try:
            return int(self._redis.llen(_KEY_PREFIX + queue_name))
        except redis.RedisError:
            return None

    def close(self) -> None:
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._buffer.put_nowait(None)
                thread.join(_CLOSE_S)
            except queue.Full:
                pass  # the broker is dead and the process ends: these were hints
        self._redis.close()

    def _send(self, message: _Message) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dispatch", daemon=True)
                self._thread.start()
        try:
            self._buffer.put_nowait(message)
        except queue.Full:
            counters.HINTS_DROPPED.inc()
            log.warning("dispatch.dropped", task=message.task)

    def _run(self) -> None:
        while (message := self._buffer.get()) is not None:
            try:
                for _ in range(message.count):
                    self._app.send_task(message.task, args=message.args, queue=message.queue, retry=False)
            except Exception as error:  # whatever the broker's client raises: the message was a hint
                dropped = self._drop()
                counters.HINTS_DROPPED.inc(dropped)
                log.warning("dispatch.failed", task=message.task, error=type(error).__name__, dropped=dropped)

    def _drop(self) -> int:
        """Forget what is buffered: every message would wait for the same dead broker. Keeps the end mark."""
        dropped = 1
        while True:
            try:
                message = self._buffer.get_nowait()
            except queue.Empty:
                return dropped
            if message is None:
                self._buffer.put_nowait(None)
                return dropped
            dropped += 1


def celery_app(redis_url: str, *, is_worker: bool) -> Celery:
    """Celery with the settings that both ends share. A worker waits for its broker for ever, a sender never."""
    transport: dict[str, Any] = {
        "global_keyprefix": _KEY_PREFIX,
        "visibility_timeout": 900,
        "unacked_restore_interval": 10,
        "unacked_restore_throttle": 1,
        "socket_timeout": 10 if is_worker else _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "socket_keepalive": True,
        "health_check_interval": 15,
    }
    if not is_worker:
        transport["max_retries"] = 0  # else the connection itself is retried for seconds, whatever `retry` says
    app = Celery("batchsvc", broker=redis_url, backend=None, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=False,
        task_publish_retry=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_soft_shutdown_timeout=0,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options=transport,
        event_queue_ttl=60,
    )
    return app
