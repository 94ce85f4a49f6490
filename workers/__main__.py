"""`python -m workers control` and `python -m workers engine`: one process each, one sentence if it can't run."""

from __future__ import annotations

import os
import sys

from batchsvc import logs, tracing
from batchsvc.db.migrate import SchemaError, require_current
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from engine.errors import DeviceError, EngineError
from workers.exits import WorkerExit
from workers.signals import Signals
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
        logs.warn_of_settings(Settings.strangers())
        require_current(settings.database_url)
        tracing.start(settings.otlp_endpoint, arguments[0])
        with Signals.opened(settings, arguments[0]) as signals:
            if arguments == ["control"]:
                from workers.app import run_control

                return run_control(settings, signals)
            check_role(settings)
            if settings.role == "prefill":
                from workers.context import open_prefill_run

                run = open_prefill_run(settings)
                signals.watch(lambda: None)
                run.run()
                return WorkerExit.STOPPED
            return _run_engine(settings, signals)
    except SchemaError as error:
        sys.stderr.write(f"{error}\n")
        return WorkerExit.SCHEMA
    except (EngineError, ServiceError) as error:
        sys.stderr.write(f"{error}\n")
        return WorkerExit.DEVICE if isinstance(error, DeviceError) else WorkerExit.FAILED
    finally:
        tracing.stop()


def _run_engine(settings: Settings, signals: Signals) -> int:
    """Serve models until a signal. One that changes over doesn't return: it becomes its successor (switching.py)."""
    from workers import switching
    from workers.app import run_engine
    from workers.context import open_engine_run

    baton = switching.taken()
    try:
        run = open_engine_run(settings, baton)
    except switching.NotLoadedError as error:
        sys.stderr.write(f"{error} The worker goes back to another model of its own.\n")
        switching.hand_on(error.back)
        raise
    signals.watch(run.trouble, run.shown, run.digest)
    code = run_engine(run, settings)
    if run.failure:
        sys.stderr.write(run.failure + "\n")
    if run.switcher is not None and run.switcher.baton is not None:
        tracing.stop()  # what is buffered would not outlive the exec
        switching.hand_on(run.switcher.baton, unless=run.must_end)
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if exit_code == WorkerExit.DEVICE:  # what is left on a GPU that failed may end the process by a signal when freed
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
