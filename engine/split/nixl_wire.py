"""Frames by NIXL, NVIDIA's library for moving KV blocks: a side says over a socket what lies where, the other reads it.

Each side registers memory for what it sends and what it receives. A small frame goes over the socket, a large one into
that memory, from where the other side reads it by whatever transport NIXL finds fastest; then it says so, and the
memory is free for the next. The socket tells when a peer has died. The library isn't one of our dependencies: it brings
CUDA's along.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import struct
import threading
import uuid
from time import monotonic, sleep
from typing import Any

import numpy as np

from engine.errors import PeerError
from engine.split.shared import NO_FRAME, check_size

_HEAD = struct.Struct("<QB")  # length, and one of these
_INLINE, _IN_MEMORY, _READ = range(3)
_SMALL_BYTES = 1 << 16
_MEMORY_BYTES = 1 << 26
_MOST_METADATA_BYTES = 1 << 20
_LOOK_S = 0.0002
_NAMES = ("nixl", "nixl_cu13", "nixl_cu12")


def library() -> Any:
    """NIXL. Raises PeerError with the way out where it isn't installed."""
    for name in _NAMES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise PeerError("nixl:// addresses need NIXL, which isn't installed: pip install nixl, or use gloo://.")


class NixlWire:
    """One end. Both make it at once: each waits for the other's addresses."""

    def __init__(self, connection: socket.socket, *, silence_s: float) -> None:
        nixl = library()
        connection.settimeout(silence_s)
        self._socket = connection
        self._silence_s = silence_s
        self._lock = threading.Lock()  # of the socket's sending side: frames and receipts come from two threads
        self._is_read = threading.Event()
        self._is_closed = False
        self._agent = nixl.nixl_agent(uuid.uuid4().hex, nixl.nixl_agent_config(backends=["UCX"]))
        self._out, self._in = (np.zeros(_MEMORY_BYTES, np.uint8) for _ in range(2))
        for memory in (self._out, self._in):
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        mine = struct.pack("<Q", self._out.ctypes.data) + self._agent.get_agent_metadata()
        try:
            self._say(mine, _INLINE)
            size, _ = _HEAD.unpack(self._exactly(_HEAD.size))
            check_size(size, _MOST_METADATA_BYTES)
            theirs = self._exactly(size)
        except OSError as error:
            raise self._lost(error) from error
        (self._remote_address,) = struct.unpack_from("<Q", theirs)
        self._remote: str = self._agent.add_remote_agent(theirs[8:])

    def send(self, frame: bytes) -> None:
        try:
            if len(frame) <= _SMALL_BYTES or len(frame) > _MEMORY_BYTES:
                self._say(frame, _INLINE)
                return
            self._out[: len(frame)] = np.frombuffer(frame, np.uint8)
            self._is_read.clear()
            with self._lock:
                self._socket.sendall(_HEAD.pack(len(frame), _IN_MEMORY))
        except OSError as error:
            raise self._lost(error) from error
        if not self._is_read.wait(self._silence_s) or self._is_closed:
            raise PeerError("The other side did not read what it was sent.")

    def receive(self, most_bytes: int) -> bytes:
        try:
            while True:
                size, kind = _HEAD.unpack(self._exactly(_HEAD.size))
                check_size(size, most_bytes)
                if kind > _READ or (kind == _IN_MEMORY and size > _MEMORY_BYTES):
                    raise PeerError(NO_FRAME)
                if kind == _INLINE:
                    return self._exactly(size)
                if kind == _READ:
                    self._is_read.set()
                    continue
                frame = self._fetch(size)
                with self._lock:
                    self._socket.sendall(_HEAD.pack(0, _READ))
                return frame
        except OSError as error:
            raise self._lost(error) from error

    def close(self) -> None:
        self._is_closed = True
        self._is_read.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fetch(self, size: int) -> bytes:
        """Reads from the other side's memory."""
        agent, end_s = self._agent, monotonic() + self._silence_s
        mine = agent.get_xfer_descs([(self._in.ctypes.data, size, 0)], "DRAM")
        theirs = agent.get_xfer_descs([(self._remote_address, size, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", mine, theirs, self._remote)
        try:
            state = agent.transfer(handle)
            while state == "PROC" and monotonic() < end_s:
                sleep(_LOOK_S)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise PeerError("NIXL could not read from the other side.")
        return self._in[:size].tobytes()

    def _say(self, frame: bytes, kind: int) -> None:
        with self._lock:
            self._socket.sendall(_HEAD.pack(len(frame), kind) + frame)

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            part = self._socket.recv(min(missing, 1 << 20))
            if not part:
                raise PeerError("The other side is gone.")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _lost(self, error: OSError) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(f"The other side was silent for {self._silence_s:g} s.")
        return PeerError("The other side is gone.")


class NixlListener:
    """Takes connections at a host and port; 0: any free one."""

    def __init__(self, host: str, port: int, *, silence_s: float) -> None:
        library()
        self._silence_s = silence_s
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise PeerError(f"Can't listen at nixl://{host}:{port}: {error.strerror or error}.") from error
        self.address = f"nixl://{host}:{self._socket.getsockname()[1]}"

    def accept(self) -> NixlWire:
        """Waits for the next one. Raises PeerError once the listener is closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                raise PeerError("The listener is closed.") from error
            with contextlib.suppress(PeerError):  # one that was gone again
                return NixlWire(connection, silence_s=self._silence_s)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(host: str, port: int, *, silence_s: float) -> NixlWire:
    """Raises PeerError when nobody listens there."""
    library()
    try:
        connection = socket.create_connection((host, port), timeout=silence_s)
    except OSError as error:
        raise PeerError(f"No prefill engine listens at nixl://{host}:{port}: {error.strerror or error}.") from error
    return NixlWire(connection, silence_s=silence_s)
