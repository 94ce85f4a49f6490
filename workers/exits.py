"""The exit codes of our worker processes, for whoever supervises them."""

from __future__ import annotations

from enum import IntEnum


class WorkerExit(IntEnum):
    """`DEVICE`: the GPU can't be used, or failed; on another machine, or with BATCHSVC_DEVICE=cpu, it may go well.
    `SCHEMA`: the database isn't of this version, so starting again changes nothing; the API ends by the same code."""

    STOPPED = 0
    FAILED = 1
    USAGE = 2
    DEVICE = 7
    SCHEMA = 8
