"""The API on a free port of this process: for tests that need real sockets, and for processes of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from batchsvc.app import create_app
from batchsvc.settings import Settings
from tests.dispatchers import NullDispatcher


@contextmanager
def serving(settings: Settings, dispatcher: NullDispatcher) -> Iterator[str]:
    """Yields the base URL of a server on a free port."""
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings, dispatcher), host="127.0.0.1", port=0, log_level="error", timeout_keep_alive=75
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the API doesn't start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
