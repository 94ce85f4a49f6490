"""Runs one embedded stack: starts its processes in order, restarts what crashes, stops everything in order.

One thread does it all, ten looks a second, so that no two decisions overlap:

    lock -> leftovers of a crash -> ports -> valkey, seaweedfs -> schema, prices, keys, model -> api, control, engine
    -> ready -> watch -> engine and control drain -> api -> seaweedfs, valkey

A crashed process is started again, at once the first time, later with a growing pause; an engine worker's leases are
freed first. A data service that crashes three times in a minute ends the stack with the last lines of its log. The
first SIGINT or SIGTERM lets the workers finish what they hold, the second ends them now.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from batchsvc.errors import UnavailableError
from batchsvc.stack import children, ports
from batchsvc.stack.child import Child, LogLimits, is_same, rotate
from batchsvc.stack.datadir import DataDir, Lock
from batchsvc.stack.options import STATE, ProcessState, StackOptions, StackState, leftover_state, own_identity

if TYPE_CHECKING:
    from batchsvc.db.session import Database

_TICK_S = 0.1
_LOGS_S = 1.0  # how often a long log is looked for
_DATA_READY_S = 90.0
_SERVICE_READY_S = 120.0
_CRASHES, _CRASH_WINDOW_S = 3, 60.0
_LONGEST_PAUSE_S = 30.0
_HASTY_S = 10.0


class _StopRequested(BaseException):
    """A signal that arrived during the start; derived so that no `except Exception` swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number


