"""Frames between processes of one host: large ones lie in shared memory, a local socket says where.

A large frame is a memory file without a name, whose descriptor goes through the socket: whenever a side is killed, the
kernel takes back what nobody holds any more, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import socket
import stat
import struct
from pathlib import Path

from engine.errors import PeerError

_HEAD = struct.Struct("<QB")  # length, whether it lies in shared memory
_SMALL_BYTES = 1 << 16
NO_FRAME = "The other side sent something that isn't a frame."


def check_size(size: int, most_bytes: int) -> None:
    """Raises PeerError for the length of a frame that isn't to be read."""
    if size < 0:
        raise PeerError(NO_FRAME)
    if size > most_bytes:
        raise PeerError(f"The other side sent a frame of {size:,} bytes, and may send {most_bytes:,} at once.")


class SharedWire:
    """One end of a local socket."""

    def __init__(self, connection: socket.socket, *, silence_s: float) -> None:
        connection.settimeout(silence_s)
        self._socket = connection
        self._silence_s = silence_s

    def send(self, frame: bytes) -> None:
        head = _HEAD.pack(len(frame), len(frame) > _SMALL_BYTES)
        try:
            if len(frame) <= _SMALL_BYTES:
                self._socket.sendall(head + frame)
                return
            descriptor = os.memfd_create("kv", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, len(frame))
                with mmap.mmap(descriptor, len(frame)) as memory:
                    memory[:] = frame
                sent = socket.send_fds(self._socket, [head], [descriptor])
                self._socket.sendall(head[sent:])
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, most_bytes: int) -> bytes:
        descriptors: list[int] = []
        try:
            size, is_shared = _HEAD.unpack(self._exactly(_HEAD.size, descriptors))
            check_size(size, most_bytes)
            if bool(is_shared) != bool(descriptors):
                raise PeerError(NO_FRAME)
            return _mapped(descriptors[0], size) if is_shared else self._exactly(size, descriptors)
        except OSError as error:
            raise self._lost(error) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int, descriptors: list[int]) -> bytes:
        parts, missing = [], size
        while missing:
            part, found, _, _ = socket.recv_fds(self._socket, min(missing, 1 << 20), 1)
            descriptors += found
            if not part:
                raise PeerError("The other side is gone.")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _lost(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(f"The other side was silent for {self._silence_s:g} s.")
        return PeerError("The other side is gone.")


def _mapped(descriptor: int, size: int) -> bytes:
    if os.fstat(descriptor).st_size != size:
        raise PeerError("The other side sent a frame of another length than it said.")
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory:
        return memory[:]


class SharedListener:
    """Takes connections at a path of the file system. Raises PeerError when that can't be listened on."""

    def __init__(self, path: str, *, silence_s: float) -> None:
        self.address = f"shm://{path}"
        self._path = Path(path)
        self._silence_s = silence_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                if _is_left_behind(self._path):
                    self._path.unlink()
            self._socket.bind(path)
            self._path.chmod(0o600)
            self._own = _identity(self._path)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise PeerError(f"Can't listen at {self.address}: {error.strerror or error}.") from error

    def accept(self) -> SharedWire:
        """Waits for the next one. Raises PeerError once the listener is closed."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            raise PeerError("The listener is closed.") from error
        return SharedWire(connection, silence_s=self._silence_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            if _identity(self._path) == self._own:  # not what another process has put there since
                self._path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _is_left_behind(path: Path) -> bool:
    """Whether there is a socket that nobody listens at: of an earlier process, which was killed."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one that has no room for us at once is alive, too
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def connect(path: str, *, silence_s: float) -> SharedWire:
    """Raises PeerError when nobody listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise PeerError(f"No prefill engine listens at shm://{path}: {error.strerror or error}.") from error
    return SharedWire(connection, silence_s=silence_s)
