"""What a test may break inside a forked process: how its hints are sent, and how soon Celery delivers a task again.

TEST_HINTS=3 or 0.5    each message is sent three times, or with that chance, or (0) never
TEST_VISIBILITY_S=1    a task that runs longer than this is delivered again while it runs
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog
from celery import Celery
from kombu.transport.redis import QoS

log = structlog.get_logger(__name__)


def make(env: Mapping[str, str]) -> None:
    """Change this process as the environment asks."""
    if "TEST_HINTS" in env:
        _send_so_often(float(env["TEST_HINTS"]), random.Random(env.get("TEST_SEED", "")))
    if "TEST_VISIBILITY_S" in env:
        _deliver_again_after(float(env["TEST_VISIBILITY_S"]))


def _send_so_often(times: float, rng: random.Random) -> None:
    from batchsvc.dispatch import CeleryDispatcher

    send = CeleryDispatcher._send

    def send_some(self: CeleryDispatcher, message: Any) -> None:
        count = sum(rng.random() < times for _ in range(message.count)) if times < 1 else int(times) * message.count
        if count:
            send(self, replace(message, count=count))

    CeleryDispatcher._send = send_some


def _deliver_again_after(seconds: float) -> None:
    from workers import app

    make_app = app.celery_app

    def impatient(redis_url: str, *, is_worker: bool) -> Celery:
        made = make_app(redis_url, is_worker=is_worker)
        made.conf.broker_transport_options |= {"visibility_timeout": seconds, "unacked_restore_interval": 0.3}
        return made

    app.celery_app = impatient
    restore = QoS.restore_by_tag

    def restore_aloud(self: QoS, *args: Any, **kwargs: Any) -> Any:
        log.warning("message.delivered_again")
        return restore(self, *args, **kwargs)

    QoS.restore_by_tag = restore_aloud
