"""Stores that an admin registers, and batches whose input is there and whose results go there, over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from batchsvc.store import keys
from tests.contract.conftest import MODEL, Api
from tests.contract.test_http import envelope
from tests.tenant_store import Tenant, listening

ENDPOINT = "/v1/chat/completions"
LINE = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",'
    b' "body": {"model": "%s", "messages": [{"role": "user", "content": "x"}]}}\n' % MODEL.encode()
)


def register(api: Api, tenant: Tenant, prefix: str = "", **changes: Any) -> dict[str, Any]:
    body = tenant.registration(api.project_id, prefix, **changes)
    answer = api.call("POST", "/v1/admin/stores", key=api.admin_key, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def create(api: Api, input_file_id: str, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
    body = {"endpoint": ENDPOINT, "completion_window": "24h", "input_file_id": input_file_id, **changes}
    return api.call("POST", "/v1/batches", json=body, headers=headers or {})


def test_an_admin_registers_lists_and_removes_and_nobody_is_told_a_secret(api: Api, tenant: Tenant) -> None:
    made = register(api, tenant, "a/b")
    assert made["uri"] == tenant.uri("a/b/") and made["project_id"] == api.project_id
    again = register(api, tenant, "a/b/", access_key="rotated", region="eu-west-1")
    assert (again["id"], again["access_key"], again["region"]) == (made["id"], "rotated", "eu-west-1")
    other = register(api, tenant, "a", endpoint=None)
    assert other["id"] != made["id"] and other["endpoint"] is None
    listed = api.call("GET", "/v1/admin/stores", key=api.admin_key)
    assert {made["id"], other["id"]} <= {row["id"] for row in listed.json()["data"]}
    assert tenant.server.secret_key not in listed.text and "secret" not in listed.text
    for store in (made, other):
        assert api.call("DELETE", f"/v1/admin/stores/{store['id']}", key=api.admin_key).json()["deleted"] is True
    assert api.call("DELETE", f"/v1/admin/stores/{made['id']}", key=api.admin_key).status_code == 404


def test_a_key_of_a_project_registers_nothing(api: Api, tenant: Tenant) -> None:
    for method, path in (("POST", ""), ("GET", ""), ("DELETE", "/store_x")):
        answer = api.call(method, f"/v1/admin/stores{path}", json=tenant.registration(api.project_id))
        assert envelope(answer, 403)["code"] == "admin_only"


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"project": "proj_nobody"}, 404, "project"),
        ({"uri": "s3://bucket/a/../b"}, 400, "uri"),
        ({"uri": "https://bucket/a"}, 400, "uri"),
        ({"endpoint": "http://10.0.0.1:9000"}, 400, "endpoint"),
        ({"endpoint": "http://169.254.169.254"}, 400, "endpoint"),
        ({"endpoint": "http://127.0.0.1:9000/batchsvc"}, 400, "endpoint"),
        ({"endpoint": "http://user:pw@127.0.0.1:9000"}, 400, "endpoint"),
        ({"endpoint": "ftp://127.0.0.1"}, 400, "endpoint"),
        ({"access_key": ""}, 400, "access_key"),
        ({"secret_key": ""}, 400, "secret_key"),
        ({"region": "eu west"}, 400, "region"),
        ({"more": 1}, 400, "more"),
    ],
)
def test_what_can_not_be_registered_is_named(
    api: Api, tenant: Tenant, changes: dict[str, Any], status: int, param: str
) -> None:
    body = tenant.registration(api.project_id) | changes
    answer = api.call("POST", "/v1/admin/stores", key=api.admin_key, json=body)
    assert envelope(answer, status)["param"] == param and tenant.server.secret_key not in answer.text


def test_our_own_bucket_and_key_are_for_nobody(api: Api, tenant: Tenant) -> None:
    body = tenant.registration(api.project_id) | {"uri": f"s3://{api.settings.bucket}/in"}
    answer = api.call("POST", "/v1/admin/stores", key=api.admin_key, json=body)
    assert envelope(answer, 403)["code"] == "own_bucket"
    body = tenant.registration(api.project_id) | {"access_key": api.settings.s3_access_key}
    answer = api.call("POST", "/v1/admin/stores", key=api.admin_key, json=body)
    assert envelope(answer, 400)["param"] == "access_key"
    answer = create(api, f"s3://{api.settings.bucket}/in/x")
    assert envelope(answer, 403)["code"] == "store_not_registered"


def test_what_is_not_registered_is_403_and_no_request_leaves(api: Api, tenant: Tenant) -> None:
    with listening() as (endpoint, came):
        register(api, tenant, "in/", endpoint=endpoint)
        _, key = api.new_project()
        for uri in (tenant.uri("out/a"), tenant.uri("in"), tenant.uri("inn/a"), "s3://another-bucket/in/a"):
            refused = envelope(create(api, uri), 403)
            assert (refused["code"], refused["param"]) == ("store_not_registered", "input_file_id")
            quoted = api.call("POST", "/v1/batches/quote", json={"input_file_id": uri})
            assert envelope(quoted, 403)["code"] == "store_not_registered"
        for uri in (tenant.uri("in/../out/a"), tenant.uri("in/./a"), tenant.uri("in//a"), tenant.uri("in/")):
            assert envelope(create(api, uri), 400)["code"] == "invalid_s3_uri"
        # another project's registration is no use, and an output that is refused spares the input its request
        with pytest.raises(openai.PermissionDeniedError):
            api.client(key).batches.create(input_file_id=tenant.uri("in/a"), endpoint=ENDPOINT, completion_window="24h")
        refused = envelope(create(api, tenant.uri("in/a"), output_s3=tenant.uri("out")), 403)
        assert (refused["code"], refused["param"]) == ("store_not_registered", "output_s3")
        assert not came
    assert api.call("GET", "/v1/files").json()["data"] == []


def test_the_official_client_creates_a_batch_of_an_object(api: Api, tenant: Tenant) -> None:
    register(api, tenant, "in/")
    register(api, tenant, "out/")
    etag = tenant.put("in/requests.jsonl", LINE)
    client = api.client()
    made = client.batches.create(
        input_file_id=tenant.uri("in/requests.jsonl"),
        endpoint=ENDPOINT,
        completion_window="24h",
        extra_body={"output_s3": tenant.uri("out/night")},
    )
    assert made.status == "validating" and api.sent.planned[-1] == made.id
    shown = made.to_dict()["output_s3"]
    folder = tenant.uri(f"out/night/{made.id}/")
    assert shown["uri"] == folder and shown["manifest"] == folder + "manifest.json"
    assert (shown["state"], shown["error"], shown["attempts"]) == ("pending", None, 0)
    file = client.files.retrieve(made.input_file_id)
    assert (file.filename, file.bytes, file.status) == ("requests.jsonl", len(LINE), "uploaded")
    assert file.to_dict()["source"] == {"uri": tenant.uri("in/requests.jsonl"), "etag": etag}
    answer = api.call("GET", f"/v1/files/{file.id}/content")
    assert envelope(answer, 400)["code"] == "file_not_copied"
    assert envelope(api.call("DELETE", f"/v1/files/{file.id}"), 400)["code"] == "file_in_use"
    assert create(api, file.id).json()["output_s3"] is None, "a file of any kind"


def test_the_same_version_is_one_file_and_the_same_call_one_batch(api: Api, tenant: Tenant) -> None:
    register(api, tenant)
    uri, other = tenant.uri("a.jsonl"), {"output_s3": tenant.uri("out")}
    tenant.put("a.jsonl", LINE)
    first = create(api, uri, **other).json()
    assert create(api, uri, {"x-stainless-retry-count": "1"}, **other).json()["id"] == first["id"]
    apart = create(api, uri, {"x-stainless-retry-count": "1"}).json()
    assert apart["id"] != first["id"] and apart["input_file_id"] == first["input_file_id"]
    named = create(api, uri, {"Idempotency-Key": "k"}).json()
    assert create(api, uri, {"Idempotency-Key": "k"}).json()["id"] == named["id"]
    tenant.put("a.jsonl", LINE + LINE)
    later = create(api, uri, **other).json()
    assert later["id"] != first["id"] and later["input_file_id"] != first["input_file_id"]


def test_what_the_store_says_is_told_by_name(api: Api, tenant: Tenant) -> None:
    register(api, tenant)
    missing = envelope(create(api, tenant.uri("none.jsonl")), 400)
    assert missing["param"] == "input_file_id" and tenant.uri("none.jsonl") in missing["message"]
    tenant.put("big.jsonl", b"x" * (api.settings.max_input_bytes + 1))
    assert envelope(create(api, tenant.uri("big.jsonl")), 413)["param"] == "input_file_id"
    register(api, tenant, secret_key="wrong-secret")
    refused = create(api, tenant.uri("big.jsonl"))
    assert envelope(refused, 400)["code"] == "store_refused" and "wrong-secret" not in refused.text
    register(api, tenant, endpoint="http://127.0.0.1:1")
    assert envelope(create(api, tenant.uri("big.jsonl")), 503)["code"] == "store_unavailable"
    assert api.call("GET", "/v1/files").json()["data"] == []
    assert list(api.store.list_keys(f"{keys.INPUTS}{api.project_id}/")) == []


def test_a_quote_of_an_object_waits_for_its_copy(api: Api, tenant: Tenant) -> None:
    register(api, tenant)
    tenant.put("a.jsonl", LINE)
    answer = api.call("POST", "/v1/batches/quote", json={"input_file_id": tenant.uri("a.jsonl")})
    found = answer.json()
    assert answer.status_code == 200 and (found["status"], found["input_sha256"]) == ("queued", None)
    file = api.call("GET", f"/v1/files/{found['input_file_id']}").json()
    assert file["source"]["uri"] == tenant.uri("a.jsonl")
