"""What an operator does in an incident, over a server's admin routes or straight in the database: the two twins behind
the commands `workers`, `claims`, `batches`, `quarantine` and `models load`.

In the database whoever runs the command is audited as the operating system names them, over HTTP the admin key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode

from batchsvc.cli.admin import opened_way
from batchsvc.stack.options import StackOptions, read_state

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from batchsvc.audit.actor import Actor
    from batchsvc.batches.offpeak import Night
    from batchsvc.cli.client import Client
    from batchsvc.cli.options import AdminOptions
    from batchsvc.db.session import Database
    from batchsvc.store.s3 import ObjectStore

_RENEW_S = 5.0  # the setting's default: after three times as long, a silent worker counts as gone


class Incidents(Protocol):
    """An operator's verbs. Every method raises ServiceError or CommandError with one sentence."""

    def workers(self) -> dict[str, Any]: ...
    def drain(self, worker: str, reason: str | None) -> dict[str, Any]: ...
    def undrain(self, worker: str) -> dict[str, Any]: ...
    def claims(self) -> dict[str, Any]: ...
    def pause_claims(self, model: str | None, reason: str | None) -> dict[str, Any]: ...
    def resume_claims(self, model: str | None) -> dict[str, Any]: ...
    def stuck(self, quiet_s: float) -> dict[str, Any]: ...
    def why(self, batch_id: str, quiet_s: float) -> dict[str, Any]: ...
    def pause_batch(self, batch_id: str, reason: str | None) -> dict[str, Any]: ...
    def resume_batch(self, batch_id: str) -> dict[str, Any]: ...
    def quarantine(self, batch_id: str | None) -> dict[str, Any]: ...
    def release(self, batch_id: str, lines: Sequence[int]) -> dict[str, Any]: ...
    def load_model(self, model: str, worker: str | None) -> dict[str, Any]: ...
    def unload_model(self, model: str, worker: str | None) -> dict[str, Any]: ...
    def served_by(self) -> dict[str, list[str]]: ...


def opened(server: AdminOptions) -> AbstractContextManager[Incidents]:
    """The way to the service that the flags and the environment name."""
    by_http: Callable[[Client], Incidents] = HttpIncidents

    def by_database(database: Database) -> Incidents:
        return DatabaseIncidents(database, lambda: _store(server))

    return opened_way(by_http, by_database, server)


