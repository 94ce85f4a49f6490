"""Our OpenAPI description is true: whatever it lets a client send is answered, and answered as it says.

schemathesis makes calls of every operation from the description, right ones and wrong ones, with the ids of objects
that are there and with others. No call may break the server, and no answer may have a status, a content type or a shape
that the description doesn't know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CheckContext, not_a_server_error
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from batchsvc.accounts import service as accounts
from batchsvc.app import create_app
from batchsvc.http.description import describe
from tests import servers
from tests.contract.conftest import Api, _api
from tests.contract.test_http import upload
from tests.dispatchers import NullDispatcher

# what parsers let pass and stores don't
NASTY: list[Any] = [
    2**63,
    -(2**63) - 1,
    2**70,
    1e308,
    -1,
    "",
    "\0",
    "\ud800",
    "x" * 70_000,
    "9" * 40,
    [],
    [[]],
    {},
    None,
    True,
]
CALLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Answered by a worker, and none is here: 503 is right."""


def only_calls_lack_workers(ctx: CheckContext, response: Response, case: schemathesis.Case) -> bool | None:
    """No server error but that of calls that nobody can answer."""
    if response.status_code == 503 and case.path in CALLS:
        return None
    return not_a_server_error(ctx, response, case)


CHECKS = [only_calls_lack_workers, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def own(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    redis_url: str,
    s3_server: servers.S3Server,
) -> Iterator[Api]:
    """A server of this module's own: what is sent here changes prices, models and projects."""
    if request.param == "sqlite":
        yield from _with_keys(
            _api(f"sqlite:///{tmp_path_factory.mktemp('own') / 'test.sqlite3'}", redis_url, s3_server)
        )
    else:
        with servers.fresh_database(request.getfixturevalue("postgres_url")) as url:
            yield from _with_keys(_api(url, redis_url, s3_server))


def _with_keys(made: Iterator[Api]) -> Iterator[Api]:
    for api in made:
        with api.db.transaction() as session:
            api.project_id = accounts.create_project(session, "fuzzed").id
            api.key = api.admin_key = accounts.create_key(session, api.project_id, "admin", is_admin=True)[1]
        yield api


@pytest.fixture(scope="module")
def ids(own: Api) -> dict[str, str]:
    """Objects that are there, by the names of path parameters; the key of the calls is not among them."""
    file = upload(own).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    hook = {"name": "n", "url": "http://127.0.0.1:9/", "event_types": ["batch.completed"]}
    parts = {"bytes": 9, "filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
    message = {"requests": [{"custom_id": "a", "params": {}}]}

    def made(path: str, body: dict[str, Any]) -> str:
        answer = own.call("POST", f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    return {
        "file_id": file,
        "batch_id": made("batches", batch),
        "quote_id": made("batches/quote", {"input_file_id": file}),
        "webhook_endpoint_id": made("webhook_endpoints", hook),
        "upload_id": made("uploads", parts),
        "message_batch_id": made("messages/batches", message),
        "project": own.project_id,
        "version": "1",
    }


def fuzz(api: Api, ids: dict[str, str], examples: int) -> list[str]:
    """What is wrong with the answers, one text an operation."""
    answer = api.call("GET", "/openapi.json")
    assert answer.status_code == 200
    schema = schemathesis.openapi.from_dict(answer.json())
    headers = {"Authorization": f"Bearer {api.key}"}
    quiet = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    wrong = []
    with requests.Session() as session:
        session.trust_env = False
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in GenerationMode:

                @quiet
                @given(case=operation.as_strategy(generation_mode=mode), is_there=st.booleans())
                def attempt(case: schemathesis.Case, is_there: bool) -> None:
                    if is_there:
                        known = {name: ids[name] for name in case.path_parameters or {} if name in ids}
                        case.path_parameters = {**(case.path_parameters or {}), **known}
                    response = case.call(base_url=api.url, session=session, headers=headers)
                    case.validate_response(response, checks=CHECKS)

                try:
                    attempt()
                except Unsatisfiable:
                    continue  # nothing can be wrong where there is no parameter
                except BaseExceptionGroup as failures:
                    wrong.append(str(failures))
    return wrong


@pytest.mark.parametrize("own", ["postgresql"], indirect=True)  # it refuses more than SQLite does
def test_every_operation_answers_as_described(own: Api, ids: dict[str, str]) -> None:
    assert fuzz(own, ids, examples=2) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some thousand calls an operation
def test_every_operation_answers_as_described_at_length(own: Api, ids: dict[str, str]) -> None:
    assert fuzz(own, ids, examples=150) == []


def fields_of(described: dict[str, Any], path: str, method: str) -> list[str]:
    """The fields of a JSON body; none if there is no such body."""
    content = described["paths"][path][method].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    schema = next((one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"), schema)
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    return list(described["components"]["schemas"].get(name, schema).get("properties", {}))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some thousand calls an operation
def test_no_value_of_a_body_breaks_the_server(own: Api, ids: dict[str, str]) -> None:
    described = own.call("GET", "/openapi.json").json()
    broken: list[str] = []
    for found in schemathesis.openapi.from_dict(described).get_all_operations():
        operation = found.ok()

        @settings(max_examples=2, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
        @given(case=operation.as_strategy())
        def attempt(case: schemathesis.Case) -> None:
            path = case.path.format_map({**(case.path_parameters or {}), **ids})
            whole = case.body if isinstance(case.body, dict) else {}
            names = fields_of(described, case.path, case.method.lower())
            for name, value in product(names, NASTY):
                sent = json.dumps({**whole, name: value})
                answer = own.call(case.method, path, content=sent, headers={"content-type": "application/json"})
                if answer.status_code >= 500 and (answer.status_code, case.path in CALLS) != (503, True):
                    broken.append(f"{case.method} {case.path} {name}={value!r}: {answer.status_code}")

        attempt()
    assert broken == []


@pytest.mark.parametrize("own", ["postgresql"], indirect=True)
def test_the_description_needs_a_key_and_knows_every_route(own: Api) -> None:
    assert own.call("GET", "/openapi.json", None).status_code == 401
    paths = describe(create_app(own.settings, NullDispatcher()))["paths"]
    for path in ("/v1/batches", "/v1/files/{file_id}/content", "/v1/messages/batches", "/v1/organization/costs"):
        assert path in paths
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert operation.get("description") or operation.get("summary"), f"{method} {path}"
            assert path in ("/livez", "/readyz", "/metrics") or {"400", "401"} <= operation["responses"].keys()
