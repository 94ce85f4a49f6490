"""What `doctor` asks of a running service, by its settings: each part does what the service does with it, and says how.

Nothing here changes the service: what is written to database, Redis and store is taken back at once. A finding is `ok`,
`warn` (it works, and somebody should look) or `fail` (work stops or will), each with the way out.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from sqlalchemy.exc import SQLAlchemyError

from batchsvc.batches import (
    incident_service,
    models,
    queries,
    reconcile_sample_queries,
    switch_queries,
    tally_queries,
    worker_service,
)
from batchsvc.batches.offpeak import Night
from batchsvc.billing import queries as billing_queries
from batchsvc.clock import now_ms
from batchsvc.db import migrate
from batchsvc.db.session import Database, database_now_ms
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from batchsvc.webhooks import queries as webhook_queries

Level = Literal["ok", "warn", "fail"]

_LEAST_FREE_BYTES = 256 * 1024 * 1024
_LITTLE_FREE_BYTES = 5 * 1024**3
_SKEW_S = 2.0  # of clocks: logs of several machines stop making sense, and S3 refuses signatures later (15 minutes)
_TICKS = 3  # reaper periods without a tick
_TICK_GRACE_S = 30.0
_OUTBOX_S = 600.0
_REDIS_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found; `next` is the way out, "" if there is none to take."""

    name: str
    level: Level
    says: str
    next: str = ""


@dataclass(frozen=True, slots=True)
class _Said:
    """What a check says of itself, before it has its name."""

    says: str
    level: Level = "ok"
    next: str = ""


def examine(settings: Settings) -> Iterator[Finding]:
    """Every check, one after the other; one that breaks is a finding itself. The rest needs a database that answers."""
    database = Database(settings.database_url)
    try:
        reached = _found("database", lambda: _database(settings, database))
        yield reached
        for name, check in (
            ("redis", lambda: _redis(settings)),
            ("store", lambda: _store(settings)),
            ("disk", lambda: _disk(settings)),
        ):
            yield _found(name, check)
        if reached.level == "fail":
            return
        for name, ask in _QUESTIONS.items():
            yield _found(name, partial(ask, settings, database))
    finally:
        database.dispose()


def _found(name: str, check: Callable[[], _Said]) -> Finding:
    try:
        said = check()
    except ServiceError as error:
        said = _Said(error.message, "fail")
    except (SQLAlchemyError, OSError) as error:
        said = _Said(f"it can't be asked ({type(error).__name__})", "fail", "the log of the process says more")
    return Finding(name=name, level=said.level, says=said.says, next=said.next)


# ---- parts


def _database(settings: Settings, database: Database) -> _Said:
    way = "start the database, and check DATABASE_URL"
    try:
        schema = migrate.schema_of(settings.database_url)
    except ServiceError as error:
        return _Said(error.message, "fail", way)
    schema.refuse_newer()
    if schema.pending:
        says = f"its schema is {schema.found or 'empty'}, and this version needs {schema.head}"
        return _Said(says, "fail", "batchsvc db upgrade")
    try:
        with database.transaction() as session:
            queries.probe_write(session)
    except SQLAlchemyError as error:
        return _Said(f"it can't be written ({type(error).__name__})", "fail", way)
    kind = "SQLite" if database.is_sqlite else "PostgreSQL"
    return _Said(f"{kind} takes writes, schema {schema.head}")


def _redis(settings: Settings) -> _Said:
    import redis

    client = redis.Redis.from_url(
        settings.redis_url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
    )
    name, value = f"batchsvc:doctor:{secrets.token_hex(8)}", secrets.token_hex(8)
    try:
        client.set(name, value, px=10_000)
        is_kept = client.getdel(name) == value.encode()
    except redis.RedisError as error:
        says = f"it doesn't answer ({type(error).__name__}): work goes on by the database alone, and starts later"
        return _Said(says, "warn", "start Redis, and check REDIS_URL")
    finally:
        client.close()
    if not is_kept:
        return _Said("it has lost what was just written", "warn", "check its memory and its eviction policy")
    return _Said("it keeps what is written")


