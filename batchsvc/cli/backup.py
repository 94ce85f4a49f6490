"""`batchsvc backup` and `batchsvc restore`: a copy of the whole service, made while it works, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption
from batchsvc.stack.datadir import DataDir, InUseError

if TYPE_CHECKING:
    from batchsvc.backup.manifest import Manifest
    from batchsvc.backup.restoring import Restored
    from batchsvc.backup.vault import Vault
    from batchsvc.settings import Settings

_PATIENCE_S = 300.0  # another command's stack may be pulling a model
_KEYS = ("secret_key", "api_key", "admin_key")  # of a data directory

SourceArgument = Annotated[Path, typer.Argument(metavar="SOURCE", help="The directory that `backup` was given.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The deployment that a command is about. `is_live`: its processes may work at this moment."""

    settings: Settings
    is_live: bool
    directory: DataDir | None = None


def backup(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A directory for backups; made if it isn't there.")],
    keep: Annotated[
        int | None, typer.Option("--keep", min=1, metavar="N", help="Remove all but the newest N backups afterwards.")
    ] = None,
    include_secrets: Annotated[
        bool, typer.Option("--include-secrets", help="Keep the secret key with it, which opens what is sealed in it.")
    ] = False,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="With --from-env: no process runs, so the schema may be an older one.")
    ] = False,
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the database, and every object that it names, into a directory, while the service works.

    What an earlier backup in the same directory has isn't copied again. A backup holds what users sent, and the
    hashes of keys: keep it as safe as the service itself.
    """
    from batchsvc.backup.making import make_backup
    from batchsvc.backup.vault import Vault
    from batchsvc.store.s3 import ObjectStore

    console = Console(as_json=as_json)
    with Vault.for_writing(_absolute(target)) as vault, _source(data_dir, from_env=from_env, stopped=stopped) as place:
        url = place.settings.database_url
        is_current = _check_version(url, is_live=place.is_live)
        secrets = _secrets_of(place) if include_secrets else {}
        store = ObjectStore(place.settings)
        made = make_backup(vault, url, store, is_live=place.is_live, secrets=secrets, say=console.say)
        if is_current:
            _note_backup(url, made.manifest.name, made.manifest.num_objects)
        # older backups may have what the store has lost
        removed = vault.prune(keep) if keep and not made.manifest.num_missing else 0
    manifest, fresh_mb = made.manifest, made.bytes_copied / 1e6
    shown = asdict(manifest) | {"num_copied": made.num_copied, "bytes_copied": made.bytes_copied, "removed": removed}
    shown["num_held"] = made.num_held
    console.result(shown)
    console.out(
        f"Backup {manifest.name}: revision {manifest.revision}, {manifest.num_objects:,} objects "
        f"({manifest.num_bytes / 1e6:,.1f} MB), of which {made.num_copied:,} were new ({fresh_mb:,.1f} MB)."
    )
    if not secrets:
        console.out(
            "The secret key isn't in it: keep it elsewhere, for what is sealed in the database opens by it alone "
            "(--include-secrets keeps it here)."
        )
    if manifest.num_missing:
        kept = " Older backups were kept, for they may have them." if keep else ""
        raise CommandError(
            f"The backup is finished, but the store had lost {manifest.num_missing:,} objects that the database names "
            f"(the first: {made.first_missing}): their lines are run again where that is possible.{kept}"
        )
    if made.num_held:
        raise CommandError(
            f"The backup is finished and whole, but the store has lost {made.num_held:,} objects that the database "
            f"names (the first: {made.first_held}); an earlier backup had them: `batchsvc restore {target} --lost"
            f"{_deployment(place)}` puts them back while everything works."
        )


def restore(
    source: SourceArgument,
    name: Annotated[
        str | None, typer.Option("--backup", metavar="NAME", help="Which of the backups there (default: the newest).")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Only list the backups in SOURCE.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Restore nothing: read all of the backup, say whether it is whole, move damaged objects aside.",
        ),
    ] = False,
    lost: Annotated[
        bool,
        typer.Option(
            "--lost",
            help="Only put back into the bucket what the store has lost; the stack may run, nothing else changes.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Drop what the target's database holds, and replace objects.")
    ] = False,
    shift_deadlines: Annotated[
        bool,
        typer.Option("--shift-deadlines", help="Give unfinished batches the time that has passed since the backup."),
    ] = False,
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a service of a backup: into a fresh data directory, or a fresh database and bucket. Nothing may run there.

    All of the backup is checked before anything is changed. Batches go on when the stack starts.
    """
    from batchsvc.backup.restoring import check_bucket, check_database, check_source
    from batchsvc.backup.restoring import restore as put_back
    from batchsvc.backup.vault import Vault
    from batchsvc.sealing import Seals
    from batchsvc.store.s3 import ObjectStore

    console = Console(as_json=as_json)
    vault = Vault.for_reading(_absolute(source))
    if show_list:
        _list(vault, console)
        return
    manifest = vault.manifest(name)
    if check:
        saved = check_source(vault, manifest, console.say, set_aside=True)
        console.result(asdict(manifest))
        console.out(f"Backup {manifest.name} is whole: the database, and {len(saved):,} objects.")
        return
    if lost:
        _put_back_lost(vault, manifest, console, data_dir, from_env=from_env)
        return
    with _target(data_dir, from_env=from_env) as place:
        store = ObjectStore(place.settings)
        check_database(manifest, place.settings, overwrite=overwrite)
        saved = check_source(vault, manifest, console.say)
        check_bucket(saved, store, overwrite=overwrite)
        secrets = vault.secrets(manifest)
        secret_key = place.settings.secret_key
        if place.directory is not None:
            secret_key = _joined(secret_key, secrets.get("secret_key"))
        restored = put_back(
            vault,
            manifest,
            saved,
            place.settings,
            store,
            seals=Seals.of(secret_key),
            overwrite=overwrite,
            shift_deadlines=shift_deadlines,
            say=console.say,
        )
        if place.directory is not None:
            kept = secrets | ({"secret_key": secret_key} if secret_key else {})
            for key, text in kept.items():
                if key in _KEYS:
                    place.directory.write_secret(key, text)
    console.result(asdict(restored) | {"backup": manifest.name})
    key_file = vault.folder(manifest.name) / "secrets.json" if secrets else None
    _tell(console, restored, manifest.name, place.directory, key_file)


