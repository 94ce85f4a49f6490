"""A worker's /metrics from another machine: for admin keys, also while its database is away."""

from __future__ import annotations

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from batchsvc import listener
from batchsvc.accounts import service as accounts
from batchsvc.batches import queries
from tests.workers.conftest import World
from workers.signals import Signals


def test_an_admin_key_scrapes_a_worker_from_elsewhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OperationalError("select", {}, Exception("away"))

    monkeypatch.setattr(listener, "is_loopback", lambda _client: False)
    with world.db.transaction() as session:
        project_id = accounts.create_project(session, "operations").id
        _, admin = accounts.create_key(session, project_id, "scraper", is_admin=True)
        _, tenant = accounts.create_key(session, project_id, "tenant")
    with Signals.opened(world.settings, "control") as signals:

        def scrape(key: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(f"{signals._listener.url}/metrics", headers=headers, trust_env=False, timeout=30)

        assert (scrape(admin).status_code, scrape(tenant).status_code, scrape("x").status_code) == (200, 401, 401)
        monkeypatch.setattr(accounts, "caller", away)
        monkeypatch.setattr(queries, "probe_write", away)
        for _ in range(2):
            shown = scrape(admin)
            assert shown.status_code == 200 and 'batchsvc_part_up{part="database"} 0.0' in shown.text
        assert scrape(tenant).status_code == 401
