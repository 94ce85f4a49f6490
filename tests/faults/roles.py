"""What a forked process of a cluster runs: one role, in the environment that it was given."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
PRELOAD = ["pytest", "workers.app", "workers.context", "batchsvc.app", "engine.fake", "tests.faults.roles"]


def run_role(role: str, env: dict[str, str], log: str, cwd: str) -> None:
    """Become `api`, `control` or `engine`; both streams go to `log`."""
    from batchsvc import failpoints
    from tests.faults import mischief, surroundings

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(sink, stream)
    failpoints.arm(env)
    mischief.make(env)
    surroundings.surround(env)
    if role == "api":
        from batchsvc import app

        app.main()
    else:
        from workers.__main__ import main

        sys.exit(main([role]))
