"""The official client makes interactive calls over a socket: whole and streamed, of all three endpoints, and billed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_ledger import compare_books
from batchsvc.batches.reconcile_queries import Reader
from batchsvc.batches.texts_here import NotHereError, text_here
from batchsvc.billing.pricing import STANDARD_TIER, shipped_book
from batchsvc.db.session import database_now_ms
from batchsvc.money import line_cost_nanos
from engine.request import Completion, Lane
from engine.text import load_text
from tests.batchsvc.interactive.conftest import MODEL, Place, WatchedEngine, call_settings, opened, until
from tests.tiny import make_tiny_model

RATES = shipped_book().rates["default", STANDARD_TIER]


class CachingEngine(WatchedEngine):
    """Says that its cache held some of each prompt."""

    HELD = 19

    def step(self) -> Any:
        output = super().step()
        output.completions = [self._with_hits(completion) for completion in output.completions]
        return output

    def _with_hits(self, completion: Completion) -> Completion:
        usage = replace(completion.usage, hit_tokens=min(self.HELD, completion.usage.prompt_tokens - 1))
        return replace(completion, usage=usage)


@pytest.fixture
def at_work(migrated_url: str, calls_redis: str, tiny: Path) -> Iterator[Place]:
    """A place with a worker, once on each database."""
    with opened(call_settings(migrated_url, calls_redis), tiny) as place, place.worker(CachingEngine(place.text)):
        until(lambda: place.post().status_code == 200, "the worker takes calls")
        yield place


@pytest.fixture(scope="module")
def running(place: Place) -> Iterator[WatchedEngine]:
    """The engine of a worker that takes calls all the time."""
    engine = WatchedEngine(place.text, step_tokens=2)
    with place.worker(engine):
        until(lambda: place.post().status_code == 200, "the worker takes calls")
        yield engine


def test_a_call_is_answered_and_billed_once(at_work: Place) -> None:
    project_id, key = at_work.new_project()
    answer = at_work.chat(at_work.client(key), n=2, max_tokens=9)
    assert answer.object == "chat.completion" and answer.model == MODEL and len(answer.choices) == 2
    usage = answer.usage
    assert usage.prompt_tokens_details.cached_tokens == 16, "19 in steps of 16"
    (row,) = at_work.usage(project_id)
    assert (row.batch_id, row.tier, row.endpoint, row.requests) == ("", STANDARD_TIER, "/v1/chat/completions", 1)
    counted = (row.input_tokens, row.cached_tokens, row.output_tokens)
    assert counted == (usage.prompt_tokens, 16, usage.completion_tokens)
    cost = line_cost_nanos(
        RATES, input_tokens=usage.prompt_tokens, cached_tokens=16, output_tokens=usage.completion_tokens
    )
    assert row.cost_nanos == usage.cost_nanos == cost == at_work.revenue_nanos(project_id)
    report = Report()
    reader = Reader(at_work.settings.database_url)
    compare_books(reader, report)
    reader.close()
    assert report.num_differences == 0


def test_usage_and_costs_show_calls_beside_batches(at_work: Place) -> None:
    at_work.chat()
    with at_work.db.reading() as session:
        today = database_now_ms(session) // 1000 // 86_400 * 86_400
    client = openai.OpenAI(base_url=f"{at_work.url}/v1", api_key="none", admin_api_key=at_work.key, max_retries=0)
    at_work.clients.append(client)
    organization = client.admin.organization

    def results(**asked: Any) -> list[dict[str, Any]]:
        page = organization.usage.completions(start_time=today, **asked)
        return [result.to_dict() for bucket in page.data for result in bucket.results]

    (shown,) = results(group_by=["batch", "service_tier"])
    assert (shown["batch"], shown["service_tier"], shown["num_model_requests"]) == (False, STANDARD_TIER, 2)
    assert results(batch=True) == [] and len(results(batch=False)) == 1
    costs = organization.usage.costs(start_time=today)
    assert sum(result.to_dict()["amount_nanos"] for bucket in costs.data for result in bucket.results) == sum(
        row.cost_nanos for row in at_work.usage()
    )


def test_a_chat_is_streamed(place: Place, running: WatchedEngine) -> None:
    whole = place.chat(seed=3, n=2, logprobs=True, top_logprobs=1)
    stream = place.chat(seed=3, n=2, logprobs=True, top_logprobs=1, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert last.choices == [] and last.usage == whole.usage
    assert len(chunks) > 8, "more than the two beginnings and ends"
    for index, choice in enumerate(whole.choices):
        mine = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason
        told = [entry for one in mine if one.logprobs for entry in one.logprobs.content]
        assert told == choice.logprobs.content
    assert place.usage()[-1].cost_nanos == place.usage()[-2].cost_nanos > 0


def test_text_completions_and_responses_are_streamed(place: Place, running: WatchedEngine) -> None:
    client = place.client()
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 10, "seed": 1, "logprobs": 1}
    whole = client.completions.create(**ask).choices[0]
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text and len(chunks) > 3
    offsets = [at for chunk in chunks if chunk.choices[0].logprobs for at in chunk.choices[0].logprobs.text_offset]
    assert offsets == whole.logprobs.text_offset

    with client.responses.stream(
        model=MODEL, input="Once", instructions="Be brief.", max_output_tokens=20, extra_body={"seed": 1}
    ) as events:
        seen = list(events)
    kinds, final = [event.type for event in seen], seen[-1].response
    again = client.responses.create(
        model=MODEL, input="Once", instructions="Be brief.", max_output_tokens=20, extra_body={"seed": 1}
    )
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert kinds.count("response.output_text.delta") > 2
    assert final.output_text == again.output_text and final.usage == again.usage


def test_forms_and_tools_are_those_of_lines(place: Place, running: WatchedEngine) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}}
    found = "".join(
        chunk.choices[0].delta.content or "" for chunk in place.chat(response_format=form, max_tokens=60, stream=True)
    )
    assert set(json.loads(found)) == {"ok"}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}
    (choice,) = place.chat(tools=[tool], tool_choice="required", max_tokens=120).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "look"


def test_projects_share_no_cache_and_calls_go_first(place: Place, running: WatchedEngine) -> None:
    _, other = place.new_project()
    place.chat(text="the same")
    place.chat(place.client(other), text="the same")
    first, second = running.requests[-2:]
    assert first.prompt_ids == second.prompt_ids and first.salt != second.salt
    assert {first.lane, second.lane} == {Lane.INTERACTIVE}


def streamed_with(options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    return {"stream": True, "stream_options": options}, 400


REFUSALS: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "nope"}, 404, "model_not_found", "model"),
    ({"model": 3}, 400, "invalid_value", "model"),
    ({"messages": [{"role": "user", "content": "word " * 600}]}, 400, "context_length_exceeded", "messages"),
    ({"max_tokens": 10**6}, 400, "context_length_exceeded", "messages"),
    ({"temperature": 9}, 400, "invalid_value", "temperature"),
    ({"stream": "yes"}, 400, "invalid_value", "stream"),
    ({"stream": True, "stream_options": 1}, 400, "invalid_value", "stream_options"),
    ({"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options"),
    (*streamed_with({"include_usage": 1}), "invalid_value", "stream_options.include_usage"),
    (*streamed_with({"include_usge": True}), "unknown_parameter", "stream_options.include_usge"),
    (
        *streamed_with({"continuous_usage_stats": True}),
        "unsupported_parameter",
        "stream_options.continuous_usage_stats",
    ),
    ({"top_logprob": 1}, 400, "unknown_parameter", "top_logprob"),
    ({"logprobs": True, "top_logprobs": 20, "max_tokens": 90, "n": 128}, 400, "invalid_value", "logprobs"),
]


def test_what_cannot_run_is_refused_as_a_line_is(place: Place) -> None:
    billed = place.num_used()
    for body, status, code, param in REFUSALS:
        answer = place.post(**body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
        if code == "context_length_exceeded":
            assert "512" in error["message"], "the numbers are named"
        if param == "logprobs":
            assert "241,920" in error["message"] and "200,000" in error["message"]
    with pytest.raises(openai.AuthenticationError):
        place.chat(place.client("sk-wrong"))
    assert place.num_used() == billed


def test_a_budget_is_held_before_the_call_runs(place: Place, running: WatchedEngine) -> None:
    project_id, key = place.new_project(budget_nanos=3_000)
    client = place.client(key)
    with pytest.raises(openai.RateLimitError) as refused:
        place.chat(client, max_tokens=400)
    assert refused.value.code == "insufficient_quota" and "lower max_tokens" in refused.value.message
    assert refused.value.response.headers["x-should-retry"] == "false"
    num_requests = len(running.requests)
    place.chat(client, max_tokens=5, seed=1)
    (row,) = place.usage(project_id)
    assert len(running.requests) == num_requests + 1 and place.holds() == 0
    assert place.revenue_nanos(project_id) == row.cost_nanos <= 3_000
    prepaid, key = place.new_project(is_prepaid=True)
    with pytest.raises(openai.RateLimitError):
        place.chat(place.client(key))
    assert place.usage(prepaid) == [] and place.holds() == 0


def test_a_model_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", seed=1)
    first = text_here(str(path), digest_of(path))
    shutil.rmtree(path)
    second = digest_of(make_tiny_model(path, seed=2))
    assert text_here(str(path), second).meta.digest == second != first.meta.digest
    with pytest.raises(NotHereError):
        text_here(str(path), "another")


def digest_of(path: Path) -> str:
    return load_text(path).meta.digest
