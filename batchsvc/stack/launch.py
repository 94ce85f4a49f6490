"""Starts a supervisor in a process of its own, listens to it until it is ready, and stops stacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from batchsvc.errors import UnavailableError
from batchsvc.stack.child import LogLimits, inherited, is_same, rotate
from batchsvc.stack.datadir import DataDir, InUseError
from batchsvc.stack.options import StackOptions, StackState, read_state

STOP_S = 90.0


@dataclass(slots=True)
class Launched:
    """A stack that this process started, and ends when its work is done."""

    process: subprocess.Popen[str]
    state: StackState
    listener: threading.Thread | None = None

    def stop(self) -> None:
        """Ask for the ordered end and wait for it; a KeyboardInterrupt meanwhile makes it a quick one."""
        self.process.send_signal(signal.SIGTERM)
        while True:
            try:
                self.process.wait(STOP_S)
                break
            except KeyboardInterrupt:
                self.process.send_signal(signal.SIGTERM)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if self.listener is not None:
            self.listener.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def listen(self, say: Callable[[str], None]) -> None:
        """Pass on what the supervisor says from now on, in a thread of its own."""

        def pump() -> None:
            assert self.process.stdout is not None, "the supervisor was started with a pipe"
            for line in self.process.stdout:
                event = _event(line)
                if text := event.get("say") or event.get("error"):
                    say(str(text))

        self.listener = threading.Thread(target=pump, name="supervisor-events", daemon=True)
        self.listener.start()


def launch(options: StackOptions, say: Callable[[str], None]) -> Launched:
    """Start a stack and return when all its processes are ready. Raises UnavailableError in one sentence.

    A KeyboardInterrupt during the start ends the half-started stack before it goes on.
    """
    directory = DataDir.at(options.root)
    directory.create()
    log = directory.logs / "supervisor.log"
    rotate(log, LogLimits.from_env())
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batchsvc.stack", options.to_json(), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            cwd=directory.root,
            # the model is pulled by this process: proxies and HF_* stay, other services' settings do not
            env=inherited(os.environ),
            start_new_session=True,
        )
    try:
        return Launched(process, _until_ready(process, say, directory))
    except BaseException:
        Launched(process, _NO_STATE).stop()
        raise


def stop_running(*, pid: int, created: float, say: Callable[[str], None]) -> None:
    """End the stack whose supervisor is (pid, created), orderly, then by force; returns when it is gone."""
    with suppress(ProcessLookupError):  # it ends by itself at this moment
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    told = time.monotonic() + 3
    while is_same(pid, created):
        now = time.monotonic()
        if now > told:
            say("waiting for the workers to finish what they hold")
            told = deadline + 1
        if now > deadline:
            os.kill(pid, signal.SIGKILL)  # the kernel ends its children with it
            return
        time.sleep(0.05)


def wait_until_usable(directory: DataDir, roles: tuple[str, ...], limit_s: float) -> StackState | None:
    """The running stack once its API answers, or None if none runs (any more) with all these roles.

    A stack that lacks a role belongs to a short command: this waits until it has gone.
    """
    deadline = time.monotonic() + limit_s
    while True:
        state, holder = read_state(directory), directory.holder()
        if state is None and holder is None:
            return None
        if state is not None and is_usable(state, roles):
            return state
        if time.monotonic() > deadline:
            says = state.phase if state else "starting"
            raise UnavailableError(
                f"The stack in {directory.root} (pid {holder}) is not ready ({says}): try again later, or stop it "
                f"with `batchsvc down --data-dir {directory.root}`."
            )
        time.sleep(0.1)


def is_usable(state: StackState, roles: tuple[str, ...]) -> bool:
    """Whether a stack has these roles and its API answers."""
    api = next((process for process in state.processes if process.name == "api"), None)
    return set(roles) <= set(state.roles) and api is not None and api.state == "ready" and state.phase != "stopping"


def _until_ready(process: subprocess.Popen[str], say: Callable[[str], None], directory: DataDir) -> StackState:
    assert process.stdout is not None, "the supervisor was started with a pipe"
    for line in process.stdout:
        event = _event(line)
        if "say" in event:
            say(str(event["say"]))
        elif "in_use" in event:
            raise InUseError(directory.root, int(str(event["in_use"])))
        elif "error" in event:
            raise UnavailableError(str(event["error"]))
        elif "ready" in event:
            state = read_state(directory)
            if state is not None:
                return state
    raise UnavailableError(f"The stack could not start: see {directory.logs / 'supervisor.log'}.")


def _event(line: str) -> dict[str, object]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_NO_STATE = StackState(pid=0, created=0, purpose="", url="", model="", roles=(), phase="")
