"""Batches whose results a `run` has yet to write, one empty file each in the data directory, whatever ends that run.

A batch may complete while nobody follows it any more: in the orderly end of its own stack, after Ctrl-C. The same
command then has to fetch what was paid for, and not to begin a new batch.
"""

from __future__ import annotations

from pathlib import Path

from batchsvc.stack.datadir import DataDir


class Awaited:
    """Those of one data directory; of a server elsewhere, which keeps none, it is always empty."""

    def __init__(self, directory: DataDir | None) -> None:
        self._folder = None if directory is None else directory.run / "awaited"

    def ids(self) -> frozenset[str]:
        if self._folder is None or not self._folder.is_dir():
            return frozenset()
        return frozenset(file.name for file in self._folder.iterdir())

    def add(self, batch_id: str) -> None:
        if (file := self._file(batch_id)) is not None:
            file.parent.mkdir(exist_ok=True, mode=0o700)
            file.touch()

    def drop(self, batch_id: str) -> None:
        if (file := self._file(batch_id)) is not None:
            file.unlink(missing_ok=True)

    def _file(self, batch_id: str) -> Path | None:
        return None if self._folder is None else self._folder / Path(batch_id).name
