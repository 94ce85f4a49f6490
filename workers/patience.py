"""Repeats calls to a store that doesn't answer, instead of beginning a long work again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from batchsvc.clock import monotonic_s
from batchsvc.errors import UnavailableError
from batchsvc.store.s3 import BusyError, OtherVersionError

T = TypeVar("T")

_PAUSE_S, _PAUSE_MOST_S = 0.1, 5.0

log = structlog.get_logger(__name__)


class Patience:
    """Repeats what fails for want of an answer, for at most `for_s` seconds a call. `check` may end it by raising."""

    def __init__(self, for_s: float, check: Callable[[], None]) -> None:
        self._for_s = for_s
        self._check = check

    def __call__(self, work: Callable[[], T]) -> T:
        end_s, pause_s = monotonic_s() + self._for_s, _PAUSE_S
        while True:
            self._check()
            try:
                return work()
            except (BusyError, OtherVersionError):
                raise  # these are answers
            except UnavailableError as error:
                if monotonic_s() + pause_s > end_s:
                    raise
                log.info("store.asked_again", in_s=pause_s, code=error.code)
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  spreads the load
            pause_s = min(2 * pause_s, _PAUSE_MOST_S)
