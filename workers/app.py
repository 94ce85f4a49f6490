"""The Celery workers: a control process and an engine process, each started by our own main, never by `celery -A`."""

from __future__ import annotations

import inspect
import logging
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from celery import Celery, signals
from celery.apps.worker import Worker, install_worker_term_handler
from celery.platforms import SecurityWarning
from sqlalchemy.exc import DBAPIError

from batchsvc import logs
from batchsvc.dispatch import (
    CONTROL_QUEUE,
    FINALIZE_TASK,
    PLAN_TASK,
    QUOTE_TASK,
    TICKET_TASK,
    celery_app,
    queue_of,
)
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from workers import messages
from workers.context import ControlRun, new_owner
from workers.signals import Signals
from workers.step import EngineRun, step_of
from workers.tasks import guarded

_CONTROL_THREADS = 2
_HANG_S = 30.0  # beyond the grace, in which every wait of a drain ends by itself
_DRAINING_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Role:
    """What one of our processes does in Celery's: its queue, its tasks at once, and what begins and ends with it."""

    queue: str
    threads: int
    start: Callable[[], None]
    stop: Callable[[], None]
    signalled: Callable[[], None]
    grace_s: float


def run_control(settings: Settings, signals_of: Signals) -> int:
    """Plan, finalize and reap until a signal. Returns the exit code."""
    run = ControlRun(settings)
    signals_of.watch(run.trouble)
    app = celery_app(settings.redis_url, is_worker=True)
    app.task(_logged(PLAN_TASK, run.planner.plan), name=PLAN_TASK)
    app.task(_logged(FINALIZE_TASK, run.finalizer.finalize), name=FINALIZE_TASK)
    app.task(_logged(QUOTE_TASK, run.planner.quote), name=QUOTE_TASK)
    role = Role(CONTROL_QUEUE, _CONTROL_THREADS, run.start, run.stop, run.signalled, settings.term_grace_s)
    code = _work(app, role)
    run.close()
    return code


def run_engine(run: EngineRun, settings: Settings) -> int:
    """Serve a model until a signal. Returns the exit code; `run.failure` then says what went wrong, if anything."""
    app = celery_app(settings.redis_url, is_worker=True)
    app.conf.task_acks_late = False  # a ticket is a right, not the work: nobody needs it back
    app.task(_logged(TICKET_TASK, run.admit), name=TICKET_TASK)
    role = Role(queue_of(run.digest), 1, run.start, run.drain, run.signalled, settings.term_grace_s)
    code = _work(app, role)
    run.drain()  # does nothing unless Celery ended before its steps ran
    return run.exit_code if run.failure else code


def _work(app: Celery, role: Role) -> int:
    warnings.filterwarnings("ignore", category=SecurityWarning)  # it fears pickle as root; we take JSON alone
    for chatty in ("celery.worker.strategy", "celery.app.trace"):  # two lines a ticket
        logging.getLogger(chatty).setLevel(logging.WARNING)
    messages.install()
    app.steps["worker"].add(step_of(role.start, role.stop))
    no_setup = signals.setup_logging.connect(lambda **_: None, weak=False)  # ours is set up already
    on_signal = signals.worker_shutting_down.connect(lambda **_: _on_signal(role), weak=False)
    worker = Worker(
        app=app,
        hostname=f"{role.queue}@{new_owner()}",
        consumer_cls=messages.QuietConsumer,
        pool="threads",
        concurrency=role.threads,
        queues=[role.queue],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    worker.install_platform_tweaks = _drain_on_signals
    worker.start()
    del no_setup, on_signal
    return int(worker.exitcode or 0)


def _on_signal(role: Role) -> None:
    """In the signal handler. A drain ends within its grace; should it hang, the process ends somewhat later by SIGALRM,
    which needs no thread of ours. What it still holds then comes back by its leases."""
    if not any(signal.getitimer(signal.ITIMER_REAL)):
        signal.setitimer(signal.ITIMER_REAL, role.grace_s + _HANG_S)
    role.signalled()


def _drain_on_signals(worker: Any) -> None:
    """All signals that ask a process to end mean the same: Celery's own would restart on SIGHUP, and cut on SIGINT."""
    for name in _DRAINING_SIGNALS:
        install_worker_term_handler(worker, sig=name, verbose=False)


def _logged(name: str, do: Callable[..., object]) -> Callable[..., None]:
    """A task that never fails towards Celery: what goes wrong is logged without contents, and the reaper repeats it."""
    run = guarded(name, do)

    def task(*args: str, **unknown: object) -> None:
        try:
            inspect.signature(do).bind(*args, **unknown)
        except TypeError as error:
            messages.refuse("its task can't be called like that", error)
            return
        try:
            run(*args)
        except (ServiceError, DBAPIError) as error:
            log.warning("task.failed", task=name, **logs.where(error))

    return task