def _store(settings: Settings) -> _Said:
    way = "start the store, check AWS_ENDPOINT_URL_S3, the keys and BATCHSVC_BUCKET"
    store, key, data = ObjectStore(settings), f"doctor/{secrets.token_hex(8)}", secrets.token_bytes(64)
    try:
        store.put(key, data)
        is_same = store.get(key) == data
        store.delete([key])
        is_gone = store.head(key) is None
    except ServiceError as error:
        return _Said(error.message, "fail", way)
    if not is_same:
        return _Said("it gave back other bytes than it took", "fail", way)
    if not is_gone:
        return _Said("it still has what was deleted", "warn", "allow s3:DeleteObject on the bucket")
    return _Said(f"bucket {settings.bucket}: written, read, deleted")


def _disk(settings: Settings) -> _Said:
    """Where this machine writes: temporary files, and a database that is a file."""
    places = {Path(os.environ.get("TMPDIR") or "/tmp")}  # noqa: S108  what tempfile takes
    if settings.database_url.startswith("sqlite:///"):
        places.add(Path(settings.database_url.removeprefix("sqlite:///")).parent)
    free = {place: shutil.disk_usage(place).free for place in places}
    place = min(free, key=lambda place: free[place])
    says = f"{free[place] / 1e9:,.1f} GB free in {place}"
    if free[place] < _LEAST_FREE_BYTES:
        return _Said(says, "fail", "free some space")
    return _Said(says, "warn" if free[place] < _LITTLE_FREE_BYTES else "ok", "free some space")


# ---- what rows say


def _clocks(settings: Settings, database: Database) -> _Said:
    began = time.monotonic()
    with database.reading() as session:
        theirs = database_now_ms(session)
        took_s = time.monotonic() - began
        skews = {"this machine": (now_ms() - theirs) / 1000}
        for row in worker_service.shown_workers(session, settings.renew_s)["data"]:
            if row["clock_skew_s"] is not None:
                skews[row["name"] or row["id"]] = row["clock_skew_s"]
    name = max(skews, key=lambda name: abs(skews[name]))
    says = f"{name} is {abs(skews[name]):.1f} s {'ahead of' if skews[name] > 0 else 'behind'} the database"
    if abs(skews[name]) > _SKEW_S + took_s:
        return _Said(says, "warn", "synchronise the clocks (chrony, systemd-timesyncd)")
    return _Said(f"within {_SKEW_S:g} s of the database: {', '.join(skews)}")


def _models(_settings: Settings, database: Database) -> _Said:
    """Whether what is registered can be read here; workers elsewhere have files of their own."""
    from engine.load.fetch import KNOWN_MODELS, cached_path

    with database.reading() as session:
        rows = [row for row in models.list_models(session, project_id=None) if row.alias_of is None]
    lacking, to_pull = [], []
    for row in rows:
        if row.path in KNOWN_MODELS:
            to_pull += [row.id] if cached_path(row.path) is None else []
        elif not row.path.startswith("hf:") and not os.access(row.path, os.R_OK):
            lacking.append(f"{row.id} ({row.path})")
    if lacking:
        says = f"not readable on this machine: {', '.join(lacking)}"
        return _Said(says, "warn", "mount it here, or `batchsvc models add PATH --as NAME` with its new place")
    pulled = f"; pulled on first use: {', '.join(to_pull)}" if to_pull else ""
    return _Said(f"{len(rows)} registered{pulled}")


