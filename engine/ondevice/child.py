"""A process that runs steps as it is told, for crew.py: a step that fails, hangs or breaks the GPU costs itself alone.

`python -m engine.ondevice.child MODULE:FUNCTION [--toy]`: the function makes the steps of a place, each line of stdin
is the index of one, each line of stdout what came of it. After an error of the GPU, which answers nothing more to this
process, it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = "step: "
"""What lines for the parent begin with; libraries may write others."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to check or to measure. `run` gives figures by name, as JSON has them. `expected_s` is what must be
    left of the time for it to be begun, `limit_s` the longest it may take. Steps of a `group` may share what they
    made, as they run in one process."""

    name: str
    run: Callable[[], dict[str, Any]]
    group: str = ""
    expected_s: float = 0.0
    limit_s: float = 60.0


def main(arguments: list[str]) -> int:
    is_toy = "--toy" in arguments
    if is_toy:
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported
    from engine.device import first_line, is_of_device
    from engine.ondevice.place import place_of

    module, _, name = arguments[0].partition(":")
    steps: list[Step] = getattr(importlib.import_module(module), name)(place_of(is_toy))
    _tell({})
    for line in sys.stdin:
        try:
            _tell({"figures": steps[int(line)].run()})
        except Exception as error:
            ends = is_of_device(error)
            _tell({"error": f"{type(error).__name__}: {first_line(error)}", "ends": ends})
            if ends:
                return 1
    return 0


def _tell(what: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # what is left on a GPU that failed may hang when it is freed