def _put_back_lost(
    vault: Vault, manifest: Manifest, console: Console, data_dir: Path | None, *, from_env: bool
) -> None:
    from batchsvc.backup.lost import put_back
    from batchsvc.db.migrate import require_current
    from batchsvc.store.s3 import ObjectStore

    with _source(data_dir, from_env=from_env, stopped=False) as place:
        url = place.settings.database_url
        require_current(url)
        done = put_back(vault, manifest, url, ObjectStore(place.settings))
    console.result(asdict(done) | {"backup": manifest.name})
    console.out(f"Put back {done.num_put:,} of {done.num_lost:,} objects that the store had lost, of {manifest.name}.")
    if done.first_left is not None:
        raise CommandError(
            f"{done.num_lost - done.num_put:,} objects aren't whole in the backup {manifest.name} (the first: "
            f"{done.first_left}): try an older one (--backup NAME), or delete what they belong to."
        )


def _tell(console: Console, restored: Restored, name: str, directory: DataDir | None, key_file: Path | None) -> None:
    where = "the API, control and engine processes start" if directory is None else f"`batchsvc up{_flags(directory)}`"
    console.out(
        f"Restored backup {name}: {restored.num_objects:,} objects ({restored.num_copied:,} copied); "
        f"{restored.unfinished_batches:,} unfinished batches go on with {where}."
    )
    if restored.num_missing:
        console.out(f"{restored.num_missing:,} objects were lost before the backup: their lines are run again.")
    if restored.num_sealed_shut:
        which = "the key that sealed them" if key_file is None else f"the secret_key of {key_file}"
        console.out(
            f"The secrets of {restored.num_sealed_shut:,} registered stores can't be opened: add {which} to "
            "BATCHSVC_SECRET_KEY (after a comma), or register these stores again with `batchsvc admin stores add`."
        )


