"""What a process of a cluster finds around itself: a host's clock that is off, a full disk under SQLite, a tiny pool.

Set by the environment of the process, `cluster.start("engine", TEST_CLOCK_SHIFT_S=3600)`:

    TEST_CLOCK_SHIFT_S      the wall clock of its host is off by so much; monotonic time and the database's are not
    TEST_SQLITE_PAGES_FILE  the file tells how many pages the database may have, anew with each transaction
    TEST_POOL_SIZE          most connections that each of its database pools opens
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event

from batchsvc.db import session


def surround(env: Mapping[str, str]) -> None:
    """Change this process as its environment says."""
    if shift_s := float(env.get("TEST_CLOCK_SHIFT_S", 0)):
        _shift_clock(shift_s)
    if pages_file := env.get("TEST_SQLITE_PAGES_FILE"):
        _limit_pages(Path(pages_file))
    if pool_size := int(env.get("TEST_POOL_SIZE", 0)):
        _limit_pools(pool_size)


def _shift_clock(shift_s: float) -> None:
    real_s, real_ns = time.time, time.time_ns
    time.time = lambda: real_s() + shift_s
    time.time_ns = lambda: real_ns() + round(shift_s * 1e9)


def _limit_pages(pages_file: Path) -> None:
    """SQLite's own limit: what would grow the file beyond gives SQLITE_FULL, as a full disk does."""

    def limit(connection: Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={int(pages_file.read_text())}")

    event.listen(Engine, "begin", limit)


def _limit_pools(pool_size: int) -> None:
    real = session.create_engine

    def create(url: str, **options: Any) -> Engine:
        return real(url, **{**options, "pool_size": pool_size, "max_overflow": 0})

    session.create_engine = create
