"""Failpoints: what arms them, what they do, and that an unarmed one does nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsvc import failpoints
from batchsvc.failpoints import FailpointError


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm({})


def test_a_point_acts_on_its_pass_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    failpoints.arm({"BATCHSVC_FAILPOINTS": "part.stored=raise@2; x.y=raise", "BATCHSVC_FAILPOINTS_LOG": str(log)})
    failpoints.reach("part.stored")
    with pytest.raises(FailpointError):
        failpoints.reach("part.stored")
    failpoints.reach("part.stored")
    failpoints.reach("part.counted")
    for _ in range(2):
        with pytest.raises(FailpointError):
            failpoints.reach("x.y")
    me = os.getpid()
    assert log.read_text().splitlines() == [f"{me} part.stored 2", f"{me} x.y 1", f"{me} x.y 2"]


def test_a_point_waits_for_a_file(tmp_path: Path) -> None:
    gate = tmp_path / "a=b;gate"
    with pytest.raises(ValueError, match="isn't name=action"):
        failpoints.arm({"BATCHSVC_FAILPOINTS": f"a.b=wait:{gate}"})  # a path with a semicolon is two items
    gate = tmp_path / "gate"
    failpoints.arm({"BATCHSVC_FAILPOINTS": f"a.b=wait:{gate}"})
    thread = threading.Thread(target=failpoints.reach, args=("a.b",))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    gate.touch()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "text", ["a", "a.b", "a.b=", "a.b=burn", "a.b=sleep", "a.b=sleep:x", "a.b=kill:1", "a.b=kill@0"]
)
def test_a_misspelt_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="BATCHSVC_FAILPOINTS"):
        failpoints.arm({"BATCHSVC_FAILPOINTS": text})


def test_a_process_dies_as_by_kill_9() -> None:
    code = (
        "from batchsvc.failpoints import reach; reach('a.b'); print('once', flush=True); reach('a.b'); print('twice')"
    )
    env = {**os.environ, "BATCHSVC_FAILPOINTS": "a.b=kill@2"}
    died = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL
    assert died.stdout == "once\n"
