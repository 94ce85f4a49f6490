"""The object store of a data directory without its stack: for a backup or a restore while nothing else runs there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from batchsvc.clock import monotonic_s
from batchsvc.errors import ServiceError, UnavailableError
from batchsvc.settings import Settings
from batchsvc.stack import children, ports
from batchsvc.stack.child import Child
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import DEFAULT_HOST, StackOptions
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore

_READY_S, _STOP_S, _LOOK_S = 90.0, 20.0, 0.05


def settings_of(directory: DataDir) -> Settings:
    """The settings of the stack that runs in this directory, or that ran last."""
    options = StackOptions(root=directory.root)
    env = children.service_env(directory, options, directory.read_json("ports.json"), children.Secrets.of(directory))
    return Settings.from_env(env)


@contextmanager
def store_alone(directory: DataDir) -> Iterator[Settings]:
    """Settings with a store that answers, while no stack can start here. Raises InUseError if one runs."""
    directory.create()
    lock = directory.lock()
    held = ports.HeldPorts()
    try:
        chosen = ports.choose(directory, host=DEFAULT_HOST, port=None, held=held, workers=_remembered(directory))
        store = Child(children.store_spec(directory, chosen, children.Secrets.of(directory)), directory.logs)
        store.start()
        try:
            settings = settings_of(directory)
            _wait(store, ObjectStore(settings))
            yield settings
        finally:
            _stop(store)
            children.remove_sockets(chosen)
    finally:
        held.release()
        lock.release()


def _remembered(directory: DataDir) -> tuple[str, ...]:
    """The workers that have ports here, which they keep: somebody may read their signals there."""
    known = directory.read_json("ports.json")
    names = known if isinstance(known, dict) else {}
    return tuple(name for name in names if name.partition("-")[0] in ("control", "engine"))


def _wait(store: Child, bucket: ObjectStore) -> None:
    """Until the store writes and reads: its gateway answers before its volumes are found."""
    deadline = monotonic_s() + _READY_S
    while not (store.spec.is_ready(store.pid or 0) and _works(bucket)):
        if store.exit_code() is not None or monotonic_s() > deadline:
            raise UnavailableError(f"The object store can't start: see {store.log}.")
        time.sleep(_LOOK_S)


def _works(bucket: ObjectStore) -> bool:
    try:
        bucket.ensure_bucket()
        bucket.put(keys.PROBE, b"ready")
        return bucket.get(keys.PROBE) == b"ready"
    except ServiceError:
        return False


def _stop(store: Child) -> None:
    store.terminate()
    deadline = monotonic_s() + _STOP_S
    while store.exit_code() is None and monotonic_s() < deadline:
        time.sleep(_LOOK_S)
    store.kill()