def _workers(settings: Settings, database: Database) -> _Said:
    with database.reading() as session:
        rows = worker_service.shown_workers(session, settings.renew_s)["data"]
        drained = [row for row in rows if row["drain_reason"]]
        since_ms = database_now_ms(session) - round(3 * settings.renew_s * 1000)
        able = switch_queries.able(session, since_ms)
        idle = [
            model.name
            for model in switch_queries.installed(session)
            if model.digest not in able and switch_queries.unfinished(session, model.digest, 1)
        ]
    if idle:
        says = f"unfinished batches wait, and no worker serves {', '.join(idle)}"
        if drained:
            name = drained[0]["name"] or drained[0]["id"]
            return _Said(f"{says}: {name} is drained", "fail", f"batchsvc workers undrain {name}")
        return _Said(says, "fail", f"start a worker, or batchsvc models load {idle[0]}")
    if not rows:
        return _Said("no engine worker is alive", "warn", "start one: batchsvc up, or batchsvc serve engine")
    stopped = [f"{row['name'] or row['id']} is {row['state']}" for row in drained]
    problems = [says for row in rows for says in row["problems"]]
    if stopped or problems:
        return _Said("; ".join([*stopped, *problems]), "warn", "batchsvc workers list")
    silent_s = max(row["silent_s"] for row in rows)
    return _Said(f"{len(rows)} alive, the last heartbeat of each within {silent_s:.0f} s")


def _claims(_settings: Settings, database: Database) -> _Said:
    with database.reading() as session:
        rows = incident_service.claims(session)["data"]
    if rows:
        paused = ", ".join(f"{row['model'] or 'all'} ({row['reason']})" for row in rows)
        return _Said(f"paused: {paused}", "warn", "batchsvc claims resume")
    return _Said("none are paused")


def _batches(settings: Settings, database: Database) -> _Said:
    with database.reading() as session:
        page = incident_service.stuck_batches(
            session, Night.from_settings(settings), settings.renew_s, incident_service.QUIET_S
        )
    count = len(page["data"])
    if count:
        return _Said(f"{count} don't move", "warn", "batchsvc batches stuck")
    return _Said("every batch moves")


def _reaper(settings: Settings, database: Database) -> _Said:
    with database.reading() as session:
        now = database_now_ms(session)
        tick = tally_queries.all_of(session).get("reaper_ticks")
    if tick is None or not tick.at_ms:
        return _Said("it has never ticked", "fail", "start a control worker: batchsvc up, or batchsvc serve control")
    age_s = (now - tick.at_ms) / 1000
    if age_s > _TICKS * settings.reaper_s + _TICK_GRACE_S:
        says = f"its last tick was {age_s:,.0f} s ago: nothing is repaired, no deadline is kept"
        return _Said(says, "fail", "start a control worker, or see its log: batchsvc logs control")
    return _Said(f"its last tick was {age_s:.0f} s ago")


def _outbox(_settings: Settings, database: Database) -> _Said:
    with database.reading() as session:
        now, oldest = database_now_ms(session), webhook_queries.oldest_unsent_ms(session)
    age_s = 0.0 if oldest is None else (now - oldest) / 1000
    if age_s > _OUTBOX_S:
        says = f"an event has waited for {age_s / 60:,.0f} minutes to be sent"
        return _Said(says, "warn", "batchsvc webhooks list, then batchsvc webhooks deliveries WE")
    return _Said("events are sent")


def _ledger(_settings: Settings, database: Database) -> _Said:
    with database.reading() as session:
        drift = billing_queries.drift_nanos(session)
        found = reconcile_sample_queries.counts(session)
    if drift:
        return _Said(f"its accounts sum to {drift} nano-dollars, not to 0", "fail", "batchsvc reconcile --all")
    if found.differences:
        says = f"{found.differences} numbers of batches that were added up again differ"
        return _Said(says, "fail", "batchsvc reconcile --all")
    return _Said(f"its accounts sum to 0; {found.batches} batches were added up again")


_QUESTIONS: dict[str, Callable[[Settings, Database], _Said]] = {
    "clocks": _clocks,
    "models": _models,
    "workers": _workers,
    "claims": _claims,
    "batches": _batches,
    "reaper": _reaper,
    "outbox": _outbox,
    "ledger": _ledger,
}
