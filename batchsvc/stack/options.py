"""What a stack is asked to be, and what it says of itself: the words that commands and supervisor share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from batchsvc.stack.child import created_of, is_same
from batchsvc.stack.datadir import DataDir

STATE = "state.json"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_MODEL = "smollm2-135m"

Role = Literal["valkey", "seaweedfs", "api", "control", "engine"]
ALL: tuple[Role, ...] = ("valkey", "seaweedfs", "api", "control", "engine")
READING: tuple[Role, ...] = ("seaweedfs", "api")  # enough to upload, create, list and fetch
CANCELLING: tuple[Role, ...] = ("valkey", "seaweedfs", "api", "control")  # enough to end a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What proposes tokens in the engine of a stack's first model; None: as the environment's settings say."""

    spec: str | None = None
    draft: str | None = None

    def env(self) -> dict[str, str]:
        """The same as settings of that engine."""
        named = {"BATCHSVC_SPEC": self.spec, "BATCHSVC_DRAFT": self.draft}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """One start of a stack. `purpose` is the command that owns it: `up` stays, any other ends with its command.

    `needs_model`: the model is fetched and registered even if no engine is among the roles. `more_models` have an
    engine worker each, beside that of `model`; with `one_engine`, one serves them all in turn. `force_format`: formats
    are served that are over their limits.
    """

    root: Path
    host: str = DEFAULT_HOST
    port: int | None = None
    model: str = DEFAULT_MODEL
    more_models: tuple[str, ...] = ()
    purpose: str = "up"
    roles: tuple[Role, ...] = ALL
    needs_model: bool = False
    one_engine: bool = False
    force_format: bool = False
    drafting: Drafting = Drafting()

    @property
    def models(self) -> tuple[str, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys((self.model, *self.more_models)))

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "root": str(self.root)})

    @classmethod
    def from_json(cls, text: str) -> StackOptions:
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("roles", "more_models")}
        return cls(**{**values, "root": Path(values["root"]), "drafting": Drafting(**values["drafting"]), **lists})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process as `status` shows it."""

    name: str
    pid: int | None
    created: float
    state: str
    signals: str = ""  # where it serves /livez, /readyz and /metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """What run/state.json says. `is_ready`: every process of the stack does its work. `force_format` and `drafting` are
    those of its start."""

    pid: int
    created: float
    purpose: str
    url: str
    model: str
    roles: tuple[str, ...]
    phase: str
    host: str = DEFAULT_HOST
    models: tuple[str, ...] = ()
    force_format: bool = False
    drafting: Drafting = Drafting()
    is_ready: bool = False
    processes: tuple[ProcessState, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_state(directory: DataDir) -> StackState | None:
    """The state of the stack that runs in this directory; None if none runs (a file left by a crash doesn't count)."""
    state = _parse(directory.read_json(STATE))
    return state if state is not None and is_same(state.pid, state.created) else None


def leftover_state(directory: DataDir) -> StackState | None:
    """The state file whatever its age: for the next start, which ends what a crash left behind."""
    return _parse(directory.read_json(STATE))


def live_processes(state: StackState) -> tuple[ProcessState, ...]:
    """The processes, with `stopped` for those that have died since the file was written."""
    seen = []
    for process in state.processes:
        alive = process.pid is not None and is_same(process.pid, process.created)
        if alive or process.state not in ("ready", "starting"):
            seen.append(process)
        else:
            seen.append(
                ProcessState(name=process.name, pid=None, created=0.0, state="stopped", signals=process.signals)
            )
    return tuple(seen)


def own_identity(pid: int) -> float:
    """Start time of a process that certainly lives."""
    return created_of(pid) or 0.0


def _parse(found: Any) -> StackState | None:
    if not isinstance(found, dict):
        return None
    try:
        processes = tuple(ProcessState(**p) for p in found["processes"])
        lists = {name: tuple(found.get(name, ())) for name in ("roles", "models")}
        drafting = Drafting(**found.get("drafting", {}))
        return StackState(**{**found, **lists, "processes": processes, "drafting": drafting})
    except (KeyError, TypeError):
        return None
