"""The routes that explain a bill: what a client may see of them, and what only an operator."""

from __future__ import annotations

from tests.contract.conftest import Api
from tests.contract.test_http import envelope, upload


def test_a_line_that_is_not_there_and_an_engine_that_is_not_shown(api: Api) -> None:
    body = {"input_file_id": upload(api).json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    made = api.call("POST", "/v1/batches", json=body)
    assert made.status_code == 200, made.text
    batch = made.json()["id"]
    for custom_id in ("nope", "a/b", "a%2Fb", "%25", "x" * 500):
        error = envelope(api.call("GET", f"/v1/batches/{batch}/lines/{custom_id}"), 404)
        assert error["param"] == "custom_id"
        told = envelope(api.call("GET", f"/v1/admin/batches/{batch}/lines/{custom_id}", api.admin_key), 404)
        assert told == error, "an operator is told the same, whoever's batch it is"
    assert envelope(api.call("GET", f"/v1/admin/batches/{batch}/lines/r1"), 403)["code"] == "admin_only"
    assert envelope(api.call("GET", "/v1/admin/batches/batch_nope/lines/r1", api.admin_key), 404)
    shown = api.call("GET", f"/v1/batches/{batch}/explanation").json()
    assert shown["batch_id"] == batch and "engine" not in shown
    assert envelope(api.call("GET", f"/v1/admin/batches/{batch}/explanation"), 403)["code"] == "admin_only"
    assert api.call("GET", f"/v1/admin/batches/{batch}/explanation", api.admin_key).json()["engine"] is None
    assert envelope(api.call("GET", "/v1/admin/batches/batch_nope/explanation", api.admin_key), 404)