class Supervisor:
    """One stack, from lock to unlock. `say` gets a sentence for each slow phase and each surprise."""

    def __init__(self, options: StackOptions, say: Callable[[str], None]) -> None:
        self.options = options
        self.directory = DataDir.at(options.root)
        self._say = say
        self._children: list[Child] = []
        self._signals = 0
        self._is_starting = True
        self._phase = "starting"
        self._ports: dict[str, int] = {}
        self._held_ports = ports.HeldPorts()
        self._lock: Lock | None = None
        self._database: Database | None = None
        self._created = own_identity(os.getpid())
        self._host = socket.gethostname()
        self._last_state: StackState | None = None
        self._log_limits = LogLimits()
        self._next_log_look = 0.0

    def run(self, on_ready: Callable[[StackState], None]) -> None:
        """Start, call `on_ready`, and stay until a signal. Raises ServiceError in one sentence if it can't go on.

        Ctrl-C ends a stack that is ready in order; a start that it interrupts raises KeyboardInterrupt once all is
        stopped again.
        """
        self.directory.create()
        self._lock = self.directory.lock()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            self._is_starting = False
            on_ready(self._publish("ready"))
            self._watch()
        except _StopRequested as stop:
            self._is_starting = False
            if stop.number == signal.SIGINT:
                raise KeyboardInterrupt from None
        except BrokenPipeError:  # the reader of our own output has gone
            raise
        except OSError as error:
            if self.directory.is_cause(error):
                raise self.directory.explain(error) from error
            named = f": {error.filename}" if error.filename else ""
            raise UnavailableError(f"The stack can't run ({error.strerror or error}{named}).") from error
        finally:
            self._is_starting = False
            self._stop()

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        directory, options = self.directory, self.options
        left_engines = _end_leftovers(directory)
        self._ports = ports.choose(
            directory,
            host=options.host,
            port=options.port,
            held=self._held_ports,
            workers=children.worker_names(options),
        )
        keys = children.Secrets.of(directory)
        hooks = children.EngineHooks(is_alive=self._engine_is_alive, free_leases=self._free_leases)
        specs = children.specs(directory, options, self._ports, keys, hooks)
        for says in children.checked(specs):
            self._say(says)
        self._log_limits = LogLimits.from_env()
        self._children = [Child(spec, directory.logs, self._log_limits) for spec in specs]
        data = [child for child in self._children if child.spec.is_data]
        ours = [child for child in self._children if not child.spec.is_data]

        self._tell("Starting " + " and ".join(_TITLES[child.spec.role] for child in data) + ".")
        for child in data:
            child.start()
        from batchsvc.db.session import Database  # a second of imports, while the data services start
        from batchsvc.stack import prepare

        self._database = Database(directory.database_url)
        prepare.prepare_database(directory, self._database)
        for pid in left_engines:  # what a killed stack was working on is free at once
            self._free_leases(pid)
        is_known = prepare.registered_path(directory, options.model) is not None
        if "engine" in options.roles:
            for model in options.models:
                prepare.prepare_model(self._database, model, self._tell)
        elif not is_known and (options.needs_model or _is_at_hand(options.model)):
            prepare.prepare_model(self._database, options.model, self._tell)
        self._wait_for(data, _DATA_READY_S)
        services = [child for child in ours if child.spec.role != "engine"]
        engines = [child for child in ours if child.spec.role == "engine"]
        for child in (*services, *engines[:1]):
            child.start()
        self._tell("Starting " + " and ".join(_TITLES[child.spec.role] for child in services) + ".")
        self._wait_for(services, _SERVICE_READY_S)
        for number, (child, model) in enumerate(zip(engines, options.models, strict=False)):
            if number:  # each plans its memory by what the ones before it have left
                child.start()
            named = "one of the models" if options.one_engine and len(options.models) > 1 else model
            self._tell(f"Loading {named} and warming up the engine.")
            self._wait_for([child], None)

    def _wait_for(self, waited: list[Child], limit_s: float | None) -> None:
        started = time.monotonic()
        while True:
            self._look()
            if all(child.state == "ready" for child in waited):
                return
            if limit_s is not None and time.monotonic() - started > limit_s:
                late = next(child for child in waited if child.state != "ready")
                raise UnavailableError(f"{late.spec.name} isn't ready after {limit_s:.0f} s: see {late.log}.")
            time.sleep(_TICK_S)

    # -- watch ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._signals:
            self._look()
            time.sleep(_TICK_S)

    def _look(self) -> None:
        """One look at every child: what ended is handled, what became ready is noted, what may start again starts."""
        now = time.monotonic()
        for child in self._children:
            code = child.exit_code()
            if child.state in ("starting", "ready") and code is not None:
                self._on_crash(child, code, now)
            elif child.state == "starting" and child.pid and child.spec.is_ready(child.pid):
                child.state = "ready"
                if not self._is_starting:
                    self._say(f"{child.spec.name} is ready again")
            elif child.state == "restarting" and now >= child.restart_at:
                child.start()
        if now >= self._next_log_look:
            self._next_log_look = now + _LOGS_S
            self._bound_logs()
        self._publish(self._phase)

    def _bound_logs(self) -> None:
        """Move long logs aside, also our own; a disk that is full for a copy must not end a stack that works."""
        try:
            for child in self._children:
                child.bound_log()
            rotate(self.directory.logs / "supervisor.log", self._log_limits, is_open=True)
        except OSError as error:
            self._say(str(self.directory.explain(error)))

    def _on_crash(self, child: Child, code: int, now: float) -> None:
        name, pid = child.spec.name, child.pid
        if child.spec.on_death and pid:
            child.spec.on_death(pid)
        recent = [at for at in child.crashes if now - at < _CRASH_WINDOW_S]
        child.crashes.append(now)
        lines = [line for line in child.last_lines() if line.strip()]
        if self._is_starting and code > 0 and not child.spec.is_data:
            why = reason_in(lines) or f"it ended with exit code {code}."
            title = _TITLES[child.spec.role][:1].upper() + _TITLES[child.spec.role][1:]
            raise UnavailableError(f"{title} can't start: {why} (log: {child.log})")
        if child.spec.is_data and len(recent) + 1 >= _CRASHES:
            raise UnavailableError(
                f"{_TITLES[child.spec.role]} crashed {_CRASHES} times in a minute; the end of {child.log}:\n"
                + "\n".join(lines)
            )
        pause = 0.0 if not recent else min(_LONGEST_PAUSE_S, 0.5 * 2 ** len(recent))
        child.restart_at, child.state = now + pause, "restarting"
        said = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        why = f" ({reason})" if code > 0 and (reason := reason_in(lines)) else ""
        self._say(f"{name} (pid {pid}) ended {said}{why}; it starts again" + (f" in {pause:.0f} s" if pause else ""))

    # -- stop ----------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        self._phase = "stopping"
        for names in (("engine", "control"), ("api",), ("seaweedfs", "valkey")):
            group = [child for child in self._children if child.spec.role in names]
            for child in group:
                child.terminate()
            self._publish(self._phase)
            deadline = time.monotonic() + max((child.spec.grace_s for child in group), default=0)
            is_hasty = False
            while any(child.pid and child.exit_code() is None for child in group) and time.monotonic() < deadline:
                if self._signals > 1 and not is_hasty and "engine" in names:
                    is_hasty, deadline = True, time.monotonic() + _HASTY_S
                    for child in group:
                        child.terminate()  # the second signal: write what is finished, wait for nothing
                time.sleep(0.05)
            for child in group:
                child.kill()
                child.state = "stopped"
                if child.spec.on_death and child.pid:
                    child.spec.on_death(child.pid)
        if self._ports:
            children.remove_sockets(self._ports)
        if self._database:
            self._database.dispose()
        (self.directory.run / STATE).unlink(missing_ok=True)
        self._held_ports.release()
        if self._lock:
            self._lock.release()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        if self._is_starting:
            self._is_starting = False
            raise _StopRequested(number)

    # -- what it knows -------------------------------------------------------------------------------------------

    def _tell(self, phase: str) -> None:
        self._phase = phase
        self._publish(phase)
        self._say(phase)

    def _publish(self, phase: str) -> StackState:
        state = StackState(
            pid=os.getpid(),
            created=self._created,
            purpose=self.options.purpose,
            url=children.api_url(self.options, self._ports) if self._ports else "",
            model=self.options.model,
            models=self.options.models,
            roles=self.options.roles,
            phase=phase,
            host=self.options.host,
            force_format=self.options.force_format,
            drafting=self.options.drafting,
            is_ready=phase != "stopping" and bool(self._children) and all(c.state == "ready" for c in self._children),
            processes=tuple(
                ProcessState(name=c.spec.name, pid=c.pid, created=c.created, state=c.state, signals=c.spec.signals)
                for c in self._children
            ),
        )
        if state != self._last_state:
            self._last_state, self._phase = state, phase
            try:
                self.directory.write_json(STATE, state.to_json())
            except OSError as error:  # a full disk must not end a stack that works
                self._say(str(self.directory.explain(error)))
        return state

    def _engine_is_alive(self, pid: int) -> bool:
        from batchsvc.batches import worker_queries

        assert self._database is not None, "the database is opened before any engine starts"
        with self._database.reading() as session:
            return worker_queries.is_beating(session, self._host, pid)

    def _free_leases(self, pid: int) -> None:
        from sqlalchemy.orm import Session

        from batchsvc.batches import unit_queries, worker_queries

        def free(session: Session) -> int:
            freed = unit_queries.free_owner(session, self._host, pid)
            worker_queries.mark_dead(session, self._host, pid)
            return freed

        assert self._database is not None, "the database is opened before any engine starts"
        try:
            freed = self._database.run(free)
        except Exception as error:  # the reaper frees them later; the stack must go on
            self._say(f"the leases of pid {pid} could not be freed now ({error}); they run out by themselves")
            return
        if freed and not self._signals:
            self._say(f"{freed} units of pid {pid} are free again")


