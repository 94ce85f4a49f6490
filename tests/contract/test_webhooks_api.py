"""Webhook endpoints as the official client manages them, over a real server and to a real receiver."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import openai
import pytest

from batchsvc.cli import main
from batchsvc.webhooks import delivery_queries, queries, routes
from batchsvc.webhooks.service import MOST_ENDPOINTS
from tests.contract.conftest import Api, on_sqlite
from tests.contract.test_http import envelope
from tests.receiver import receiving

HERE = "http://127.0.0.1:9/hook"


def test_the_official_client_manages_endpoints(api: Api) -> None:
    webhooks = api.client().webhooks
    assert {"batch.completed", "batch.at_risk", "spend.alert"} <= set(webhooks.event_types.list().data)
    made = webhooks.create(name="mine", url=HERE, event_types=["batch.failed", "batch.completed"])
    assert made.object == "webhook_endpoint" and made.signing_secret.startswith("whsec_")
    assert made.event_types == ["batch.completed", "batch.failed"] and made.url == HERE
    other = webhooks.create(name="other", url=HERE, event_types=["batch.completed"])
    assert [one.id for one in webhooks.list(limit=1)] == [other.id, made.id], "newest first, page by page"
    read = webhooks.retrieve(made.id)
    assert read.name == "mine" and read.signing_secret_hint and made.signing_secret not in read.to_json()
    changed = webhooks.update(made.id, name="new name", event_types=["batch.expired"])
    assert (changed.name, changed.event_types, changed.url) == ("new name", ["batch.expired"], HERE)
    rotated = webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.id == made.id and rotated.signing_secret != made.signing_secret
    assert webhooks.rotate_secret(made.id).signing_secret != rotated.signing_secret
    gone = webhooks.delete(made.id)
    assert gone.deleted and gone.id == made.id and [one.id for one in webhooks.list()] == [other.id]
    with pytest.raises(openai.NotFoundError):
        webhooks.retrieve(made.id)


def test_a_test_event_is_verified_by_the_official_client(api: Api) -> None:
    webhooks = api.client().webhooks
    with receiving() as receiver:
        made = webhooks.create(name="mine", url=receiver.url, event_types=["batch.completed"])
        new = webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
        receiver.statuses = [418]
        result = webhooks.test(made.id, event_type="batch.cancelled")
        assert (result.status_code, result.success, result.event_type) == (418, True, "batch.cancelled")
        (got,) = receiver.received
        assert got.unwrap(made.signing_secret) == got.unwrap(new.signing_secret)
        assert got.unwrap(new.signing_secret).type == "batch.cancelled"
    error = envelope(api.call("POST", f"/v1/webhook_endpoints/{made.id}/test", json={}), 400)
    assert error["code"] == "webhook_test_failed", "nobody is there any more"


def test_deliveries_are_listed_with_their_attempts(api: Api) -> None:
    made = api.client().webhooks.create(name="mine", url=HERE, event_types=["batch.completed"])
    assert api.call("GET", f"/v1/webhook_endpoints/{made.id}/deliveries").json()["data"] == []
    with api.db.transaction() as session:
        assert queries.add_event(session, api.project_id, "batch.completed", {"id": "batch_1"}, f"ended:{made.id}")
    api.db.run(delivery_queries.spread)
    (row,) = api.call("GET", f"/v1/webhook_endpoints/{made.id}/deliveries").json()["data"]
    assert (row["event_type"], row["state"], row["attempts"]) == ("batch.completed", "pending", [])
    assert row["data"] == {"id": "batch_1"} and row["next_attempt_at"]


@pytest.mark.parametrize(
    "url",
    [
        *("http://10.0.0.1/", "https://169.254.169.254/latest", "https://[::ffff:10.0.0.1]/", "https://[::1]/"),
        *("https://u:p@127.0.0.1/", "ftp://127.0.0.1/", "https://127.0.0.1@10.0.0.1/", "nonsense", ""),
    ],
)
def test_addresses_that_lead_inside_are_refused(api: Api, url: str) -> None:
    body = {"name": "n", "url": url, "event_types": ["batch.completed"]}
    assert envelope(api.call("POST", "/v1/webhook_endpoints", json=body), 400)["param"] == "url"
    made = api.call("POST", "/v1/webhook_endpoints", json=body | {"url": HERE}).json()["id"]
    changed = api.call("POST", f"/v1/webhook_endpoints/{made}", json={"url": url})
    assert envelope(changed, 400)["param"] == "url"
    assert api.call("GET", f"/v1/webhook_endpoints/{made}").json()["url"] == HERE


def test_what_can_not_be_used_is_named(api: Api) -> None:
    good = {"name": "n", "url": HERE, "event_types": ["batch.completed"]}
    for change, param in (
        ({"event_types": []}, "event_types"),
        ({"event_types": ["response.completed"]}, "event_types"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"more": 1}, "more"),
    ):
        assert envelope(api.call("POST", "/v1/webhook_endpoints", json=good | change), 400)["param"] == param
    made = [api.call("POST", "/v1/webhook_endpoints", json=good).status_code for _ in range(MOST_ENDPOINTS + 1)]
    assert made == [200] * MOST_ENDPOINTS + [400]


def test_slow_servers_of_others_take_few_threads(api: Api) -> None:
    """Whoever waits for a name server or a receiver holds one of few places; the other calls go on."""
    body = {"name": "n", "url": HERE, "event_types": ["batch.completed"]}
    made = api.call("POST", "/v1/webhook_endpoints", json=body).json()["id"]
    hook = f"/v1/webhook_endpoints/{made}"
    with ExitStack() as places:
        while routes._WAITING.acquire(blocking=False):
            places.callback(routes._WAITING.release)
        for path, call in (("/v1/webhook_endpoints", body), (hook, {"url": HERE}), (f"{hook}/test", {})):
            assert envelope(api.call("POST", path, json=call), 503)["code"] == "busy"
        assert api.call("POST", hook, json={"name": "m"}).json()["name"] == "m"
    assert api.call("POST", "/v1/webhook_endpoints", json=body).status_code == 200


@on_sqlite
def test_the_command_line(api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        target = ("--url", api.url, "--api-key", api.key)
        monkeypatch.setattr(sys, "argv", ["batchsvc", "webhooks", *arguments, *target])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().out

    with receiving() as receiver:
        code, out = run("create", receiver.url)
        assert code == 0 and out.strip().startswith("whsec_")
        made = json.loads(run("list", "--json")[1])["data"][0]
        assert made["name"] == "127.0.0.1" and "batch.at_risk" not in made["event_types"]
        assert made["id"] in run("list")[1]
        every = json.loads(run("create", HERE, "--events", "all", "--name", "x", "--json")[1])
        assert "batch.at_risk" in every["event_types"] and every["signing_secret"]
        assert run("test", made["id"]) == (0, f"{made['id']} answered 204 to batch.completed.\n")
        receiver.statuses = [500]
        assert run("test", made["id"], "--event", "batch.failed")[0] == 1
        code, new = run("rotate", made["id"], "--keep-old")
        assert code == 0 and run("test", made["id"])[0] == 0
        got = receiver.received[-1]
        assert got.unwrap(new.strip()) == got.unwrap(out.strip())
    assert run("deliveries", made["id"]) == (
        0,
        "event  type  state  attempts  last answer  created  next attempt\n",
    )
    assert run("delete", made["id"])[0] == 0 and run("delete", made["id"])[0] != 0
    assert run("create", "http://10.0.0.1/")[0] != 0 and run("create", HERE, "--events", "")[0] == 2
