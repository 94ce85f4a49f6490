"""Batch inference on token ids and text: no queue, no database, no money.

The names below load lazily (PEP 562), so that `import engine.text` or `import engine.request` never loads torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.request import Completion, Request, SamplingParams, Usage

__all__ = ["Completion", "Engine", "EngineConfig", "Request", "SamplingParams", "Usage"]

# Read once, when torch loads. Threads that wait for others of their team spin some 50 us within a step, and then sleep:
# with the API, the database or other workers on the same cores, spinning from one step to the next, which is the
# default, made steps 3 to 7 times slower.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Read at torch's first allocation: weights and working memory on huge pages, where the system leaves that to programs.
# Translating the addresses of small ones took 1 to 6 % of a run.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOME = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Completion": "engine.request",
    "Request": "engine.request",
    "SamplingParams": "engine.request",
    "Usage": "engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