_TITLES = {
    "valkey": "Valkey",
    "seaweedfs": "SeaweedFS",
    "api": "the API",
    "control": "the control worker",
    "engine": "the engine worker",
}


def reason_in(lines: list[str]) -> str:
    """The sentence in the last lines of a log that says why a process ended: plain text, or an event of an error."""
    for text in reversed(lines):
        try:
            event = json.loads(text)
        except ValueError:
            return text.strip()
        if isinstance(event, dict) and event.get("level") in ("error", "critical"):
            return str(event.get("event"))
    return ""


def _is_at_hand(model: str) -> bool:
    """Whether a model that we ship is in the cache: then batches may name it, whatever the stack was started for."""
    from engine.load.fetch import KNOWN_MODELS, cached_path

    return model in KNOWN_MODELS and cached_path(model) is not None


def _end_leftovers(directory: DataDir) -> list[int]:
    """End processes that a killed supervisor left: only those whose pid and start time its state file names.

    Returns the pids of the engine workers that it had.
    """
    state = leftover_state(directory)
    if state is None:
        return []
    left = [p.pid for p in state.processes if p.pid is not None and is_same(p.pid, p.created)]
    for pid in left:
        try:
            process = psutil.Process(pid)
            process.kill()
            process.wait(10)
        except psutil.Error:
            continue
    return [p.pid for p in state.processes if p.pid is not None and p.name.startswith("engine")]
