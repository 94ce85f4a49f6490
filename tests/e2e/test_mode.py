"""Test mode through the official client: the same file, the same shapes, other objects, no money, and magic prompts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from batchsvc.batches.magic import CALL_CODES, FAIL_CODES, LINE_CODES
from batchsvc.db.session import Database
from batchsvc.stack.options import read_state
from tests.e2e.conftest import CommandLine, Stack, line, wait_for

Client = openai.OpenAI


@pytest.fixture
def clients(stack: Stack, cli: CommandLine) -> tuple[Client, Client]:
    """One of a test key, one of a live key of the same project."""
    state = read_state(stack.directory)
    assert state is not None
    made = cli("keys", "create", "tests", "--test", *stack.flags)
    assert made.code == 0, made.err
    assert made.out.startswith("sk_test_")
    live = stack.directory.api_key.read_text().strip()
    return tuple(openai.OpenAI(base_url=state.url, api_key=key) for key in (made.out.strip(), live))  # type: ignore[return-value]


def magic(number: int, model: str, text: str, **body: object) -> dict[str, Any]:
    row = line(number, model, **body)
    row["body"]["messages"] = [{"role": "user", "content": text}]
    return row


def run(client: Client, rows: list[dict[str, Any]], until: tuple[str, ...] = ("completed",), **more: Any) -> Any:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_body=more
    )
    ended = ("completed", "failed", "expired", "cancelled")
    found = wait_for(lambda: (b := client.batches.retrieve(batch.id)).status in ended and b, "the end of the batch")
    assert found.status in until, found
    return found


def rows_of(client: Client, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def shape(value: Any) -> Any:
    """What is the same of two answers that say something else."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return type(value).__name__


