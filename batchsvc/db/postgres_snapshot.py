"""Snapshots of PostgreSQL: by pg_dump and pg_restore where they are at hand, else each table by COPY.

Own copies need no program and take any server: in one transaction (REPEATABLE READ, READ ONLY) the rows of every table
go out as COPY's text. To load them, again in one transaction, our tables are dropped and made by migrations up to the
revision that they were copied at, emptied of what these put there, and the rows go in, in the order of foreign keys,
with our triggers switched off: what these would write is among the rows already.

The programs have to be of the server's own version: what a newer pg_restore sends, an older server may refuse. And
they copy databases in which all is ours: what others keep there, pg_dump would take along, and pg_restore make again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, MetaData, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from batchsvc.db import migrate
from batchsvc.db.session import Database, database_now_ms
from batchsvc.db.snapshot import (
    VERSION_TABLE,
    Kind,
    Snapshot,
    SnapshotFile,
    revision_of,
    tables_of,
    without_password,
)
from batchsvc.errors import UnavailableError

_DUMP = "database.dump.zst"
_NO_LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
_OF_TABLES = "TABLE|TABLE DATA|DEFAULT|CONSTRAINT|CHECK CONSTRAINT|FK CONSTRAINT|INDEX|STATISTICS|TRIGGER"
"""What pg_dump calls our tables and what is theirs, beside sequences and the functions of triggers."""
_HAS_OTHERS = """
WITH ours AS (
    SELECT oid FROM pg_class WHERE relnamespace = to_regnamespace('public') AND relname = ANY(:ours)
)
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname NOT IN ('public', 'information_schema') AND nspname !~ '^pg_')
    OR EXISTS (SELECT FROM pg_extension WHERE extname <> 'plpgsql')
    OR EXISTS (SELECT FROM pg_publication)
    OR EXISTS (SELECT FROM pg_event_trigger)
    OR EXISTS (SELECT FROM pg_foreign_data_wrapper)
    OR EXISTS (SELECT FROM pg_largeobject_metadata)
    OR EXISTS (
        SELECT FROM pg_depend
        WHERE refclassid = 'pg_namespace'::regclass AND refobjid = to_regnamespace('public') AND deptype = 'n'
        AND NOT (classid = 'pg_class'::regclass AND (objid IN (SELECT oid FROM ours) OR objid IN (
            SELECT objid FROM pg_depend WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_class'::regclass
            AND deptype IN ('a', 'i') AND refobjid IN (SELECT oid FROM ours)
        )))
        AND NOT (classid = 'pg_proc'::regclass AND objid IN (
            SELECT tgfoid FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM ours)
        ))
    )
"""


@contextmanager
def taken(database_url: str, tables: Collection[str]) -> Iterator[Snapshot]:
    """See snapshot_of."""
    database = Database(database_url)
    try:
        with database.snapshot() as session:
            for limit in _NO_LIMITS:
                session.execute(text(f"SET LOCAL {limit} = 0"))
            now_ms, revision = database_now_ms(session), revision_of(session)
            is_ours = not _names_service(database_url) and not _has_others(session, tables)
            program = _program("pg_dump", _server_major(session)) if is_ours else None
            if program:
                kind: Kind = "postgresql-dump"
                files = [_dump(program, database_url, session)]
            else:
                kind, files = "postgresql-copy", _tables(session, tables)
            yield Snapshot(kind=kind, revision=revision, now_ms=now_ms, session=session, files=tuple(files))
    except (DBAPIError, psycopg.Error) as error:  # psycopg's own come of COPY
        raise UnavailableError(_told(error)) from error
    finally:
        database.dispose()


def load_tables(database_url: str, revision: str, files: list[SnapshotFile], tables: Collection[str]) -> None:
    """Load an own copy: see above. A failure changes nothing."""
    with _working(database_url) as connection:
        _clear(connection, tables)
        migrate.upgrade_within(connection, revision)
        names = [str(file.table) for file in files]
        for name in names:
            _switch_triggers(connection, name, "DISABLE")
        connection.execute(text("TRUNCATE " + ", ".join(map(_quoted, names))))
        for file in files:
            columns = ", ".join(map(_quoted, file.columns))
            with _cursor(connection).copy(f"COPY {_quoted(str(file.table))} ({columns}) FROM STDIN") as copy:
                for piece in file.pieces():
                    copy.write(piece)
        for file in files:
            _switch_triggers(connection, str(file.table), "ENABLE")
            _set_sequences(connection, str(file.table), file.columns)


def restoring_program(database_url: str) -> str:
    """The pg_restore that this server takes. Raises UnavailableError where it isn't at hand."""
    if _names_service(database_url):
        raise UnavailableError(
            "DATABASE_URL names a service of libpq's, by which pg_restore might go elsewhere than our own connections: "
            "write its host, port, database and user into the address."
        )
    with _working(database_url) as connection:
        major = _major(connection)
    program = _program("pg_restore", major)
    if program is None:
        raise UnavailableError(
            f"The backup's database was written by pg_dump: install the client programs of PostgreSQL {major}, which "
            "the server is of, so that this pg_restore is on PATH."
        )
    return program


