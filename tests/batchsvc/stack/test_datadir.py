"""A data directory: private secrets, one holder at a time, and one sentence when it can't be used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchsvc.stack import datadir
from batchsvc.stack.datadir import DataDir, DataDirError, InUseError

HOLD = (
    "import sys;from pathlib import Path;from batchsvc.stack.datadir import DataDir;"
    "lock=DataDir(Path(sys.argv[1])).lock();print('held',flush=True);sys.stdin.read()"
)


@pytest.fixture
def directory(tmp_path: Path) -> DataDir:
    made = DataDir(tmp_path / "d")
    made.create()
    return made


def test_secrets_are_private_and_stay(directory: DataDir) -> None:
    first = directory.secret("s", lambda: "one")
    assert directory.secret("s", lambda: "two") == first == "one"
    assert (directory.secrets / "s").stat().st_mode & 0o777 == 0o600
    assert directory.secrets.stat().st_mode & 0o777 == 0o700
    assert directory.root.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    DataDir(tmp_path).create()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_lock_names_its_holder_and_ends_with_it(directory: DataDir) -> None:
    assert directory.holder() is None
    argv = [sys.executable, "-c", HOLD, str(directory.root)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert directory.holder() == holder.pid
        with pytest.raises(InUseError, match=rf"pid {holder.pid}\)") as refused:
            directory.lock()
        assert refused.value.pid == holder.pid
        holder.kill()
    assert directory.holder() is None
    directory.lock().release()


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.ENOSPC, "is full"), (errno.EROFS, "can't be written"), (errno.EACCES, "can't be written")],
)
def test_an_error_of_the_file_system_is_one_sentence(tmp_path: Path, number: int, says: str) -> None:
    text = DataDir(tmp_path).explain(OSError(number, os.strerror(number))).message
    assert text.startswith(f"The data directory {tmp_path} {says}")
    assert "--data-dir" in text
    assert "\n" not in text


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match="is not a directory"):
        DataDir(tmp_path / "file").create()


def test_a_nearly_full_disk_is_refused(directory: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datadir, "LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(DataDirError, match="MiB left"):
        directory.create()


def test_a_broken_state_file_counts_as_none(directory: DataDir) -> None:
    (directory.run / "state.json").write_text('{"pid": ')
    assert directory.read_json("state.json") is None
