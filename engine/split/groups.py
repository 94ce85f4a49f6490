"""Frames by torch.distributed: gloo between CPU processes, NCCL between GPUs, by the same calls.

Each connection is a process group of two, so that peers come and go by themselves: a group doesn't outlive a member.
The prefill side has a store where decode sides take a number, and both make the group of that number. A frame is its
length and its bytes, two tensors. An operation ends with an error when the peer's socket closes, or after `silence_s`;
both end the group.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroup, Store, TCPStore

from engine.errors import PeerError
from engine.split.shared import MOST_BYTES

_PREFILL, _DECODE = 0, 1  # ranks
_COUNT = "arrived"
_LOOK_S = 0.05
_CONNECT_S = 5.0


class GroupWire:
    """One end of a group of two."""

    def __init__(self, group: ProcessGroup, device: torch.device, *, silence_s: float) -> None:
        self._group: ProcessGroup | None = group
        self._peer = _DECODE if group.rank() == _PREFILL else _PREFILL
        self._device = device
        self._silence_s = silence_s

    def send(self, frame: bytes) -> None:
        self._send(torch.tensor([len(frame)], dtype=torch.int64))
        if frame:
            self._send(torch.frombuffer(bytearray(frame), dtype=torch.uint8))

    def receive(self) -> bytes:
        size = int(self._receive(torch.empty(1, dtype=torch.int64)))
        if not 0 <= size <= MOST_BYTES:
            raise PeerError("The other side sent something that isn't a frame.")
        return self._receive(torch.empty(size, dtype=torch.uint8)).numpy().tobytes() if size else b""

    def close(self) -> None:
        self._group = None

    def _send(self, tensor: Tensor) -> None:
        try:
            self._open().send([tensor.to(self._device)], self._peer, 0).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _receive(self, tensor: Tensor) -> Tensor:
        placed = tensor.to(self._device)
        try:
            self._open().recv([placed], self._peer, 0).wait()
            return placed.cpu()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _open(self) -> ProcessGroup:
        group = self._group
        if group is None:
            raise PeerError("The connection is closed.")
        return group

    def _lost(self, error: RuntimeError) -> PeerError:
        if "imed out" in str(error) or "imeout" in str(error):
            return PeerError(f"The other side was silent for {self._silence_s:g} s.")
        return PeerError("The other side is gone.")


class GroupListener:
    """Where decode sides take their numbers. Port 0: any free one, which `address` then has."""

    def __init__(self, backend: str, host: str, port: int, *, silence_s: float) -> None:
        self._backend = backend
        self._host = host
        self._silence_s = silence_s
        self._arrived: queue.SimpleQueue[GroupWire | None] = queue.SimpleQueue()
        self._is_closed = False
        try:
            self._socket = socket.create_server((host, port))  # the store alone would listen on every interface
            port = self._socket.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CONNECT_S),
                master_listen_fd=self._socket.detach(),
            )
        except (OSError, RuntimeError) as error:
            raise PeerError(f"Can't listen at {backend}://{host}:{port}: {_reason(error)}.") from error
        self.address = f"{backend}://{host}:{port}"
        threading.Thread(target=self._serve, name="split listener", daemon=True).start()

    def accept(self) -> GroupWire:
        """Waits for the next one. Raises PeerError once the listener is closed."""
        wire = self._arrived.get()
        if wire is None:
            raise PeerError("The listener is closed.")
        return wire

    def close(self) -> None:
        self._is_closed = True
        self._arrived.put(None)

    def _serve(self) -> None:
        served = 0
        pause = threading.Event()
        while not self._is_closed:
            for number in range(served, self._store.add(_COUNT, 0)):
                threading.Thread(target=self._meet, args=(number,), name=f"meeting {number}", daemon=True).start()
                served = number + 1
            pause.wait(_LOOK_S)

    def _meet(self, number: int) -> None:
        with contextlib.suppress(PeerError):  # one that died before its group was made comes again as another number
            self._arrived.put(
                _meet(self._backend, self._store, number, _PREFILL, self._host, silence_s=self._silence_s)
            )


def connect(backend: str, host: str, port: int, *, silence_s: float) -> GroupWire:
    """Raises PeerError when nobody listens there."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as probe:
            own_host = probe.getsockname()[0]
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S))
        number = store.add(_COUNT, 1) - 1
    except (OSError, RuntimeError) as error:
        raise PeerError(f"No prefill engine listens at {backend}://{host}:{port}: {_reason(error)}.") from error
    return _meet(backend, store, number, _DECODE, own_host, silence_s=silence_s)


def _meet(backend: str, store: Store, number: int, rank: int, own_host: str, *, silence_s: float) -> GroupWire:
    """Makes the group of that number with whoever has the other rank."""
    own = PrefixStore(f"link{number}", store)
    timeout = timedelta(seconds=silence_s)
    try:
        group = ProcessGroup(own, rank, 2)
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            made: Backend = dist.ProcessGroupNCCL(own, rank, 2, options)
            kind = ProcessGroup.BackendType.NCCL
        else:
            device = torch.device("cpu")
            made = _gloo(own, rank, own_host, timeout)
            kind = ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(device, kind, made)
    except RuntimeError as error:
        raise PeerError(f"The connection by {backend} failed: {_reason(error)}.") from error
    return GroupWire(group, device, silence_s=silence_s)


def _gloo(store: Store, rank: int, own_host: str, timeout: timedelta) -> Backend:
    """On the interface of that host's address, not on whatever this machine's name resolves to."""
    gloo: Any = dist.ProcessGroupGloo  # whose stubs lack this constructor
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_host)]
    options._timeout = timeout
    made: Backend = gloo(store, rank, 2, options)
    return made


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
