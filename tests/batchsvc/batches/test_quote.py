"""Quotes over the API: what they say, what they pin, how they are planned, and when a batch can't have one."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchsvc.batches import quote_planning, quote_queries
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.tables import Batch, Model, Quote, Window
from batchsvc.billing.pricing import most_nanos
from batchsvc.clock import now_ms
from batchsvc.money import Rates
from batchsvc.settings import Settings
from tests.batchsvc.batches.planned import jsonl, line
from tests.batchsvc.batches.quoting import Quoting, quoting, with_settings

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # where the SQL is not the point
SHARED = "You are a helpful assistant that reads tickets. Order 1234567 was shipped to Berlin. "
RATES = Rates(input=10_000_000, cached_input=2_500_000, output=40_000_000)


@pytest.fixture
def door(settings: Settings, tiny_model: Path) -> Iterator[Quoting]:
    with quoting(settings, tiny_model) as made:
        yield made


def tickets(count: int, **body: Any) -> bytes:
    """Requests with a common beginning, some of them twice."""
    return jsonl(*(line(f"id{i}", SHARED + f"Ticket {i % (count - count // 4)}", **body) for i in range(count)))


def refused(answer: Any, code: str, param: str) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    return str(error["message"])


def test_a_quote_says_what_the_batch_then_plans(door: Quoting) -> None:
    data = tickets(12)
    quote = door.quote(data)
    assert not door.hints.quotes, "planned while the caller waited"
    assert (quote["object"], quote["status"], quote["errors"]) == ("quote", "ready", None)
    assert quote["input_sha256"] == hashlib.sha256(data).hexdigest()
    assert (quote["model"], quote["model_digest"]) == ("tiny", door.planned.text.meta.digest)
    assert quote["template_sha256"] == hashlib.sha256(door.planned.text.meta.chat_template.encode()).hexdigest()
    assert (quote["price_version"], quote["tier"]) == (1, "batch_24h")
    assert quote["rates"] == {"input": 10_000_000, "cached_input": 2_500_000, "output": 40_000_000}
    assert quote["plan"]["windows"] == 1
    assert quote["expires_at"] - quote["created_at"] in (86_400, 86_401)
    assert quote["request_counts"] == {"total": 12, "runnable": 12, "rejected": 0}
    answer = door.create(quote["input_file_id"], quote_id=quote["id"])
    assert answer.status_code == 200, answer.text
    batch_id = answer.json()["id"]
    assert answer.json()["quote_id"] == quote["id"]
    door.planned.plan(batch_id)
    lines = door.planned.lines(batch_id).values()
    assert quote["usage"]["input_tokens"] == sum(tokens for _, tokens, _, _ in lines)
    cached = sum(cached for _, _, cached, _ in lines)
    assert quote["usage"]["input_tokens_details"]["cached_tokens"] == cached > 0
    cost = quote["cost"]
    assert cost["input_nanos"] == sum(
        most_nanos(RATES, input_tokens=tokens, planned_cached_tokens=cached, max_tokens=0)
        for _, tokens, cached, _ in lines
    )
    row = door.planned.batch(batch_id)
    window = door.planned.rows(Window, batch_id)[0]
    assert cost["most_nanos"] == window.reserve_nanos, "to the nano-dollar"
    assert row.rates is not None and row.rates["tier"] == quote["rates"]
    assert (row.model_digest, row.weight_format, row.kv_format) == (quote["model_digest"], "bf16", "bf16")
    assert cost["output_nanos"]["low"] < cost["output_nanos"]["expected"] < cost["output_nanos"]["high"]
    assert cost["total_nanos"]["high"] == cost["most_nanos"]
    assert quote["output_basis"] == "max_tokens"


def test_a_long_file_is_an_object_to_poll(door: Quoting) -> None:
    data = tickets(2_001, max_tokens=1)
    quote = door.ask(data).json()
    assert quote["status"] == "queued" and door.hints.quotes == [quote["id"]]
    assert "cost" not in quote and quote["expires_at"] is None
    refused(door.create(quote["input_file_id"], quote_id=quote["id"]), "quote_not_ready", "quote_id")
    assert door.plan(quote["id"]) == PlanProgress.DONE
    assert door.shown(quote["id"])["request_counts"]["total"] == 2_001
    assert door.plan(quote["id"]) == PlanProgress.DONE, "again changes nothing"


@on_sqlite
def test_2000_lines_are_planned_while_the_caller_waits(door: Quoting) -> None:
    assert door.ask(tickets(2_000, max_tokens=1)).json()["status"] == "ready"


@on_sqlite
def test_parquet_is_quoted_by_its_rows(door: Quoting) -> None:
    for rows, status in ((3, "ready"), (2_001, "queued")):
        bodies = [line(f"id{i}", f"text {i}")["body"] for i in range(rows)]
        table = pa.table({"custom_id": [f"id{i}" for i in range(rows)], "body": [json.dumps(body) for body in bodies]})
        pq.write_table(table, sink := io.BytesIO())
        file_id = door.upload(sink.getvalue(), "in.parquet")
        answer = door.client.post("/v1/batches/quote", json={"input_file_id": file_id})
        assert answer.json()["status"] == status
        assert status == "queued" or answer.json()["request_counts"]["total"] == rows


def test_windows_are_those_of_the_settings_and_add_up(door: Quoting) -> None:
    small = with_settings(door, window_lines=5)
    data = tickets(18)
    quote, one = small.quote(data), door.quote(data)
    assert (quote["plan"]["windows"], one["plan"]["windows"]) == (4, 1)
    assert (quote["plan"]["window_lines"], one["plan"]["window_lines"]) == (5, 50_000)
    assert quote["usage"]["input_tokens"] == one["usage"]["input_tokens"]
    assert quote["cost"]["input_nanos"] > one["cost"]["input_nanos"], "sharing ends with a window"
    # a batch runs in the windows of its quote, whatever is configured by then
    for made, quoted, windows in ((door, quote, 4), (small, one, 1)):
        batch_id = made.create(quoted["input_file_id"], quote_id=quoted["id"]).json()["id"]
        made.planned.plan(batch_id)
        rows = made.planned.rows(Window, batch_id)
        assert len(rows) == windows
        assert sum(window.reserve_nanos for window in rows) == quoted["cost"]["most_nanos"]


@on_sqlite
def test_the_default_of_max_tokens_is_pinned(door: Quoting) -> None:
    data = jsonl(line("a", "one text", max_tokens=None), line("b", "one text", max_tokens=9))
    quote = with_settings(door, default_max_tokens=9).quote(data)
    batch_id = door.create(quote["input_file_id"], quote_id=quote["id"]).json()["id"]
    door.planned.plan(batch_id)
    assert {row[3] for row in door.planned.lines(batch_id).values()} == {9}, "so the two lines are one request"
    assert door.planned.rows(Window, batch_id)[0].reserve_nanos == quote["cost"]["most_nanos"]


def test_refused_input_fails_with_all_problems(door: Quoting) -> None:
    data = jsonl(line("a"), b"{broken\n", line("a"), line("c") | {"url": "/v1/elsewhere"})
    quote = with_settings(door, window_lines=2).quote(data)
    assert quote["status"] == "failed" and quote["errors_total"] == 3
    found = {(error["line"], error["code"]) for error in quote["errors"]["data"]}
    assert found == {(2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "url_mismatch")}
    refused(door.create(quote["input_file_id"], quote_id=quote["id"]), "quote_failed", "quote_id")
    assert door.quote(jsonl(b"\n"))["errors"]["data"][0]["code"] == "empty_file"
    assert door.quote(jsonl(line("a", model="nobody")))["status"] == "failed"


@on_sqlite
def test_lines_that_would_be_rejected_are_listed_and_cost_nothing(door: Quoting) -> None:
    good = [line("a", "one"), line("d", "two")]
    quote = door.quote(jsonl(good[0], b"{broken\n", line("c", best_of=2), good[1]), on_invalid="skip")
    assert quote["status"] == "ready"
    assert quote["request_counts"] == {"total": 4, "runnable": 2, "rejected": 2}
    problems = quote["problems"]
    assert problems["total"] == 2
    assert [(one["line"], one["code"], one["param"]) for one in problems["data"]] == [
        (2, "invalid_json_line", None),
        (3, "unsupported_parameter", "best_of"),
    ]
    assert quote["cost"] == door.quote(jsonl(*good))["cost"]
    batch = door.create(quote["input_file_id"], quote_id=quote["id"]).json()
    assert batch["on_invalid"] == "skip", "what the call leaves out is the quote's"
    nothing = door.quote(jsonl(line("c", best_of=2)))
    assert nothing["status"] == "ready" and nothing["cost"]["most_nanos"] == 0


def test_a_batch_can_not_have_the_quote_of_something_else(door: Quoting) -> None:
    data = tickets(8)
    quote = door.quote(data)
    file_id, use = quote["input_file_id"], {"quote_id": quote["id"]}
    other = door.upload(tickets(9))
    says = refused(door.create(other, **use), "quote_changed", "input_file_id")
    assert quote["input_sha256"] in says
    assert door.create(door.upload(data), **use).status_code == 200, "the same bytes are the same input"
    refused(door.create(file_id, on_invalid="skip", **use), "quote_changed", "on_invalid")
    refused(door.create(file_id, model="second", **use), "quote_changed", "model")
    hour = with_settings(door, windows="1h")
    refused(hour.create(file_id, completion_window="1h", **use), "quote_changed", "completion_window")
    door.change(Model, "tiny", digest="ab" * 32)
    says = refused(door.create(other, **use), "quote_changed", "input_file_id")
    assert "ab" * 32 in says and quote["model_digest"] in says and quote["input_sha256"] in says, "all is named"
    refused(door.create(file_id, **use), "quote_changed", "quote_id")
    door.change(Model, "tiny", digest=quote["model_digest"])
    door.change(Quote, quote["id"], expires_ms=now_ms() - 1)
    refused(door.create(file_id, **use), "quote_expired", "quote_id")
    missing = door.create(file_id, quote_id="quote_" + "0" * 24)
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "quote_id"


@on_sqlite
def test_a_model_that_changes_after_the_creation_fails_the_batch(door: Quoting) -> None:
    quote = door.quote(tickets(4))
    batch_ids = [door.create(quote["input_file_id"], quote_id=quote["id"]).json()["id"] for _ in range(2)]
    with door.planned.db.transaction() as session:
        session.get_one(Batch, batch_ids[0]).template_sha256 = "0" * 64  # as if another one were in the files now
    door.planned.plan(batch_ids[0])
    door.change(Model, "tiny", digest="ab" * 32)
    door.planned.plan(batch_ids[1])
    for batch_id, thing in zip(batch_ids, ("chat template", "model"), strict=True):
        batch = door.planned.batch(batch_id)
        assert batch.status == "failed" and batch.errors is not None
        assert batch.errors[0]["code"] == "quote_changed" and thing in batch.errors[0]["message"]


def test_a_killed_planner_costs_one_window(door: Quoting) -> None:
    small = with_settings(door, window_lines=6)
    file_id = small.upload(tickets(30))
    quote_id = small.client.post("/v1/batches/quote", json={"input_file_id": file_id}).json()["id"]
    whole = small.shown(quote_id)
    small.change(  # as if it had been queued
        Quote, quote_id, status="queued", windows=[], found=None, num_lines=0, expires_ms=None, ended_ms=None
    )
    context = small.planned.context
    assert quote_planning.plan_next_window(context, quote_id, "w1") == PlanProgress.AGAIN
    first = context.db.run(lambda session: quote_queries.claim(session, quote_id, "dies", 0.05))
    assert not isinstance(first, bool) and first.plan.window_no == 1
    with context.db.reading() as session:
        assert quote_queries.due(session) == [], "its lease holds"
    small.change(Quote, quote_id, plan_lease_ms=0)
    with context.db.reading() as session:
        assert quote_queries.due(session) == [quote_id], "the reaper sees it"
    assert small.plan(quote_id) == PlanProgress.DONE
    assert not context.db.run(lambda session: quote_queries.finish(session, quote_id, first.plan.epoch, 60))
    again = small.shown(quote_id)
    for name in ("cost", "usage", "request_counts", "status"):
        assert again[name] == whole[name]
    assert len(small.planned.garbage()) >= 4, "what planning kept of finished windows goes"


@on_sqlite
def test_a_damaged_window_starts_the_quote_over(door: Quoting) -> None:
    small = with_settings(door, window_lines=6)
    quote_id = small.ask(tickets(30)).json()["id"]
    whole = small.shown(quote_id)
    small.change(Quote, quote_id, status="queued", windows=[], found=None, num_lines=0)
    fresh = small.planned.with_settings()  # a process that knows nothing yet
    quote_planning.plan_next_window(fresh.context, quote_id, "w1")
    fresh.store.put(small.row(quote_id).windows[0]["key"], b"damaged")
    assert small.plan(quote_id, small.planned.with_settings()) == PlanProgress.DONE
    assert small.shown(quote_id)["cost"] == whole["cost"]


@on_sqlite
def test_a_process_without_the_model_leaves_the_quote_to_another(door: Quoting) -> None:
    door.change(Model, "tiny", path="hf:nobody/nothing")
    quote = door.ask(tickets(4)).json()
    assert quote["status"] == "queued" and door.hints.quotes == [quote["id"]]
    with door.planned.db.reading() as session:
        assert quote_queries.due(session) == [quote["id"]], "and no lease is left"


@on_sqlite
def test_an_input_that_goes_away_fails_the_quote(door: Quoting) -> None:
    quote = door.ask(tickets(2_001)).json()
    assert door.client.delete(f"/v1/files/{quote['input_file_id']}").status_code == 200
    door.plan(quote["id"])
    shown = door.shown(quote["id"])
    assert shown["status"] == "failed" and "doesn't exist any more" in shown["errors"]["data"][0]["message"]


def test_wrong_arguments_are_refused_by_name(door: Quoting) -> None:
    data = tickets(4)
    for wrong, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"model": "nobody"}, "model"),
        ({"sample": 0}, "sample"),
        ({"on_invalid": "drop"}, "on_invalid"),
        ({"max_cost": 1}, "max_cost"),
        ({"input_file_id": "file-none"}, "input_file_id"),
    ):
        answer = door.ask(data, **wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


@on_sqlite
def test_a_call_that_arrives_twice_makes_one_quote(door: Quoting) -> None:
    body = {"input_file_id": door.upload(tickets(4))}
    answers = [door.client.post("/v1/batches/quote", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert answers[0].json()["status"] == "ready"


@on_sqlite
def test_old_quotes_are_forgotten(door: Quoting) -> None:
    old, young = door.quote(tickets(4)), door.quote(tickets(4))
    door.change(Quote, old["id"], created_ms=now_ms() - 31 * 86_400_000)
    assert door.planned.db.run(quote_queries.forget_old) == 1
    assert door.client.get(f"/v1/batches/quote/{old['id']}").status_code == 404
    assert door.shown(young["id"])["status"] == "ready"


RULES = "Sort the text into one of four groups, and say why in a sentence."


def test_advice_is_what_the_other_order_would_be_quoted(door: Quoting) -> None:
    small = with_settings(door, window_lines=9)
    now = [f"Ticket {i} is late\n{RULES}\n{SHARED}" for i in range(20)]
    then = [f"{RULES}\n{SHARED.strip()}\nTicket {i} is late" for i in range(20)]
    quote, other = (
        small.quote(jsonl(*(line(f"id{i}", text) for i, text in enumerate(texts)))) for texts in (now, then)
    )
    advice = quote["advice"]
    assert (advice["lines"], advice["moved_lines"]) == (20, 20)
    cached = [one["usage"]["input_tokens_details"]["cached_tokens"] for one in (quote, other)]
    assert (advice["cached_tokens"], advice["then_cached_tokens"]) == tuple(cached)
    assert advice["more_cached_tokens"] == cached[1] - cached[0] > 0
    assert advice["saved_nanos"] == quote["cost"]["input_nanos"] - other["cost"]["input_nanos"] > 0
    assert {"text": RULES, "lines": 20, "line": 1, "message": 0} in advice["misplaced"]
    assert other["advice"] is None, "there is no better order"


@on_sqlite
def test_advice_that_brings_nothing_is_not_given(door: Quoting) -> None:
    few = [f"T{i} {'x' * i}. Please answer in words." for i in range(3)]
    assert door.quote(jsonl(*(line(f"id{i}", text) for i, text in enumerate(few))))["advice"] is None
    assert door.quote(tickets(6))["advice"] is None


def test_a_sample_is_an_estimate_and_no_quote(door: Quoting) -> None:
    data = tickets(300, max_tokens=20)
    quote, found = door.quote(data), door.quote(data, sample=60)
    assert (found["object"], found["status"], found["expires_at"]) == ("estimate", "ready", None)
    assert found["sample"] == {"lines": 60, "of": 300}
    assert found["request_counts"] == {"total": 300, "runnable": 300}
    assert "advice" not in found and "most_nanos" not in found["cost"]
    usage, cost = found["usage"], found["cost"]
    for interval, truth in (
        (usage["input_tokens"], quote["usage"]["input_tokens"]),
        (usage["input_tokens_details"]["cached_tokens"], quote["usage"]["input_tokens_details"]["cached_tokens"]),
        (cost["input_nanos"], quote["cost"]["input_nanos"]),
    ):
        assert interval["low"] <= truth <= interval["high"] and interval["low"] <= interval["expected"]
    assert cost["output_nanos"] == quote["cost"]["output_nanos"], "all lines have the same max_tokens"
    assert cost["total_nanos"]["high"] == cost["input_nanos"]["high"] + cost["output_nanos"]["high"]
    again = door.quote(data, sample=60)
    assert again["usage"] == usage, "the same lines are drawn again"
    refused(door.create(found["input_file_id"], quote_id=found["id"]), "quote_is_estimate", "quote_id")


@on_sqlite
def test_a_sample_of_everything_is_exact(door: Quoting) -> None:
    data = jsonl(*(line(f"id{i}", SHARED + f"Ticket {i % 9}") for i in range(30)), line("bad", best_of=2))
    quote, found = door.quote(data), door.quote(data, sample=1_000)
    assert found["request_counts"] == {"total": 31, "runnable": 30}
    for bound in ("low", "expected", "high"):
        assert found["cost"]["input_nanos"][bound] == pytest.approx(quote["cost"]["input_nanos"], abs=15), (
            "of roundings"
        )
        assert found["usage"]["input_tokens"][bound] == quote["usage"]["input_tokens"]
    assert door.quote(jsonl(line("a"), b"{broken\n"), sample=5)["status"] == "failed"
