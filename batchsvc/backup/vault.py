"""The directory that backups are kept in: several of them, which share the objects that they have in common.

    T/objects/ab/cdef...      every object once, by the sha256 of its bytes
    T/backups/NAME/           the database, the list of objects, and last manifest.json: without it, never finished
    T/damaged/cdef...         objects that `restore --check` found to have other bytes; gone with the next pruning
    T/lock                    held by whoever writes here

Whatever is written gets its name when it is whole. The directory is the user's alone: a backup holds what users sent.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import orjson
import zstandard

from batchsvc.backup.manifest import MANIFEST, BackupError, Manifest, SavedObject, StoredFile

_CHUNK = 1 << 20
SCRATCH = ".scratch-"  # what a backup needs while it is made
OBJECTS, SECRETS = "objects.jsonl.zst", "secrets.json"
_DISK = "lost+found"  # is on every fresh disk


class Vault:
    """One such directory. `for_writing` makes it; `for_reading` wants it to be there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._objects, self._backups, self.damaged = root / "objects", root / "backups", root / "damaged"

    @classmethod
    @contextmanager
    def for_writing(cls, root: Path) -> Iterator[Vault]:
        """The vault while nobody else writes to it. Raises BackupError where it can't be."""
        vault = cls(root)
        with vault.explained():
            if not vault._backups.is_dir() and root.exists() and any(one.name != _DISK for one in root.iterdir()):
                raise BackupError(f"{root} holds something else than backups: choose an empty or a new directory.")
            for directory in (root, vault._objects, vault._backups):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(handle)
                raise BackupError(f"Another backup is being written to {root}: wait until it has ended.") from error
        try:
            yield vault
        finally:
            os.close(handle)

    @classmethod
    def for_reading(cls, root: Path) -> Vault:
        """Raises BackupError if there are no backups."""
        vault = cls(root)
        if not vault._backups.is_dir():
            raise BackupError(f"There is no backup in {root}: name the directory that `batchsvc backup` was given.")
        return vault

    # -- backups ------------------------------------------------------------------------------------------------

    def finished(self) -> list[str]:
        """Names of the backups that are whole, oldest first."""
        return sorted(path.parent.name for path in self._backups.glob(f"*/{MANIFEST}"))

    def unfinished(self) -> list[str]:
        """Names of those that were broken off."""
        return sorted({path.name for path in self._backups.iterdir() if path.is_dir()} - set(self.finished()))

    def folder(self, name: str) -> Path:
        """Where a backup's own files are."""
        return self._backups / name

    def begin(self, name: str) -> Path:
        """The folder of a new backup, after what was broken off has been removed."""
        for old in self.unfinished():
            shutil.rmtree(self.folder(old))
        for scratch in self.root.glob(f"{SCRATCH}*"):
            shutil.rmtree(scratch)
        for left in self._objects.glob(".new-*"):
            left.unlink()
        folder = self.folder(name)
        folder.mkdir(mode=0o700)
        return folder

    def finish(self, manifest: Manifest) -> None:
        """Make a backup count, once all that it needs is on the disk."""
        os.sync()
        write_whole(self.folder(manifest.name) / MANIFEST, manifest.to_json())

    def manifest(self, name: str | None) -> Manifest:
        """That of a backup, by default the newest. Raises BackupError if it isn't there or was never finished."""
        done = self.finished()
        if name is None and done:
            name = done[-1]
        if name is None or name not in done:
            broken = self.unfinished()
            if name is None or name in broken:
                raise BackupError(
                    f"The backup {name or ', '.join(broken) or ''} in {self.root} was never finished (it has no "
                    f"{MANIFEST}): " + (f"use another one ({', '.join(done)})." if done else "make one anew.")
                )
            raise BackupError(f"There is no backup {name} in {self.root}; there are {', '.join(done) or 'none'}.")
        return Manifest.parse((self.folder(name) / MANIFEST).read_bytes())

    def prune(self, keep: int) -> int:
        """Remove all but the newest `keep` backups, and objects that none of these needs. Returns how many went."""
        done = self.finished()
        old = done[: max(0, len(done) - keep)]
        for name in old:
            (self.folder(name) / MANIFEST).unlink()  # first: half a backup must not pass for one
            shutil.rmtree(self.folder(name))
        shutil.rmtree(self.damaged, ignore_errors=True)
        if old:
            needed = {saved.sha256 for name in self.finished() for saved in self.objects(self.manifest(name))}
            for path in self._objects.glob("??/*"):
                if path.parent.name + path.name not in needed:
                    path.unlink()
        return len(old)

    # -- objects ------------------------------------------------------------------------------------------------

    def objects(self, manifest: Manifest) -> Iterator[SavedObject]:
        """The objects of a backup. Raises BackupError if the list is damaged."""
        for line in self.lines(manifest.name, manifest.objects):
            yield SavedObject.parse(line)

    def find(self, wanted: Set[str], *, until: str | None = None) -> dict[str, SavedObject]:
        """Of these keys the newest objects that backups (those up to `until`) list and that are here whole. A list
        that is damaged is passed over."""
        found: dict[str, SavedObject] = {}
        for name in reversed(self.finished()):
            left = wanted - found.keys()
            if not left:
                break
            if until is not None and name > until:
                continue
            with suppress(BackupError, OSError):
                for saved in self.objects(self.manifest(name)):
                    if saved.sha256 and saved.key in left and self.has(saved) and self.is_sound(saved):
                        found[saved.key] = saved
        return found

    def path_of(self, sha256: str) -> Path:
        """Where the bytes with this digest are, if they are here."""
        return self._objects / sha256[:2] / sha256[2:]

    def has(self, saved: SavedObject) -> bool:
        """Whether an object is here with its size; whether its bytes are right is for `is_sound`."""
        try:
            return self.path_of(saved.sha256).stat().st_size == saved.size_bytes
        except FileNotFoundError:
            return False

    def is_sound(self, saved: SavedObject) -> bool:
        """Whether the bytes of an object that is here are what they were. Raises BackupError if they can't be read."""
        with self._readable(), self.path_of(saved.sha256).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == saved.sha256

    def set_aside(self, saved: Iterable[SavedObject]) -> None:
        """Move damaged objects out of the way, so that the next backup copies them again. Raises BackupError."""
        with Vault.for_writing(self.root), self.explained():
            self.damaged.mkdir(exist_ok=True, mode=0o700)
            for sha256 in {one.sha256 for one in saved}:
                self.path_of(sha256).replace(self.damaged / sha256)

    def add(self, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Keep an object that comes in pieces. Returns its sha256 and its size. Thread-safe."""
        fresh = self._objects / f".new-{secrets.token_hex(8)}"
        digest, size = hashlib.sha256(), 0
        with self.explained():
            try:
                with fresh.open("xb") as file:
                    for piece in pieces:
                        digest.update(piece)
                        size += len(piece)
                        file.write(piece)
                path = self.path_of(digest.hexdigest())
                path.parent.mkdir(exist_ok=True, mode=0o700)
                fresh.replace(path)
            finally:
                fresh.unlink(missing_ok=True)
        return digest.hexdigest(), size

    def read(self, saved: SavedObject) -> Iterator[bytes]:
        """The bytes of an object, in pieces. Raises BackupError if they can't be read."""
        with self._readable(), self.path_of(saved.sha256).open("rb") as file:
            while piece := file.read(_CHUNK):
                yield piece

    # -- files of a backup --------------------------------------------------------------------------------------

    def write(self, name: str, file_name: str, pieces: Iterable[bytes]) -> StoredFile:
        """Compress pieces into a file of the backup `name`."""
        path = self.folder(name) / file_name
        packer = zstandard.ZstdCompressor()
        with self.explained(), path.open("xb") as file, packer.stream_writer(file, closefd=False) as compressed:
            for piece in pieces:
                compressed.write(piece)
        with path.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        return StoredFile(name=file_name, size_bytes=path.stat().st_size, sha256=digest)

    def write_secrets(self, name: str, values: Mapping[str, str]) -> None:
        """Keep keys with a backup, readable by this user alone."""
        write_whole(self.folder(name) / SECRETS, orjson.dumps(dict(values), option=orjson.OPT_INDENT_2) + b"\n")

    def secrets(self, manifest: Manifest) -> dict[str, str]:
        """The keys that were kept with a backup; none if it wasn't told to."""
        if not manifest.has_secrets:
            return {}
        try:
            return dict(orjson.loads((self.folder(manifest.name) / SECRETS).read_bytes()))
        except (OSError, ValueError) as error:
            raise BackupError("The secrets of the backup can't be read: leave them out, or use another one.") from error

    def check(self, name: str, stored: StoredFile) -> None:
        """Raises BackupError if a file of a backup is missing or isn't what it was."""
        path = self.folder(name) / stored.name
        try:
            with path.open("rb") as file:
                is_same = hashlib.file_digest(file, "sha256").hexdigest() == stored.sha256
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise BackupError(f"{path} is missing or damaged: use another backup.")

    def unpacked(self, name: str, stored: StoredFile) -> Iterator[bytes]:
        """The contents of a file of a backup, in pieces."""
        with (self.folder(name) / stored.name).open("rb") as file:
            yield from _decompressed(file)

    def lines(self, name: str, stored: StoredFile) -> Iterator[bytes]:
        """The lines of a file of a backup, without their ends."""
        left = b""
        for piece in self.unpacked(name, stored):
            *whole, left = (left + piece).split(b"\n")
            yield from whole
        if left:
            raise BackupError("The backup's list of objects ends in the middle of a line: it is damaged.")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or error
            raise BackupError(
                f"The backup can't be read in {self.root}: {why}. Use another copy of it, or see to its disk."
            ) from error

    @contextmanager
    def explained(self) -> Iterator[None]:
        """An error of the file system below this directory, as one sentence."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                why = "its disk is full: free some space, or choose another place"
            else:
                why = f"{error.strerror or error}: choose another place"
            raise BackupError(f"The backup can't be written to {self.root}: {why}.") from error


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in place, readable by this user alone, whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    try:
        with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as reader:
            while piece := reader.read(_CHUNK):
                yield piece
    except zstandard.ZstdError as error:
        raise BackupError(f"{file.name} is damaged: use another backup.") from error