def load_dump(database_url: str, file: SnapshotFile, scratch: Path, tables: Collection[str]) -> None:
    """Load what pg_dump wrote. Raises UnavailableError where pg_restore is missing, can't read that, or fails."""
    program = restoring_program(database_url)
    packed, wanted = scratch / "database.dump", scratch / "database.list"
    try:
        with packed.open("xb") as sink:
            for piece in file.pieces():
                sink.write(piece)
        env = _environment(database_url)
        listed = subprocess.run([program, "--list", str(packed)], env=env, capture_output=True, text=True, check=False)
        if listed.returncode:
            raise UnavailableError(
                f"pg_restore can't read what pg_dump wrote ({without_password(listed.stderr)}). Nothing was dropped; "
                "restore into a PostgreSQL as new as the one that the backup is of, with its client programs."
            )
        wanted.write_text(_ours_of(listed.stdout, tables), encoding="utf-8")
        with _working(database_url) as connection:
            _clear(connection, tables)
        arguments = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges", f"--use-list={wanted}"]
        done = subprocess.run(
            [program, *arguments, f"--dbname={env['PGDATABASE']}", str(packed)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UnavailableError(
                f"pg_restore could not load the database: {without_password(done.stderr)}. The database is empty now: "
                "remove the cause, and run the restore again with --overwrite."
            )
    finally:
        packed.unlink(missing_ok=True)


def others_connected(database_url: str) -> int:
    """How many other connections this database has, of anybody."""
    with _working(database_url) as connection:
        asked = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND COALESCE(backend_type, 'client backend') = 'client backend'"
            " AND usesysid IS NOT NULL"  # hidden is the type of other roles' sessions, and of a vacuum, which has none
        )
        return int(connection.execute(text(asked)).scalar_one())


def _has_others(session: Session, tables: Collection[str]) -> bool:
    """Whether the database has anything, in whatever schema, that isn't of these tables: then no dump is ours alone."""
    return bool(session.execute(text(_HAS_OTHERS), {"ours": [*tables, VERSION_TABLE]}).scalar_one())


def _ours_of(listed: str, tables: Collection[str]) -> str:
    """Of a dump's list of contents what is of the schema of these tables and of their kinds: versions before have
    dumped what others had there, too. Sequences have a table's name, and functions of triggers no arguments."""
    names = "|".join(map(re.escape, tables))
    found = re.findall(rf"^\d+; \d+ \d+ TABLE (\S+) (?:{names}) ", listed, re.MULTILINE)
    ((schema, _),) = Counter(found).most_common(1) or [("public", 0)]
    there = re.escape(schema)
    kinds = (
        f"(?:{_OF_TABLES}) {there} ",
        f"SEQUENCE(?: OWNED BY| SET)? {there} (?:{names})_",
        rf"FUNCTION {there} \S+\(\) ",
    )
    ours = re.compile(rf"\d+; \d+ \d+ (?:{'|'.join(kinds)})")
    return "".join(line for line in listed.splitlines(keepends=True) if ours.match(line))


def _dump(program: str, database_url: str, session: Session) -> SnapshotFile:
    moment = session.execute(text("SELECT pg_export_snapshot()")).scalar_one()

    def pieces() -> Iterable[bytes]:
        arguments = ["--format=custom", "--compress=0", "--no-owner", "--no-privileges", f"--snapshot={moment}"]
        process = subprocess.Popen(
            [program, *arguments],
            env=_environment(database_url),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None, "a pipe"
        assert process.stderr is not None, "a pipe"
        with process:
            while piece := process.stdout.read(1 << 20):
                yield piece
            said = process.stderr.read().decode("utf-8", "replace")
        if process.returncode:
            raise UnavailableError(f"pg_dump could not copy the database: {without_password(said)}.")

    return SnapshotFile(name=_DUMP, pieces=pieces)


def _tables(session: Session, tables: Collection[str]) -> list[SnapshotFile]:
    """Every table of ours, in the order in which foreign keys let them be loaded."""
    connection = session.connection()
    known = MetaData()
    known.reflect(connection, only=lambda name, _: name in tables, resolve_fks=False)
    files = []
    for table in known.sorted_tables:
        if table.name != VERSION_TABLE:
            columns = tuple(column.name for column in table.columns)
            statement = f"COPY {_quoted(table.name)} ({', '.join(map(_quoted, columns))}) TO STDOUT"
            file = SnapshotFile(
                name=f"{table.name}.copy.zst",
                pieces=partial(_copied, connection, statement),
                table=table.name,
                columns=columns,
            )
            files.append(file)
    return files


def _copied(connection: Connection, statement: str) -> Iterator[bytes]:
    with _cursor(connection).copy(statement) as copy:
        for piece in copy:
            yield bytes(piece)


@contextmanager
def _working(database_url: str) -> Iterator[Connection]:
    """A transaction that takes the time that it needs. Raises UnavailableError where the server refuses a statement."""
    database = Database(database_url)
    try:
        with database.engine.begin() as connection:
            for limit in _NO_LIMITS:
                connection.execute(text(f"SET LOCAL {limit} = 0"))
            yield connection
    except (DBAPIError, psycopg.Error) as error:
        raise UnavailableError(_told(error)) from error
    finally:
        database.dispose()


def _told(error: DBAPIError | psycopg.Error) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    said, state = without_password(str(cause)), getattr(cause, "sqlstate", None)
    if not isinstance(cause, psycopg.Error) or state is None or state.startswith(("08", "57P")):
        return f"The database doesn't answer: {said}."
    if isinstance(cause, psycopg.errors.DependentObjectsStillExist):  # other errors' details may be what users sent
        said += f" ({without_password(cause.diag.message_detail or '')})"
    return f"The database refused: {said}. Remove the cause, and try again; nothing was changed."


def _clear(connection: Connection, tables: Collection[str]) -> None:
    """Drop these tables and the one of migrations, and the functions of their triggers; never what others made."""
    ours = sorted({*tables, VERSION_TABLE} & tables_of(connection))
    functions = connection.execute(
        text(
            "SELECT DISTINCT t.tgfoid::regprocedure::text FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid"
            " WHERE NOT t.tgisinternal AND c.relnamespace = current_schema()::regnamespace AND c.relname = ANY(:ours)"
        ),
        {"ours": ours},
    ).scalars()
    dropped = list(functions)
    if ours:  # all at once, for they refer to each other; a view of somebody's on one of them stops it
        connection.execute(text("DROP TABLE " + ", ".join(map(_quoted, ours))))
    for function in dropped:
        connection.execute(text(f"DROP FUNCTION IF EXISTS {function}"))


def _switch_triggers(connection: Connection, table: str, verb: str) -> None:
    connection.execute(text(f"ALTER TABLE {_quoted(table)} {verb} TRIGGER USER"))


def _set_sequences(connection: Connection, table: str, columns: Iterable[str]) -> None:
    """Let numbers that the database gives go on behind those that are there."""
    asked = text("SELECT pg_get_serial_sequence(:table, :column)")
    for column in columns:
        if sequence := connection.execute(asked, {"table": _quoted(table), "column": column}).scalar_one():
            newest = f"SELECT max({_quoted(column)}) FROM {_quoted(table)}"  # noqa: S608  names of the database
            to = text(f"SELECT setval(:sequence, coalesce(({newest}), 0) + 1, false)")
            connection.execute(to, {"sequence": sequence})


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _cursor(connection: Connection) -> Any:
    """psycopg's own cursor, which can COPY."""
    driver = connection.connection.driver_connection
    assert driver is not None, "the connection is open"
    return driver.cursor()


def _server_major(session: Session) -> int:
    return _major(session.connection())


def _major(connection: Connection) -> int:
    return int(connection.execute(text("SHOW server_version_num")).scalar_one()) // 10_000


def _program(name: str, major: int) -> str | None:
    """A program of PostgreSQL's on PATH of the server's own major version, or None."""
    path = shutil.which(name)
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)(?:\.\d+)*", said)
    return path if found and int(found[1]) == major else None


def _names_service(database_url: str) -> bool:
    """Whether an address leaves it to a service's file where the database is: that comes before what programs are told,
    and a database that they are told of before that, so they might go elsewhere than our own connections."""
    return "service" in conninfo_to_dict(re.sub(r"^postgresql\+psycopg://", "postgresql://", database_url))


def _environment(database_url: str) -> dict[str, str]:
    """How libpq's programs are told where the database is: never by argv, where `ps` would show the password. What
    the URL leaves out they take from PG* variables, as our own connections do; of a service's file, which would come
    before these, they get what it says."""
    plain = re.sub(r"^postgresql\+psycopg://", "postgresql://", database_url)
    given = conninfo_to_dict(plain)
    defaults = pq.Conninfo.get_defaults()
    names = {option.keyword.decode(): option.envvar for option in defaults}
    env = dict(os.environ)
    if "PGSERVICE" in env:
        del env["PGSERVICE"]
        env |= {one.envvar.decode(): one.val.decode() for one in defaults if one.envvar and one.val}
        env.pop("PGSERVICE", None)
    for keyword, value in given.items():
        if (variable := names.get(keyword)) and value is not None:
            env[variable.decode()] = str(value)
    env.setdefault("PGDATABASE", env.get("PGUSER", "postgres"))
    return env
