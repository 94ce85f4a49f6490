"""No route shows or changes what belongs to another project, however its id is written.

The routes are read from the application: one with a parameter that no table below knows fails here, so a new route
can't be forgotten.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from fastapi.routing import APIRoute

from batchsvc.app import create_app
from tests.contract.conftest import Api
from tests.contract.test_http import _flat, envelope, upload
from tests.dispatchers import NullDispatcher

pytestmark = pytest.mark.parametrize("server", ["postgresql"], indirect=True)  # it refuses more than SQLite does
OWNED = {
    "file_id",
    "upload_id",
    "batch_id",
    "message_batch_id",
    "quote_id",
    "webhook_endpoint_id",
}  # in paths: what one project owns
SHARED = {"name"}  # names of models: the same for all projects
WITHIN = {"custom_id"}  # what names something inside of what is owned
# what the deployment's admin key alone may name
ADMIN_ROUTES = (
    "/v1/admin/",
    "/v1/organization/projects",
    "/v1/organization/admin_api_keys",
    "/v1/organization/audit_logs",
)
ADMIN_ONLY = {"key_id", "store_id", "project", "batch_id", "object_id", "version", "action"}
ADMIN_ONLY |= {"worker", "project_id", "api_key_id", "service_account_id", "rate_limit_id"}
REFERENCES = {  # in query or body
    ("/v1/files", "after"),
    ("/v1/batches", "after"),
    ("/v1/batches", "input_file_id"),
    ("/v1/batches", "quote_id"),
    ("/v1/batches/quote", "input_file_id"),
    ("/v1/batches/{batch_id}/results", "after"),
    ("/v1/messages/batches", "after_id"),
    ("/v1/messages/batches", "before_id"),
    ("/v1/webhook_endpoints", "after"),
    ("/v1/webhook_endpoints/{webhook_endpoint_id}/deliveries", "after"),
}
OPEN = {"/livez", "/readyz", "/metrics"}
TRICKS = (
    {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "localhost", "X-Real-IP": "127.0.0.1"},
    {"X-Original-URL": "/v1/admin/keys", "X-Rewrite-URL": "/v1/admin/keys"},
    {"X-HTTP-Method-Override": "DELETE", "X-Method-Override": "DELETE"},
    {"OpenAI-Project": "{owner}", "OpenAI-Organization": "{owner}", "X-Project-Id": "{owner}"},
    {"Host": "evil.example"},
    {"Cookie": "project={owner}; api_key=sk"},
)


@dataclass
class Route:
    method: str
    template: str
    arguments: set[str]  # of query and body

    @property
    def is_admin(self) -> bool:
        return self.template.startswith(ADMIN_ROUTES)

    @property
    def parameters(self) -> set[str]:
        return {name.removesuffix(":path") for name in re.findall(r"\{([^}]*)\}", self.template)}

    def path(self, ids: dict[str, str], name: str = "x") -> str:
        return re.sub(r"\{([^}:]*)[^}]*\}", lambda found: ids.get(found[1], name), self.template)


def routes(api: Api) -> list[Route]:
    found = []
    for route in _flat(create_app(api.settings, NullDispatcher()).routes):
        for method in sorted(route.methods):
            if route.path not in OPEN:
                found.append(Route(method, route.path, set(arguments(route))))
    assert len(found) >= 23
    return found


def arguments(route: APIRoute) -> Iterator[str]:
    """Names of all query parameters and body fields."""
    described = (route.openapi_extra or {}).get("requestBody", {"content": {}})["content"]
    for kind in described.values():
        yield from kind["schema"]["properties"]
    waiting = [route.dependant]
    while waiting:
        one = waiting.pop()
        waiting += one.dependencies
        yield from (parameter.alias for parameter in one.query_params)
        for body in one.body_params:
            yield from getattr(body.field_info.annotation, "model_fields", {body.alias: None})


@pytest.fixture
def theirs(api: Api) -> dict[str, str]:
    """Ids of what the project of the fixture owns; the tests come with another project's key."""
    file = upload(api).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    quote = api.call("POST", "/v1/batches/quote", json={"input_file_id": file}).json()["id"]
    hook = {"name": "n", "url": "http://127.0.0.1:9/", "event_types": ["batch.completed"]}
    endpoint = api.call("POST", "/v1/webhook_endpoints", json=hook).json()["id"]
    batch = api.call("POST", "/v1/batches", json=body).json()["id"]
    parts = {"bytes": 9, "filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
    upload_id = api.call("POST", "/v1/uploads", json=parts).json()["id"]
    message = {"requests": [{"custom_id": "a", "params": {}}]}
    message_id = api.call("POST", "/v1/messages/batches", json=message).json()["id"]
    return {
        "message_batch_id": message_id,
        "file_id": file,
        "upload_id": upload_id,
        "quote_id": quote,
        "batch_id": batch,
        "webhook_endpoint_id": endpoint,
    }


def look(api: Api, theirs: dict[str, str]) -> list[dict[str, Any]]:
    """What the owner sees, to be compared before and after."""
    ones = [f"{kind}/{theirs[name]}" for kind, name in (("files", "file_id"), ("batches", "batch_id"))]
    hook = f"webhook_endpoints/{theirs['webhook_endpoint_id']}"
    paths = [*ones, f"batches/quote/{theirs['quote_id']}", hook, f"{hook}/deliveries", "files", "batches"]
    return [api.call("GET", f"/v1/{path}").json() for path in paths]


def test_every_parameter_is_known(api: Api) -> None:
    for route in routes(api):
        known = ADMIN_ONLY | SHARED | WITHIN if route.is_admin else OWNED | SHARED | WITHIN
        assert route.parameters <= known, f"{route.template}: say above whom its parameters belong to"
        for argument in route.arguments:
            if not route.is_admin and (argument == "after" or argument.endswith("_id")):
                assert (route.template, argument) in REFERENCES, f"{route.template}: say above what {argument} names"


def test_what_belongs_to_others_is_not_there(api: Api, theirs: dict[str, str]) -> None:
    _, key = api.new_project()
    before = look(api, theirs)
    never = {"file_id": "file-" + "0" * 24, "batch_id": "batch_" + "0" * 24, "quote_id": "quote_" + "0" * 24}
    never["message_batch_id"] = "msgbatch_" + "1" * 24  # none is a part of another
    never["upload_id"] = "upload_" + "0" * 24
    never["webhook_endpoint_id"] = "we_" + "0" * 24
    walked = 0
    for route in routes(api):
        if not route.parameters & OWNED or route.is_admin:
            continue
        answers = []
        for ids in (theirs, never):
            error = envelope(api.call(route.method, route.path(ids), key, json={}), 404)
            text = str(error)
            for id_ in ids.values():
                text = text.replace(id_, "ID")
            answers.append(text)
        assert answers[0] == answers[1], "an id of others looks like one that never was"
        walked += 1
    assert walked >= 5
    for listing in ("/v1/files", "/v1/batches", "/v1/webhook_endpoints"):
        assert api.call("GET", listing, key).json()["data"] == []
        for id_ in theirs.values():
            assert envelope(api.call("GET", f"{listing}?after={id_}", key), 400)["param"] == "after"
    for cursor in ("after_id", "before_id"):
        envelope(api.call("GET", f"/v1/messages/batches?{cursor}={theirs['message_batch_id']}", key), 400)
    quote = {"input_file_id": theirs["file_id"]}
    assert envelope(api.call("POST", "/v1/batches/quote", key, json=quote), 400)["param"] == "input_file_id"
    body = {"input_file_id": theirs["file_id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert envelope(api.call("POST", "/v1/batches", key, json=body), 400)["param"] == "input_file_id"
    body |= {"input_file_id": upload(api, key=key).json()["id"], "quote_id": theirs["quote_id"]}
    assert envelope(api.call("POST", "/v1/batches", key, json=body), 404)["param"] == "quote_id"
    assert look(api, theirs) == before


def test_admin_routes_tell_nobody_else_what_exists(api: Api, theirs: dict[str, str]) -> None:
    before = look(api, theirs)
    walked = 0
    for route in routes(api):
        if route.is_admin:
            for ids in (theirs, {"batch_id": "batch_nope"}):
                answer = api.call(route.method, route.path({**ids, "project": api.project_id}), json={})
                assert envelope(answer, 403)["code"] == "admin_only", "even of one's own project"
            walked += 1
    assert walked >= 10
    assert look(api, theirs) == before


def test_odd_spellings_of_an_id_reach_nothing(api: Api, theirs: dict[str, str]) -> None:
    _, key = api.new_project()
    before = look(api, theirs)
    for route in routes(api):
        if not route.parameters & OWNED or route.is_admin:
            continue
        (parameter,) = route.parameters - WITHIN
        id_ = theirs[parameter]
        for odd in (
            f"..%2f{id_}",
            f"%2e%2e%2f%2e%2e%2f{id_}",
            f"x%2f..%2f{id_}",
            f"..%5c{id_}",
            f"{id_}%2f..%2f{id_}",
            f"{id_}%00",
            f"{id_};project={api.project_id}",
            f"{id_}%3fproject_id={api.project_id}",
            quote(f"http://127.0.0.1/v1/batches/{id_}", safe=""),
            quote(f"file:///etc/passwd#{id_}", safe=""),
            f"%20{id_}",
            f"{id_}%0d%0aX-Injected:%201",
            "*",
            "%25",
            "%27%20OR%20%271%27=%271",
        ):
            answer = api.call(route.method, route.path({parameter: odd}), key, json={})
            assert answer.status_code in (400, 404, 405), (route, odd, answer.text)
            envelope(answer, answer.status_code)
            assert "x-injected" not in answer.headers
    assert look(api, theirs) == before


def test_headers_change_nobodys_project(api: Api, theirs: dict[str, str]) -> None:
    _, key = api.new_project()
    before = look(api, theirs)
    path = f"/v1/batches/{theirs['batch_id']}"
    for trick in TRICKS:
        headers = {name: value.replace("{owner}", api.project_id) for name, value in trick.items()}
        envelope(api.call("GET", path, key, headers=headers), 404)
        envelope(api.call("POST", path + "/cancel", key, headers=headers, json={}), 404)
        assert api.call("GET", "/v1/files", key, headers=headers).json()["data"] == []
        envelope(api.call("GET", "/v1/admin/keys", key, headers=headers), 403)
        envelope(api.call("GET", "/v1/files", None, headers=headers), 401)
    assert look(api, theirs) == before


def test_request_targets_that_are_urls_reach_nothing(api: Api, theirs: dict[str, str]) -> None:
    """Written by hand: no client would send them."""
    _, key = api.new_project()
    before = look(api, theirs)
    server = urlsplit(api.url)
    for target in (
        f"http://evil.example/v1/batches/{theirs['batch_id']}",
        f"http://127.0.0.1:{server.port}/v1/files/{theirs['file_id']}/content",
        f"//evil.example/v1/batches/{theirs['batch_id']}",
        f"/v1/files/../batches/{theirs['batch_id']}",
        f"/v1/batches/{theirs['batch_id']}/../../admin/keys",
        "/v1/../v1/admin/keys",
        "*",
    ):
        for line in (f"GET {target} HTTP/1.1", f"POST {target}/cancel HTTP/1.1", f"DELETE {target} HTTP/1.1"):
            with socket.create_connection((server.hostname, server.port), timeout=30) as connection:
                head = f"{line}\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 0\r\nConnection: close\r\n"
                connection.sendall(f"{head}\r\n".encode())
                answer = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
            status = int(answer.split(b" ", 2)[1])
            assert status in (400, 403, 404, 405), (line, answer)
    assert look(api, theirs) == before
