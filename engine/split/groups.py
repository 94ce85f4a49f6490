"""Frames by torch.distributed: gloo between CPU processes, NCCL between GPUs, by the same calls.

Each connection is a process group of two, so that peers come and go by themselves: a group doesn't outlive a member.
The prefill side has a store where decode sides take a number, and both make the group of that number. A frame is its
length and its bytes, two tensors. An operation ends with an error when the peer's socket closes, or after `silence_s`;
both end the group. With NCCL it is a group for each direction, because a communicator does one thing after the other:
a side that waits to hear could say nothing.
"""

from __future__ import annotations

import contextlib
import os
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
from engine.split.shared import check_size

_PREFILL, _DECODE = 0, 1  # ranks
_COUNT = "arrived"
_LOOK_S = 0.05
_CONNECT_S = 5.0
_MOST_MEETINGS = 16  # that are under way at once


class GroupWire:
    """One end of a group of two, or of two such groups: one to send in, one to receive."""

    def __init__(
        self, sending: ProcessGroup, receiving: ProcessGroup, device: torch.device, *, silence_s: float
    ) -> None:
        self._groups: tuple[ProcessGroup, ProcessGroup] | None = (sending, receiving)
        self._peer = _DECODE if sending.rank() == _PREFILL else _PREFILL
        self._device = device
        self._silence_s = silence_s

    def send(self, frame: bytes) -> None:
        self._send(torch.tensor([len(frame)], dtype=torch.int64))
        if frame:
            self._send(torch.frombuffer(bytearray(frame), dtype=torch.uint8))

    def receive(self, most_bytes: int) -> bytes:
        size = int(self._receive(torch.empty(1, dtype=torch.int64)))
        check_size(size, most_bytes)
        return self._receive(torch.empty(size, dtype=torch.uint8)).numpy().tobytes() if size else b""

    def close(self) -> None:
        self._groups = None

    def _send(self, tensor: Tensor) -> None:
        try:
            self._open()[0].send([tensor.to(self._device)], self._peer, 0).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _receive(self, tensor: Tensor) -> Tensor:
        placed = tensor.to(self._device)
        try:
            self._open()[1].recv([placed], self._peer, 0).wait()
            return placed.cpu()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _open(self) -> tuple[ProcessGroup, ProcessGroup]:
        groups = self._groups
        if groups is None:
            raise PeerError("The connection is closed.")
        return groups

    def _lost(self, error: RuntimeError) -> PeerError:
        if "imed out" in str(error) or "imeout" in str(error):
            return PeerError(f"The other side was silent for {self._silence_s:g} s.")
        return PeerError("The other side is gone.")


class GroupListener:
    """Where decode sides take their numbers. Port 0: any free one, which `address` then has."""

    def __init__(self, backend: str, host: str, port: int, *, silence_s: float) -> None:
        _check(backend)
        self._backend = backend
        self._host = host
        self._silence_s = silence_s
        self._arrived: queue.SimpleQueue[GroupWire | None] = queue.SimpleQueue()
        self._meetings = threading.Semaphore(_MOST_MEETINGS)
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
            with contextlib.suppress(RuntimeError):  # of the store, or of a thread that can't be started now
                while not self._is_closed and served < self._store.add(_COUNT, 0):
                    if not self._meetings.acquire(timeout=_LOOK_S):
                        continue
                    served += 1
                    self._begin_to_meet(served - 1)
            pause.wait(_LOOK_S)

    def _begin_to_meet(self, number: int) -> None:
        try:
            threading.Thread(target=self._meet, args=(number,), name=f"meeting {number}", daemon=True).start()
        except RuntimeError:
            self._meetings.release()
            raise

    def _meet(self, number: int) -> None:
        try:
            with contextlib.suppress(Exception):  # whoever died before its group was made comes again with another one
                self._arrived.put(
                    _meet(self._backend, self._store, number, _PREFILL, self._host, silence_s=self._silence_s)
                )
        finally:
            self._meetings.release()


def connect(backend: str, host: str, port: int, *, silence_s: float) -> GroupWire:
    """Raises PeerError when nobody listens there."""
    _check(backend)
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
        if backend == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            of_rank = [_nccl_group(PrefixStore(f"from{sender}", own), rank, device, timeout) for sender in range(2)]
            return GroupWire(of_rank[rank], of_rank[1 - rank], device, silence_s=silence_s)
        device = torch.device("cpu")
        made = _gloo(own, rank, own_host, timeout)
        group = _group(own, rank, device, ProcessGroup.BackendType.GLOO, made)
    except RuntimeError as error:
        raise PeerError(f"The connection by {backend} failed: {_reason(error)}.") from error
    return GroupWire(group, group, device, silence_s=silence_s)


def _group(store: Store, rank: int, device: torch.device, kind: Any, made: Backend) -> ProcessGroup:
    group = ProcessGroup(store, rank, 2)
    group._set_default_backend(kind)
    group._register_backend(device, kind, made)
    return group


def _nccl_group(store: Store, rank: int, device: torch.device, timeout: timedelta) -> ProcessGroup:
    """Of one direction."""
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else a silent peer ends this process, not the operation
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    made: Backend = dist.ProcessGroupNCCL(store, rank, 2, options)
    return _group(store, rank, device, ProcessGroup.BackendType.NCCL, made)


def _check(backend: str) -> None:
    """Raises PeerError where there is nothing that the backend could run on."""
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise PeerError(
            "nccl:// addresses need an NVIDIA GPU and a torch with NCCL, and this process lacks one of them; gloo:// "
            "needs neither."
        )


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
