"""Input 15 with the opt-in: each line of a file names its model, and all else is as if it were one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import select

from batchsvc.batches import models, unit_file, unit_queries
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.batches.repair import rebuild_next_window
from batchsvc.batches.repair_queries import return_unit
from batchsvc.batches.tables import Unit
from batchsvc.billing import pricing
from batchsvc.billing import service as billing
from batchsvc.billing.tables import UsageHour, UsageRow
from batchsvc.money import Rates, line_cost_nanos
from engine.fake import FakeEngine
from engine.text import TextModel, load_text
from tests.batchsvc.batches.planned import CONTEXT_TOKENS, jsonl, line
from tests.inputs.service import Service
from tests.tiny import make_tiny_model
from tests.workers.test_engine_run import until

BY_LINE = {"models": "by_line"}
COMPLETIONS = "/v1/completions"
NAMES = ("tiny", "other", "second")  # the third is the first under another name, at another price
RATES = {
    "tiny": Rates(input=10_000_000, cached_input=2_500_000, output=40_000_000),
    "other": Rates(input=70_000_000, cached_input=7_000_000, output=700_000_000),
    "second": Rates(input=20_000_000, cached_input=3_000_000, output=30_000_000),
}
SHARED = "You are a helpful assistant that reads tickets. Order 1234567 was shipped. "


@dataclass(frozen=True)
class Other:
    """A second model, with weights of its own."""

    text: TextModel

    @property
    def digest(self) -> str:
        return self.text.meta.digest


@pytest.fixture(scope="module")
def other(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Other:
    path = make_tiny_model(tmp_path_factory.mktemp("other") / "other", seed=7, context_tokens=CONTEXT_TOKENS)
    text = load_text(path)
    with service.planned.db.transaction() as session:
        models.register(session, "other", str(path), digest=text.meta.digest, context_tokens=CONTEXT_TOKENS)
        book = pricing.shipped_book()
        rates = {(name, tier): rates for name, rates in RATES.items() for tier in ("batch_24h", "standard")}
        billing.publish_book(session, pricing.PriceBook(book.version + 1, dict(book.rates) | rates))
    return Other(text)


@pytest.fixture
def workers(service: Service, other: Other) -> Iterator[None]:
    with service.working(name="t"), service.working(FakeEngine(other.text), "o", other.digest):
        yield


def mixed(count: int = 13, **body: Any) -> bytes:
    """Models in turn; the prompts begin alike, and some are equal."""
    return jsonl(
        *(line(f"c{at}", f"{SHARED}Ticket {at // 6}", model=NAMES[at % 3], seed=1, **body) for at in range(count))
    )


def model_of(line_no: int) -> str:
    return NAMES[(line_no - 1) % 3]


def test_input_15_several_models_from_quote_to_audit(service: Service, other: Other, workers: None) -> None:
    small = service.with_settings(window_lines=7, unit_lines=2)
    quote = small.door.quote(mixed(), **BY_LINE)
    assert (quote["status"], quote["model"], quote["rates"]) == ("ready", None, None)
    assert {name: found["lines"] for name, found in quote["models"].items()} == {"tiny": 5, "other": 4, "second": 4}
    assert quote["models"]["other"]["digest"] == other.digest
    answer = small.door.create(quote["input_file_id"], quote_id=quote["id"])
    assert answer.status_code == 200, answer.text
    batch_id = answer.json()["id"]
    small.planned.plan(batch_id)
    with small.planned.db.reading() as session:
        units = session.scalars(select(Unit).where(Unit.batch_id == batch_id)).all()
    for unit in units:
        file = unit_file.read(small.planned.store.get(unit.s3_key))
        assert {model_of(number) for row in file.rows for number in row.line_nos} == {unit.model_id}
        assert (unit.model_digest == other.digest) == (unit.model_id == "other")
    ended = small.finish(batch_id)
    assert ended.batch["model"] is None
    assert {name: pin["digest"] == other.digest for name, pin in ended.batch["models"].items()} == {
        "tiny": False,
        "other": True,
        "second": False,
    }
    input_nanos, bills = 0, dict.fromkeys(NAMES, 0)
    assert list(ended.answers) == list(range(1, 14)), "in input order"
    for number, body in ended.answers.items():
        assert body["model"] == model_of(number)
        usage, rates = body["usage"], RATES[body["model"]]
        tokens = {
            "input_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        assert usage["cost_nanos"] == line_cost_nanos(rates, **tokens, output_tokens=usage["completion_tokens"])
        input_nanos += line_cost_nanos(rates, **tokens, output_tokens=0)
        bills[body["model"]] += usage["cost_nanos"]
    assert input_nanos <= quote["cost"]["input_nanos"]
    assert sum(bills.values()) <= quote["cost"]["most_nanos"]
    for table in (UsageRow, UsageHour):
        with small.planned.db.reading() as session:
            rows = session.scalars(select(table).where(table.batch_id == batch_id)).all()
        assert {name: sum(row.cost_nanos for row in rows if row.model == name) for name in NAMES} == bills
    auditor = Auditor(small.settings.database_url, small.planned.store)
    report = auditor.batch(batch_id)
    auditor.close()
    assert report is not None and not report.differences, report.differences

    explained = small.client.get(f"/v1/batches/{batch_id}/explanation").json()
    found = {one["price"]["model"]: one for one in explained["models"]}
    assert {name: sum(item["amount_nanos"] for item in one["items"]) for name, one in found.items()} == bills
    for number in (2, 3):
        row = small.client.get(f"/v1/batches/{batch_id}/lines/c{number - 1}").json()
        assert row["price"]["model"] == model_of(number)
        assert row["cost_nanos"] == ended.answers[number]["usage"]["cost_nanos"]
        assert str(row["cost_nanos"]) in row["arithmetic"]


def test_input_15_a_model_without_a_worker_waits_alone(service: Service, other: Other) -> None:
    batch_id = service.start(mixed(9), **BY_LINE)
    with service.working():
        until(lambda: service.world.batch(batch_id).completed == 6, "the lines of the other models")
        assert service.shown(batch_id)["waiting_for"] == "no worker for model other"
        with service.working(FakeEngine(other.text), "o", other.digest):
            ended = service.finish(batch_id)
    assert len(ended.output) == 9


def test_input_15_what_is_wrong_is_as_with_one_model(service: Service, workers: None) -> None:
    nameless = line("nameless")
    del nameless["body"]["model"]
    lines = [line("a"), line("b", model="gpt-9"), line("a", model="other"), nameless, line("d", model="other", n=0)]
    assert service.refusal(jsonl(*lines), **BY_LINE) == [
        (2, "model_not_found", "body.model"),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "missing_required_parameter", "body.model"),
    ]
    both = service.client.post(
        "/v1/batches",
        json={
            "input_file_id": service.upload(mixed(3)),
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "model": "tiny",
            **BY_LINE,
        },
    )
    assert (both.status_code, both.json()["error"]["param"]) == (400, "models")
    ended = service.run(jsonl(lines[0], lines[4], line("e", model="other")), **BY_LINE)
    assert ended.refusals == {2: ("invalid_value", "n")}
    again = service.client.post(f"/v1/batches/{ended.batch['id']}/retry", json={})
    assert again.status_code == 200, again.text
    service.planned.plan(again.json()["id"])
    assert service.shown(again.json()["id"])["models"] == {}


def test_input_15_damaged_units_are_made_again(service: Service, other: Other) -> None:
    batch_id = service.with_settings(unit_lines=2).start(mixed(9), **BY_LINE)
    small = service.with_settings(unit_lines=2)
    for digest in (service.planned.text.meta.digest, other.digest):
        unit = service.planned.db.run(lambda s, d=digest: unit_queries.claim(s, d, "host:1:x", 30, 1))[0]
        assert unit.batch_id == batch_id
        service.planned.store.delete([unit.s3_key])
        assert service.planned.db.run(lambda s, u=unit: return_unit(s, u.id, u.epoch))
    assert rebuild_next_window(small.planned.context, batch_id, "p")
    with service.working(name="t"), service.working(FakeEngine(other.text), "o", other.digest):
        ended = service.finish(batch_id)
    assert [body["model"] for body in ended.answers.values()] == [model_of(number) for number in range(1, 10)]


def test_input_15_an_estimate_is_of_one_model(service: Service, other: Other) -> None:
    refused = service.door.ask(mixed(3), sample=2, **BY_LINE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sample")
    quote = service.door.quote(mixed(3), **BY_LINE)
    differs = service.door.create(quote["input_file_id"], quote_id=quote["id"], models="one")
    assert (differs.status_code, differs.json()["error"]["code"]) == (400, "quote_changed")


def test_input_15_a_model_that_can_not_be_used_costs_its_lines(service: Service, other: Other, workers: None) -> None:
    """Its files are gone, or it has no price: with `skip` its lines say so, without it the batch does."""
    with service.planned.db.transaction() as session:
        models.register(session, "gone", "/nowhere/gone", digest="0" * 64, context_tokens=CONTEXT_TOKENS)
    lines = jsonl(line("a"), line("b", model="gone"), line("c", model="other"), line("d", model="gone"))
    ended = service.run(lines, on_invalid="skip", **BY_LINE)
    assert ended.codes == {2: "model_not_available", 4: "model_not_available"}
    assert "/nowhere/gone" in ended.errors[2]["error"]["message"] and ended.errors[2]["error"]["param"] == "body.model"
    assert {number: body["model"] for number, body in ended.answers.items()} == {1: "tiny", 3: "other"}
    assert service.refusal(lines, **BY_LINE) == [(None, "model_not_available", "model")]
    quote = service.door.quote(lines, on_invalid="skip", **BY_LINE)
    assert (quote["status"], quote["problems"]["total"]) == ("ready", 2)
    alone = service.refusal(jsonl(line("a", model="gone")), on_invalid="skip")
    assert alone == [(None, "model_not_available", "model")], "it is the model of the batch"


def test_input_15_quotes_go_by_the_answers_of_the_units_model(service: Service, other: Other, workers: None) -> None:
    """A batch of several models tells how long the answers of each get."""

    def ask(number: int, model: str, max_tokens: int, **body: Any) -> dict[str, Any]:
        body |= {"model": model, "prompt": f"Say {number}", "max_tokens": max_tokens}
        return {"custom_id": f"c{number}", "method": "POST", "url": COMPLETIONS, "body": body}

    lines = (ask(at, NAMES[at % 2], 9 if at % 2 else 3, ignore_eos=True) for at in range(60))
    service.run(jsonl(*lines), endpoint=COMPLETIONS, **BY_LINE)
    for model, tokens in (("other", 9), ("tiny", 3)):
        quoted = service.door.quote(jsonl(ask(99, model, 200)), endpoint=COMPLETIONS)
        expected = line_cost_nanos(RATES[model], input_tokens=0, cached_tokens=0, output_tokens=tokens)
        assert quoted["output_basis"] == "finished_lines", model
        assert quoted["cost"]["output_nanos"]["expected"] == expected, model


def test_input_15_messages_name_their_models(service: Service, other: Other, workers: None) -> None:
    """A message batch needs no opt-in: each of its requests names a model, as Anthropic's do."""
    asked = [{"role": "user", "content": "Where is it?"}]
    requests = [
        {"custom_id": name, "params": {"model": name, "max_tokens": 4, "messages": asked}} for name in (*NAMES, "gpt-9")
    ]
    made = service.client.post("/v1/messages/batches", json={"requests": requests})
    assert made.status_code == 200, made.text
    service.planned.plan(made.json()["id"])
    service.finish(made.json()["id"])
    results = service.client.get(f"/v1/messages/batches/{made.json()['id']}/results").text.splitlines()
    found = {row["custom_id"]: row["result"] for row in map(json.loads, results)}
    assert {name: found[name]["message"]["model"] for name in NAMES} == {name: name for name in NAMES}
    assert found["gpt-9"]["type"] == "errored" and "gpt-9" in found["gpt-9"]["error"]["error"]["message"]
