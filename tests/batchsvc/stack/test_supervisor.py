"""What the supervisor says when something ends: from a log, and of an error of the operating system."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsvc.errors import ServiceError
from batchsvc.sealing import LEAST_CHARS
from batchsvc.stack import ports
from batchsvc.stack.children import EngineHooks, Secrets, specs, worker_names
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import StackOptions
from batchsvc.stack.services import WEED_PORTS
from batchsvc.stack.supervisor import Supervisor, reason_in


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['{"event": "started", "level": "info"}', "The model x can't be loaded."], "The model x can't be loaded."),
        (['{"event": "address in use", "level": "error"}', '{"event": "bye", "level": "info"}'], "address in use"),
        (['{"event": "bye", "level": "info"}'], ""),
        (["7"], ""),
        ([], ""),
    ],
)
def test_the_reason_is_a_sentence_not_a_log_event(lines: list[str], reason: str) -> None:
    assert reason_in(lines) == reason


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A supervisor takes the process's signals; the next test gets them back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("number", "name", "says"),
    [
        (errno.EMFILE, None, "The stack can't run (too many)."),
        (errno.ENOENT, "/usr/bin/weed", "The stack can't run (too many: /usr/bin/weed)."),
        (errno.ENOSPC, None, "is full"),
        (errno.EACCES, "{root}/run/ports.json", "The data directory {root} can't be written"),
    ],
)
def test_only_errors_of_the_data_directory_are_blamed_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str | None, says: str
) -> None:
    def broken(*_arguments: object, **_options: object) -> None:
        raise OSError(number, "too many", name.format(root=tmp_path) if name else None)

    monkeypatch.setattr(ports, "choose", broken)
    with pytest.raises(ServiceError) as told:
        Supervisor(StackOptions(root=tmp_path), lambda _: None).run(lambda _: None)
    assert says.format(root=tmp_path) in told.value.message
    assert ("data directory" in told.value.message) == ("run" in (name or "") or number == errno.ENOSPC)


def test_each_model_has_an_engine_worker_of_its_own(tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "d")
    directory.create()
    options = StackOptions(root=tmp_path, model="a", more_models=("b", "a", "c"))
    assert StackOptions.from_json(options.to_json()) == options and options.models == ("a", "b", "c")
    numbers = dict.fromkeys(("api", "valkey", *WEED_PORTS, *worker_names(options)), 1)
    hooks = EngineHooks(is_alive=lambda _: True, free_leases=lambda _: None)
    found = specs(directory, options, numbers, Secrets.of(directory), hooks)
    engines = [spec for spec in found if spec.role == "engine"]
    assert [spec.name for spec in engines] == ["engine", "engine-2", "engine-3"]
    assert [spec.command.env["BATCHSVC_MODEL"] for spec in engines] == ["a", "b", "c"]
    assert all(spec.signals for spec in found if not spec.is_data), "and each shows how it is"
    assert [spec.role for spec in found if spec.role != "engine"] == ["valkey", "seaweedfs", "api", "control"]
    keys = {spec.command.env.get("BATCHSVC_SECRET_KEY") for spec in found if not spec.is_data}
    assert keys == {Secrets.of(directory).sealing} and len(keys.pop() or "") >= LEAST_CHARS
