"""Steps that behave in every way that steps on a GPU may."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from engine.ondevice.child import Step
from engine.ondevice.place import Place


def _raises(error: Exception) -> dict[str, Any]:
    raise error


def _dies() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def _hangs() -> dict[str, Any]:
    time.sleep(600)
    return {}


def steps(place: Place) -> list[Step]:
    process = {"process": os.getpid(), "is_toy": place.is_toy}
    illegal = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
    return [
        Step("right", lambda: process),
        Step("says no", lambda: _raises(ValueError("wrong shape"))),
        Step("goes on", lambda: process),
        Step("breaks the GPU", lambda: _raises(illegal)),
        Step("after a break", lambda: process),
        Step("dies", _dies),
        Step("hangs", _hangs, limit_s=0.5),
        Step("after all", lambda: process),
        Step("too long", lambda: process, expected_s=1e6),
    ]