class HttpIncidents:
    """A server's admin routes; the key must be an admin key."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def workers(self) -> dict[str, Any]:
        return self._client.get("/admin/workers")

    def drain(self, worker: str, reason: str | None) -> dict[str, Any]:
        return self._client.post(f"/admin/workers/{quote(worker, safe='')}/drain", {"reason": reason})

    def undrain(self, worker: str) -> dict[str, Any]:
        return self._client.post(f"/admin/workers/{quote(worker, safe='')}/undrain", {})

    def claims(self) -> dict[str, Any]:
        return self._client.get("/admin/claims")

    def pause_claims(self, model: str | None, reason: str | None) -> dict[str, Any]:
        return self._client.post("/admin/claims/pause", {"model": model, "reason": reason})

    def resume_claims(self, model: str | None) -> dict[str, Any]:
        return self._client.post("/admin/claims/resume", {"model": model})

    def stuck(self, quiet_s: float) -> dict[str, Any]:
        return self._client.get(f"/admin/batches/stuck?{urlencode({'quiet_s': quiet_s})}")

    def why(self, batch_id: str, quiet_s: float) -> dict[str, Any]:
        return self._client.get(f"/admin/batches/{quote(batch_id, safe='')}/why?{urlencode({'quiet_s': quiet_s})}")

    def pause_batch(self, batch_id: str, reason: str | None) -> dict[str, Any]:
        return self._client.post(f"/admin/batches/{quote(batch_id, safe='')}/pause", {"reason": reason})

    def resume_batch(self, batch_id: str) -> dict[str, Any]:
        return self._client.post(f"/admin/batches/{quote(batch_id, safe='')}/resume", {})

    def quarantine(self, batch_id: str | None) -> dict[str, Any]:
        return self._client.get("/admin/quarantine" + (f"?{urlencode({'batch_id': batch_id})}" if batch_id else ""))

    def release(self, batch_id: str, lines: Sequence[int]) -> dict[str, Any]:
        return self._client.post(f"/admin/quarantine/{quote(batch_id, safe='')}/release", {"lines": list(lines)})

    def load_model(self, model: str, worker: str | None) -> dict[str, Any]:
        return self._client.post("/admin/models/load", {"model": model, "worker": worker})

    def unload_model(self, model: str, worker: str | None) -> dict[str, Any]:
        return self._client.post("/admin/models/unload", {"model": model, "worker": worker})

    def served_by(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self._client.get("/admin/models/served_by")["data"]
        return found


class DatabaseIncidents:
    """The service's own database; `store` opens its object store, or gives None where that doesn't run."""

    def __init__(self, database: Database, store: Callable[[], ObjectStore | None] = lambda: None) -> None:
        self._database, self._store = database, store

    def workers(self) -> dict[str, Any]:
        from batchsvc.batches import worker_service

        with self._database.reading() as session:
            return worker_service.shown_workers(session, _RENEW_S)

    def drain(self, worker: str, reason: str | None) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        return self._acted(lambda s, actor: incident_service.drain(s, actor, worker, reason, _RENEW_S))

    def undrain(self, worker: str) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        return self._acted(lambda s, actor: incident_service.undrain(s, actor, worker, _RENEW_S))

    def claims(self) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        with self._database.reading() as session:
            return incident_service.claims(session)

    def pause_claims(self, model: str | None, reason: str | None) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        return self._acted(lambda s, actor: incident_service.pause_claims(s, actor, model, reason))

    def resume_claims(self, model: str | None) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        return self._acted(lambda s, actor: incident_service.resume_claims(s, actor, model))

    def stuck(self, quiet_s: float) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        with self._database.reading() as session:
            return incident_service.stuck_batches(session, _night(), _RENEW_S, quiet_s)

    def why(self, batch_id: str, quiet_s: float) -> dict[str, Any]:
        from batchsvc.batches import error_codes, incident_service
        from batchsvc.batches.estimate import Habits

        with self._database.reading() as session:
            shown = incident_service.why(session, batch_id, _night(), Habits(), _RENEW_S, quiet_s)
        store = self._store()
        return shown | {"errors": error_codes.counted(self._database, store, batch_id) if store else {}}

    def pause_batch(self, batch_id: str, reason: str | None) -> dict[str, Any]:
        from batchsvc.batches import incident_service, service

        def pause(session: Session, actor: Actor) -> dict[str, Any]:
            row = incident_service.pause_batch(session, actor, batch_id, reason)
            return service.show(session, [row], _RENEW_S)[0]

        return self._acted(pause)

    def resume_batch(self, batch_id: str) -> dict[str, Any]:
        from batchsvc.batches import incident_service, service

        def resume(session: Session, actor: Actor) -> dict[str, Any]:
            return service.show(session, [incident_service.resume_batch(session, actor, batch_id)], _RENEW_S)[0]

        return self._acted(resume)

    def quarantine(self, batch_id: str | None) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        with self._database.reading() as session:
            return incident_service.quarantine(session, batch_id)

    def release(self, batch_id: str, lines: Sequence[int]) -> dict[str, Any]:
        from batchsvc.batches import incident_service

        return self._acted(lambda s, actor: incident_service.release(s, actor, batch_id, lines))

    def load_model(self, model: str, worker: str | None) -> dict[str, Any]:
        from batchsvc.batches import loading_service

        return self._acted(lambda s, actor: loading_service.load(s, actor, model, worker, _RENEW_S))

    def unload_model(self, model: str, worker: str | None) -> dict[str, Any]:
        from batchsvc.batches import loading_service

        return self._acted(lambda s, actor: loading_service.unload(s, actor, model, worker, _RENEW_S))

    def served_by(self) -> dict[str, list[str]]:
        from batchsvc.batches import loading_service

        with self._database.reading() as session:
            return loading_service.served_by(session, _RENEW_S)

    def _acted(self, act: Callable[[Session, Actor], dict[str, Any]]) -> dict[str, Any]:
        from batchsvc.audit.actor import at_command_line

        actor = at_command_line()
        return self._database.run(lambda session: act(session, actor))


def _store(server: AdminOptions) -> ObjectStore | None:
    from batchsvc.settings import Settings
    from batchsvc.store.s3 import ObjectStore

    if server.from_env:
        return ObjectStore(Settings.from_env())
    directory = server.target.directory
    if directory is None or read_state(directory) is None:
        return None
    from batchsvc.stack.children import Secrets, service_env

    options, ports = StackOptions(root=directory.root), directory.read_json("ports.json")
    return ObjectStore(Settings.from_env(service_env(directory, options, ports, Secrets.of(directory))))


def _night() -> Night:
    """The off-peak hours of this shell's settings, which `batchsvc up` takes from its own."""
    from batchsvc.batches.offpeak import Night
    from batchsvc.settings import Settings

    nowhere = {"DATABASE_URL": "sqlite:///nowhere", "REDIS_URL": "redis://nowhere"}
    return Night.from_settings(Settings.from_env({**os.environ, **nowhere}))
