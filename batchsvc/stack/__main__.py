"""`python -m batchsvc.stack OPTIONS`: a supervisor in a process of its own, started by commands.

It tells its starter what it does as JSON lines on standard output: {"say": text}, {"ready": state}, {"error": text}.
With any purpose but `up` it stops when its starter dies.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys

from batchsvc.errors import ServiceError
from batchsvc.stack.datadir import InUseError
from batchsvc.stack.options import StackOptions, StackState
from batchsvc.stack.supervisor import Supervisor


def main() -> int:
    options = StackOptions.from_json(sys.argv[1])
    starter = int(sys.argv[2])
    if options.purpose != "up" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != starter:
            return 1
    logging.basicConfig(level=logging.WARNING)

    def tell(**event: object) -> None:
        try:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
        except OSError:  # nobody listens any more: the starter of `up --detach` has gone
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  open for as long as the process lives

    def on_ready(state: StackState) -> None:
        tell(ready=state.to_json())

    try:
        Supervisor(options, lambda text: tell(say=text)).run(on_ready)
    except InUseError as error:
        tell(error=error.message, in_use=error.pid)
        return 1
    except ServiceError as error:
        tell(error=error.message)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
