"""The official clients, unmodified, against a running stack: every way in, every endpoint, results and events."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from openai.types import Batch, Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.e2e.conftest import LIVENESS_S, Result, Stack, wait_for
from tests.receiver import receiving

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "responses")
)
VOWELS = ["a", "e", "i", "o"]  # every word of the fake engine has one


@pytest.fixture
def url(stack: Stack, stack_cli: Any) -> str:
    found: Result = stack_cli("status", "--json")
    return str(found.json["url"]).removesuffix("/v1")


@pytest.fixture
def client(stack: Stack, url: str) -> Iterator[openai.OpenAI]:
    key = stack.directory.api_key.read_text().strip()
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made:
        yield made


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    deadline = time.monotonic() + LIVENESS_S
    while (batch := client.batches.retrieve(batch_id)).status != "completed":
        assert batch.status in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def rows(endpoint: str, model: str, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"c{number}", "method": "POST", "url": endpoint, "body": {"model": model, **body}}
        for number, body in enumerate(bodies)
    ]


def bodies_of(client: openai.OpenAI, batch: Batch) -> list[dict[str, Any]]:
    assert batch.output_file_id is not None
    lines = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in lines] == [f"c{number}" for number in range(len(lines))]
    return [row["response"]["body"] for row in lines]


def test_the_openai_client_reaches_every_endpoint_by_every_way_in(
    stack: Stack, client: openai.OpenAI, tmp_path: Path
) -> None:
    """A file, a file in parts, and requests in the call itself; then lines, results and the event of the end."""
    with receiving() as receiver:
        hook = client.webhooks.create(name="here", url=receiver.url, event_types=["batch.completed"])
        several = {"prompt": "a", "n": 2, "logprobs": 1, "max_tokens": 3}
        completions = rows(COMPLETIONS, stack.model, several, {"prompt": [5, 6]}, {"prompt": "b", "echo": True})
        in_parts = tmp_path / "completions.jsonl"
        in_parts.write_text("".join(json.dumps(row) + "\n" for row in completions))
        uploaded = client.uploads.upload_file_chunked(
            file=in_parts, mime_type="application/jsonl", purpose="batch", part_size=100
        ).file
        vectors = rows(
            EMBEDDINGS,
            stack.model,
            {"input": ["x", "y"], "dimensions": 8},
            {"input": "x", "dimensions": 8, "encoding_format": "base64"},
        )
        data = "".join(json.dumps(row) + "\n" for row in vectors).encode()
        file = client.files.create(file=("vectors.jsonl", data), purpose="batch")
        said = rows(RESPONSES, stack.model, {"input": "a", "instructions": "Be brief.", "max_output_tokens": 1})
        assert uploaded is not None
        made = {
            endpoint: client.batches.create(
                input_file_id=input_file_id,
                endpoint=endpoint,
                completion_window="24h",
                extra_body={} if requests is None else {"requests": requests},
            ).id
            for endpoint, input_file_id, requests in (
                (COMPLETIONS, uploaded.id, None),
                (EMBEDDINGS, file.id, None),
                (RESPONSES, "", said),
                (CHAT, "", rows(CHAT, stack.model, {"messages": [{"role": "user", "content": "a"}], "stop": VOWELS})),
            )
        }
        done = {endpoint: ended(client, batch_id) for endpoint, batch_id in made.items()}
        events = [got.unwrap(hook.signing_secret) for got in receiver.wait_for(4)]
        assert {event.data.id for event in events if event.type == "batch.completed"} == set(made.values())
        client.webhooks.delete(hook.id)

    forked, short = (Completion.model_validate(body, strict=True) for body in bodies_of(client, done[COMPLETIONS]))
    assert [len(choice.logprobs.tokens or []) for choice in forked.choices if choice.logprobs] == [
        len(choice.text.split()) for choice in forked.choices
    ]
    assert forked.system_fingerprint == short.system_fingerprint is not None
    counts = done[COMPLETIONS].request_counts
    assert counts is not None and (counts.completed, counts.failed) == (2, 1)
    error = json.loads(client.files.content(done[COMPLETIONS].error_file_id or "").text)
    assert error["response"]["body"]["error"]["param"] == "echo" and error["error"] is None

    plain, encoded = bodies_of(client, done[EMBEDDINGS])
    shown = CreateEmbeddingResponse.model_validate(plain, strict=True)
    assert [len(one.embedding) for one in shown.data] == [8, 8]
    decoded = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, shown.data[0].embedding, atol=1e-6)

    (body,) = bodies_of(client, done[RESPONSES])
    response = Response.model_validate(body)
    assert (response.status, response.instructions) == ("incomplete", "Be brief.")
    assert response.output_text and body["system_fingerprint"] == plain["system_fingerprint"]

    (chat,) = (ChatCompletion.model_validate(body, strict=True) for body in bodies_of(client, done[CHAT]))
    assert chat.choices[0].finish_reason == "stop" and chat.choices[0].to_dict()["stop_reason"] in VOWELS
    lines = client.get(f"/batches/{made[CHAT]}/results", cast_to=httpx.Response)
    assert lines.headers["x-batch-status"] == "completed"
    (row,) = [json.loads(text) for text in lines.text.splitlines()]
    assert row["response"]["body"]["id"] == chat.id
    after = client.get(
        f"/batches/{made[CHAT]}/results", cast_to=httpx.Response, options={"params": {"after": row["cursor"]}}
    )
    assert after.text == ""


def test_the_anthropic_client_gets_what_ended_each_message(stack: Stack, url: str) -> None:
    params = {"model": stack.model, "messages": [{"role": "user", "content": "a"}]}
    asked = {
        "whole": {"max_tokens": 200},
        "cut": {"max_tokens": 1},
        "stopped": {"max_tokens": 200, "stop_sequences": VOWELS},
        "tools": {"max_tokens": 9, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    }
    key = stack.directory.api_key.read_text().strip()
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        requests: Any = [{"custom_id": name, "params": {**params, **more}} for name, more in asked.items()]
        made = client.messages.batches.create(requests=requests)
        wait_for(lambda: client.messages.batches.retrieve(made.id).processing_status == "ended", "it has ended")
        found = {one.custom_id: one.result for one in client.messages.batches.results(made.id)}
    told = {name: result.message for name, result in found.items() if result.type == "succeeded"}
    assert {name: message.stop_reason for name, message in told.items()} == {
        "whole": "end_turn",
        "cut": "max_tokens",
        "stopped": "stop_sequence",
    }
    assert told["stopped"].stop_sequence in VOWELS and told["whole"].stop_sequence is None
    block = told["stopped"].content[0]
    assert block.type == "text" and not set(VOWELS) & set(block.text)
    refused = found["tools"]
    assert refused.type == "errored" and "tool_choice any" in refused.error.error.message


def test_the_clients_find_what_the_model_can_not_do_by_its_line(stack: Stack, client: openai.OpenAI) -> None:
    """Each wish that this model can't have costs its line, and says which wish it was."""
    messages = [{"role": "user", "content": "a"}]
    wishes: list[dict[str, Any]] = [
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}},
        {"logit_bias": {"999999": 1}},
        {"top_logprobs": 3},
        {"best_of": 2},
        {"stream": True},
    ]
    made = client.batches.create(
        input_file_id="",
        endpoint=CHAT,
        completion_window="24h",
        extra_body={"requests": rows(CHAT, stack.model, *({"messages": messages, **wish} for wish in wishes))},
    )
    done = ended(client, made.id)
    assert done.output_file_id is None and done.request_counts is not None
    assert done.request_counts.failed == len(wishes)
    lines = [json.loads(row) for row in client.files.content(done.error_file_id or "").text.splitlines()]
    for wish, row in zip(wishes, lines, strict=True):
        error = row["response"]["body"]["error"]
        (name,) = wish
        assert row["response"]["status_code"] == 400 and error["param"].split(".")[0] == name, error
        assert name in error["message"] or name.replace("_", " ") in error["message"], error


def test_the_openai_client_is_answered_at_once_by_the_same_stack(stack: Stack, client: openai.OpenAI) -> None:
    """Interactive calls beside batches, at the same URL: the whole way, through Redis, of the embedded stack."""

    def chat() -> bool:
        try:
            messages = [{"role": "user", "content": "Where is my parcel?"}]
            *chunks, last = client.chat.completions.create(
                model=stack.model,
                messages=messages,
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
        except openai.InternalServerError as error:
            if error.code != "no_worker":
                raise
            return False  # it has only just started
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text and last.usage is not None and last.usage.completion_tokens == 5
        return True

    wait_for(chat, "a worker takes calls")
    answer = client.responses.create(model=stack.model, input="Hello", max_output_tokens=5)
    assert answer.output_text and answer.usage is not None and 0 < answer.usage.output_tokens <= 5
