"""The data directory of an embedded stack: its layout, its lock, its secrets, and whether one can work in it.

    D/secrets/  api_key, admin_key and what the services share (files 0600)     D/logs/  one file a process
    D/run/      lock, state.json, ports.json                                    D/valkey/, D/s3/, D/db.sqlite3

The supervisor holds `run/lock` as long as it lives; the kernel frees it when it dies, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchsvc.errors import UnavailableError

LEAST_FREE_BYTES = 256 * 1024 * 1024  # SeaweedFS turns read-only on a full disk, without a word to its clients
_LOCK_PATIENCE_S = 1.0  # someone who only looks holds the lock for a moment


class DataDirError(UnavailableError):
    """The directory can't be used; the message says why."""


class InUseError(DataDirError):
    """Another process holds the lock."""

    def __init__(self, root: Path, pid: int) -> None:
        super().__init__(
            f"A stack is already running in {root} (pid {pid}): use it, or stop it with "
            f"`batchsvc down --data-dir {root}`."
        )
        self.pid = pid


def default_root() -> Path:
    """The platform's directory for data of this user."""
    import platformdirs

    return Path(platformdirs.user_data_dir("batchsvc", appauthor=False))


@dataclass(frozen=True, slots=True)
class DataDir:
    """Paths inside one data directory, and the small files in it."""

    root: Path

    @classmethod
    def at(cls, path: Path | None) -> DataDir:
        """The directory at `path`, or the user's own; nothing is created yet."""
        chosen = default_root() if path is None else path.expanduser()
        return cls(Path(os.path.abspath(chosen)))  # noqa: PTH100  resolve() would follow links that users name on purpose

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def api_key(self) -> Path:
        return self.secrets / "api_key"

    @property
    def admin_key(self) -> Path:
        return self.secrets / "admin_key"

    @property
    def database(self) -> Path:
        return self.root / "db.sqlite3"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.database}"

    def create(self) -> None:
        """Make what is missing. Raises DataDirError in one sentence if it can't be written or is nearly full."""
        try:
            if not self.root.exists():
                self.root.mkdir(parents=True, mode=0o700)
            for directory in (self.run, self.logs):
                directory.mkdir(exist_ok=True, mode=0o700)
            self.secrets.mkdir(exist_ok=True, mode=0o700)
            self.secrets.chmod(0o700)
            probe = self.run / f"probe-{os.getpid()}"
            try:
                probe.write_bytes(b"\0" * 4096)
            finally:
                probe.unlink(missing_ok=True)
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            raise self.explain(error) from error
        if free < LEAST_FREE_BYTES:
            raise DataDirError(
                f"The disk of {self.root} has {free // 2**20} MiB left and at least {LEAST_FREE_BYTES // 2**20} MiB "
                "are needed: free some, or choose another place with --data-dir."
            )

    def is_cause(self, error: OSError) -> bool:
        """Whether an error of the work in this directory is about it: it names a path in it, or the disk is full."""
        if error.filename is None:
            return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        return Path(os.fsdecode(error.filename)).is_relative_to(self.root)

    def explain(self, error: OSError) -> DataDirError:
        """The sentence for an error of the file system below this directory."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why, way = "is full", "free some space, or choose another place with --data-dir"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why, way = "can't be written", "choose another place with --data-dir"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            why, way = "is not a directory", "choose another place with --data-dir"
        else:
            why, way = f"can't be used ({error.strerror or error})", "choose another place with --data-dir"
        return DataDirError(f"The data directory {self.root} {why}: {way}.")

    def secret(self, name: str, make: Callable[[], str]) -> str:
        """The secret of this name, made on first use."""
        path = self.secrets / name
        if path.exists():
            found = path.read_text(encoding="utf-8").strip()
            if found:
                return found
        text = make()
        self.write_secret(name, text)
        return text

    def write_secret(self, name: str, text: str) -> None:
        """Put a secret into its file, readable by this user only, whole or not at all."""
        _write_whole(self.secrets / name, text + "\n")

    def read_json(self, name: str) -> Any:
        """A file of run/, or None if it is missing or broken (a crash, a full disk)."""
        try:
            return json.loads((self.run / name).read_bytes())
        except (OSError, ValueError):
            return None

    def write_json(self, name: str, value: object) -> None:
        """Replace a file of run/."""
        _write_whole(self.run / name, json.dumps(value, indent=1) + "\n")

    def lock(self) -> Lock:
        """Take the directory for this process. Raises InUseError when another process has it."""
        path = self.run / "lock"
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self.explain(error) from error
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    pid = _pid_in(handle)
                    os.close(handle)
                    raise InUseError(self.root, pid) from None
                time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        return Lock(handle)

    def join(self) -> Lock:
        """Use another command's stack: its owner doesn't stop it before this is released, within reason."""
        handle = os.open(self.run / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        return Lock(handle)

    def close_to_others(self, on_wait: Callable[[], None]) -> Lock:
        """Wait until nobody has joined, telling so first; who comes later waits until this is released."""
        handle = os.open(self.run / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        return Lock(handle)

    def holder(self) -> int | None:
        """The pid of the process that holds the lock, or None if nobody does."""
        try:
            handle = os.open(self.run / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _pid_in(handle)
        finally:
            os.close(handle)
        return None


@dataclass(slots=True)
class Lock:
    """A held lock. It ends with the process, or with `release()`."""

    handle: int

    def release(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def _pid_in(handle: int) -> int:
    text = os.pread(handle, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def _write_whole(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)
