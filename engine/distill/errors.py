"""What can go wrong in distillation: every message is one sentence that names the way out."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError

_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory", "out of memory")


class DistillError(EngineError):
    """A student can't be trained."""


class StoppedError(DistillError):
    """Somebody has stopped the run; it can go on from its last checkpoint."""


@contextmanager
def memory_told(way_out: str) -> Iterator[None]:
    """Tells memory that doesn't suffice in a sentence, with `way_out` as its end."""
    try:
        yield
    except MemoryError as error:
        raise DistillError(f"Memory doesn't suffice for this step: {way_out}.") from error
    except OSError as error:  # of memory that is mapped, as a cache is
        if error.errno == errno.ENOMEM:
            raise DistillError(f"Memory doesn't suffice for this step: {way_out}.") from error
        raise
    except RuntimeError as error:  # torch has no type of its own for it on a CPU
        if any(sign in str(error) for sign in _NO_MEMORY):
            raise DistillError(f"Memory doesn't suffice for this step: {way_out}.") from error
        raise
