"""The command `batchsvc`: every failure ends in one sentence on standard error and an exit code of the table."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Run one command and exit."""
    from batchsvc.cli.exits import CommandError, Exit
    from batchsvc.errors import ServiceError

    code: int = Exit.OK
    try:
        from batchsvc.cli.app import app

        app()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except CommandError as error:
        _tell(error.message)
        code = error.code
    except ServiceError as error:
        _tell(error.message)
        code = Exit.FAILED
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has enough; that is no failure of ours to tell
        code = Exit.FAILED
    except Exception as error:
        _tell(f"Something went wrong in batchsvc itself ({type(error).__name__}): {_log(error)}")
        code = Exit.FAILED
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _tell(message: str) -> None:
    sys.stderr.write(f"batchsvc: {message}\n")


def _log(error: BaseException) -> str:
    """Put the details into a file and say where."""
    import tempfile

    import platformdirs

    details = "".join(traceback.format_exception(error))
    for folder in (platformdirs.user_log_path("batchsvc", appauthor=False), Path(tempfile.gettempdir())):
        path = folder / f"batchsvc-error-{os.getpid()}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(details, encoding="utf-8")
        except OSError:
            continue
        return f"the details are in {path}."
    return str(error)