def _list(vault: Vault, console: Console) -> None:
    manifests = [vault.manifest(name) for name in vault.finished()]
    console.result({"backups": [asdict(one) for one in manifests], "unfinished": vault.unfinished()})
    rows = [
        {
            "name": one.name,
            "revision": one.revision,
            "objects": f"{one.num_objects:,}",
            "MB": f"{one.num_bytes / 1e6:,.1f}",
            "made by": one.made_by,
        }
        for one in manifests
    ]
    console.table(rows, ("name", "revision", "objects", "MB", "made by"))
    for name in vault.unfinished():
        console.out(f"{name} was never finished.")


@contextmanager
def _source(data_dir: Path | None, *, from_env: bool, stopped: bool) -> Iterator[_Place]:
    """What is to be copied: a deployment, a running stack, which then stays, or the files of one that doesn't run."""
    if from_env:
        yield _Place(settings=_env_settings(data_dir), is_live=not stopped)
        return
    if stopped:
        raise CommandError("--stopped goes with --from-env: whether a stack runs here is seen.", Exit.USAGE)
    from batchsvc.stack.launch import wait_until_usable
    from batchsvc.stack.options import READING, read_state
    from batchsvc.stack.store_alone import settings_of, store_alone

    directory = DataDir.at(data_dir)
    if not directory.database.exists():
        raise CommandError(f"There is no database in {directory.root}: nothing has run there yet.")
    while True:
        state = wait_until_usable(directory, READING, _PATIENCE_S)
        if state is not None:
            joined = directory.join()
            try:
                if read_state(directory) == state:
                    yield _Place(settings=settings_of(directory), is_live=True, directory=directory)
                    return
            finally:
                joined.release()
            continue
        with suppress(InUseError), store_alone(directory) as settings:  # else another command was faster: look again
            yield _Place(settings=settings, is_live=False, directory=directory)
            return


@contextmanager
def _target(data_dir: Path | None, *, from_env: bool) -> Iterator[_Place]:
    if from_env:
        yield _Place(settings=_env_settings(data_dir), is_live=False)
        return
    from batchsvc.stack.store_alone import store_alone

    directory = DataDir.at(data_dir)
    with store_alone(directory) as settings:  # raises InUseError, which says how to stop the stack
        yield _Place(settings=settings, is_live=False, directory=directory)


def _env_settings(data_dir: Path | None) -> Settings:
    from batchsvc.settings import Settings

    if data_dir is not None:
        raise CommandError("--from-env names a deployment of its own: leave --data-dir out.", Exit.USAGE)
    return Settings.from_env()


def _check_version(url: str, *, is_live: bool) -> bool:
    """Whether the database has this version's schema. Raises CommandError if a running stack's hasn't."""
    from batchsvc.db.migrate import schema_of

    schema = schema_of(url)
    schema.refuse_newer()
    if schema.found is None:
        raise CommandError("The database is empty: there is nothing to copy.")
    if schema.pending and is_live:
        raise CommandError(
            f"The database is at revision {schema.found} and this version works with {schema.head}: make the backup "
            "with the version that runs, or stop all its processes first (and, with --from-env, say --stopped)."
        )
    return not schema.pending


def _note_backup(url: str, name: str, num_objects: int) -> None:
    from batchsvc.audit.actions import Action
    from batchsvc.audit.actor import at_command_line
    from batchsvc.audit.service import record
    from batchsvc.db.session import Database

    db = Database(url)
    try:
        details = {"objects": num_objects}
        db.run(lambda session: record(session, at_command_line(), Action.BACKUP_CREATED, name, details=details))
    finally:
        db.dispose()


def _secrets_of(place: _Place) -> dict[str, str]:
    if place.directory is None:
        return {"secret_key": place.settings.secret_key} if place.settings.secret_key else {}
    paths = {name: place.directory.secrets / name for name in _KEYS}
    return {name: path.read_text(encoding="utf-8").strip() for name, path in paths.items() if path.exists()}


def _joined(ours: str | None, theirs: str | None) -> str | None:
    """The keys of a deployment that also opens what another one has sealed: its own first, which seals."""
    keys = [key.strip() for text in (ours, theirs) for key in (text or "").split(",") if key.strip()]
    return ",".join(dict.fromkeys(keys)) or None


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _deployment(place: _Place) -> str:
    return " --from-env" if place.directory is None else _flags(place.directory)


def _flags(directory: DataDir) -> str:
    return "" if directory == DataDir.at(None) else f" --data-dir {directory.root}"
