"""`python -m workers control` and `python -m workers engine`: one process each, one sentence if it can't run."""

from __future__ import annotations

import os
import sys

from batchsvc import logs
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from engine.errors import DeviceError, EngineError
from workers.exits import WorkerExit
from workers.split import check_role

_USAGE = "Usage: python -m workers control|engine"


def main(arguments: list[str]) -> int:
    """Run one role until a signal; returns the exit code."""
    if arguments not in (["control"], ["engine"]):
        sys.stderr.write(_USAGE + "\n")
        return WorkerExit.USAGE
    try:
        settings = Settings.from_env()
        logs.configure(settings.log_level)
        if arguments == ["control"]:
            from workers.app import run_control

            return run_control(settings)
        check_role(settings)
        from workers.app import run_engine
        from workers.context import open_engine_run, open_prefill_run

        if settings.role == "prefill":
            open_prefill_run(settings).run()
            return WorkerExit.STOPPED
        run = open_engine_run(settings)
        code = run_engine(run, settings)
        if run.failure:
            sys.stderr.write(run.failure + "\n")
        return code
    except (EngineError, ServiceError) as error:
        sys.stderr.write(f"{error}\n")
        return WorkerExit.DEVICE if isinstance(error, DeviceError) else WorkerExit.FAILED


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if exit_code == WorkerExit.DEVICE:  # what is left on a GPU that failed may end the process by a signal when freed
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