def test_a_test_key_gives_the_same_shapes_in_objects_and_a_ledger_of_their_own(
    clients: tuple[Client, Client], stack: Stack
) -> None:
    test, live = clients
    rows = [line(number, stack.model, n=1 + number % 2) for number in range(6)]
    ours, theirs = run(test, rows), run(live, rows)
    assert shape(ours.to_dict()) == shape(theirs.to_dict())
    assert shape(rows_of(test, ours.output_file_id)) == shape(rows_of(live, theirs.output_file_id))
    for mine, others, foreign in ((test, live, theirs), (live, test, ours)):
        for call in (
            lambda: mine.batches.retrieve(foreign.id),  # noqa: B023
            lambda: mine.batches.cancel(foreign.id),  # noqa: B023
            lambda: mine.files.content(foreign.output_file_id),  # noqa: B023
            lambda: mine.files.retrieve(foreign.input_file_id),  # noqa: B023
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert foreign.id not in {batch.id for batch in mine.batches.list(limit=100)}
        assert foreign.id in {batch.id for batch in others.batches.list(limit=100)}
    database = Database(stack.directory.database_url)
    with database.engine.connect() as connection:
        entries = connection.exec_driver_sql(
            "SELECT t.project_id, e.account, SUM(e.amount_nanos) FROM ledger_entries e"
            " JOIN ledger_transactions t ON t.id = e.transaction_id GROUP BY 1, 2"
        ).all()
    database.dispose()
    assert {row[1] for row in entries if row[0].startswith("proj_test_")} == {
        "test:revenue",
        *(
            f"{kind}:{row[0]}"
            for row in entries
            if row[0].startswith("proj_test_")
            for kind in ("available", "reserved")
        ),
    }
    assert all(row[1] != "test:revenue" for row in entries if not row[0].startswith("proj_test_"))


def test_usage_of_tests_is_shown_to_test_keys_alone(
    clients: tuple[Client, Client], stack: Stack, cli: CommandLine
) -> None:
    test, live = clients
    admin = openai.OpenAI(base_url=live.base_url, api_key=stack.directory.admin_key.read_text().strip())
    batch = run(test, [line(1, stack.model)])

    def batches(client: Client, path: str) -> set[str]:
        since = int(time.time()) - 86_400
        asked = {"start_time": str(since), "group_by[]": "batch_id", "limit": "7"}
        page = client.get(path, cast_to=httpx.Response, options={"params": asked}).json()
        return {result["batch_id"] for bucket in page["data"] for result in bucket["results"]}

    for path in ("/organization/costs", "/organization/usage/completions"):
        assert batch.id in batches(test, path)
        assert batch.id not in batches(admin, path)
        with pytest.raises(openai.PermissionDeniedError):
            batches(live, path)
    keys = json.loads(cli("keys", "list", "--json", *stack.flags).out)["data"]
    twin = next(row["project_id"] for row in keys if row["mode"] == "test")
    assert all(row["id"] != twin for row in json.loads(cli("admin", "projects", "--json", *stack.flags).out)["data"])
    for refused in (
        cli("invoice", "draft", twin, "--month", "2026-01", *stack.flags),
        cli("topup", twin, "5", "--reason", "r", "--key", "k", *stack.flags),
    ):
        assert refused.code != 0
        assert "A project for tests" in refused.err
    refused = cli("keys", "create", "x", "--test", "--admin", *stack.flags)
    assert "can't be an admin key" in refused.err
    reconciled = cli("reconcile", "--batch", batch.id, *stack.flags)
    assert reconciled.code == 0, reconciled.err


def test_magic_prompts_do_what_the_table_says(clients: tuple[Client, Client], stack: Stack, cli: CommandLine) -> None:
    test, live = clients
    statuses = {
        "context_length_exceeded": 400,
        "grammar_not_usable": 400,
        "invalid_value": 400,
        "budget_exceeded": None,
    }
    spells = {f"test:fail {code}": (code, statuses.get(code, 500)) for code in LINE_CODES}
    spells |= {
        "test:flaky 3": ("engine_error", 500),
        "test:refuse unsupported_parameter": ("unsupported_parameter", 400),
        "test:fail nonsense": ("invalid_value", 400),
        "test:fail no_worker": ("invalid_value", 400),  # which calls alone know
    }
    answered = ["test:slow 1", "test:flaky 1", "Hello."]
    rows = [magic(number, stack.model, text) for number, text in enumerate([*spells, *answered])]
    batch = run(test, rows)
    errors = {row["custom_id"]: row for row in rows_of(test, batch.error_file_id)}
    found = {}
    for number, text in enumerate(spells):
        row = errors.pop(f"r{number}")
        response = row["response"]
        found[text] = (
            ((row["error"] or {}).get("code"), None)
            if response is None
            else (response["body"]["error"]["code"], response["status_code"])
        )
    assert found == spells
    assert not errors
    assert (batch.to_dict()["lines_over_budget"], batch.request_counts.failed) == (1, len(spells))
    reconciled = cli("reconcile", "--batch", batch.id, *stack.flags)
    assert reconciled.code == 0, reconciled.err
    why = cli("batches", "why", batch.id, "--json", *stack.flags).json
    assert why["errors"] == Counter(code for code, _ in spells.values()), "an operator sees the codes"
    assert "1 poison" in cli("batches", "why", batch.id, *stack.flags).out
    assert len(rows_of(test, batch.output_file_id)) == len(answered)
    # to a live key these are prompts like any other
    plain = run(live, [magic(1, stack.model, "test:fail invalid_logits")])
    assert plain.request_counts.completed == 1


def test_a_batch_of_tests_fails_validation_or_skips_as_asked(clients: tuple[Client, Client], stack: Stack) -> None:
    test, _ = clients
    rows = [magic(1, stack.model, "test:invalid invalid_json"), magic(2, stack.model, "Hello.")]
    failed = run(test, rows, ("failed",))
    assert [(error.line, error.code) for error in failed.errors.data] == [(1, "invalid_json")]
    skipped = run(test, rows, on_invalid="skip")
    assert (skipped.request_counts.completed, skipped.request_counts.failed) == (1, 1)


def test_a_line_of_tests_lets_its_batch_expire(clients: tuple[Client, Client], stack: Stack) -> None:
    test, _ = clients
    rows = [magic(1, stack.model, "Hello."), magic(2, stack.model, "test:expire")]
    expired = run(test, rows, ("expired",))
    assert (expired.request_counts.completed, expired.request_counts.failed) == (1, 1)
    [row] = rows_of(test, expired.error_file_id)
    assert row["error"]["code"] == "batch_expired"


def test_calls_of_a_test_key_are_answered_and_can_be_told_to_fail(clients: tuple[Client, Client], stack: Stack) -> None:
    test, _ = clients

    def call(text: str) -> Callable[[], Any]:
        said = [{"role": "user", "content": text}]
        return lambda: test.chat.completions.create(model=stack.model, messages=said, max_tokens=4)  # type: ignore[arg-type]

    assert call("Hello.")().choices[0].message.content
    with pytest.raises(openai.BadRequestError):
        call("test:refuse unsupported_value")()
    at_once = test.with_options(max_retries=0)
    statuses = {"too_many_calls": 429, "no_worker": 503, "worker_lost": 503, "budget_exceeded": 400, "poison": 400}
    statuses |= {"context_length_exceeded": 400, "grammar_not_usable": 400, "invalid_value": 400}
    for code in FAIL_CODES:
        text = f"test:fail {code}"
        with pytest.raises(openai.APIStatusError) as failed:
            at_once.chat.completions.create(model=stack.model, messages=[{"role": "user", "content": text}])
        assert failed.value.status_code == statuses.get(code, 500), code
        assert failed.value.code == (code if code in CALL_CODES else "invalid_value")
        if statuses.get(code) in (429, 503):
            assert int(failed.value.response.headers["retry-after"]) > 0
