"""Every endpoint from upload to bill, on real parts and the real engine; the official client's models judge shapes."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from batchsvc.batches.lifecycle import Status
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.billing import usage_service
from batchsvc.billing.usage import Kind
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from engine.config import EngineConfig, fingerprint
from engine.engine import Engine
from tests.batchsvc.batches.planned import jsonl
from tests.batchsvc.batches.quoting import Quoting, quoting
from tests.workers.conftest import World
from tests.workers.test_engine_run import Hints, completed, until
from workers.finalize import Finalizer
from workers.step import EngineRun

SHARED = "You are a helpful assistant that reads tickets. Order 1234567 was shipped to Berlin. "


@pytest.fixture
def door(sqlite_settings: Settings, migrated_sqlite: Path, tiny: tuple[Path, str], tmp_path: Path) -> Iterator[Quoting]:
    url = (
        f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path / 'migrated.sqlite3')}"  # with its triggers: the audit reads
    )
    settings = sqlite_settings.model_copy(update={"database_url": url, "poll_s": 0.05, "flush_s": 0.2})
    with quoting(settings, tiny[0]) as made:
        yield made


def lines(url: str, bodies: list[dict[str, Any]]) -> bytes:
    whole = [
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": {"model": "tiny", **body}}
        for number, body in enumerate(bodies, start=1)
    ]
    return jsonl(*whole)


def test_every_endpoint_from_upload_to_bill(door: Quoting, tiny: tuple[Path, str]) -> None:
    planned, settings = door.planned, door.planned.context.settings
    world = World(settings, planned.db, planned.store)
    ask = {"messages": [{"role": "user", "content": SHARED}], "max_tokens": 3, "ignore_eos": True}
    jobs = {
        "/v1/chat/completions": [
            {**ask, "n": 3, "logprobs": True, "top_logprobs": 2, "seed": 1},
            {**ask, "logit_bias": {"5": 100}, "temperature": 0},
            {**ask, "presence_penalty": 1.5, "min_p": 0.1, "repetition_penalty": 1.2},
            {**ask, "best_of": 2},
        ],
        "/v1/completions": [
            {"prompt": SHARED + "a", "max_tokens": 4, "temperature": 0},
            {"prompt": [SHARED + "b"], "max_tokens": 3, "ignore_eos": True, "n": 2, "logprobs": 1},
            {"prompt": [5, 6, 7], "max_tokens": 2},
            {"prompt": "x", "echo": True},
        ],
        "/v1/embeddings": [
            {"input": SHARED + "a"},
            {"input": [SHARED + "b", "short"], "dimensions": 8},
            {"input": SHARED + "a", "encoding_format": "base64"},
            {"input": ""},
        ],
        "/v1/responses": [
            {"input": "a", "instructions": SHARED, "max_output_tokens": 3, "temperature": 0},
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "b"}]}], "max_output_tokens": 300},
            {"input": "x", "max_output_tokens": 5, "text": {"format": {"type": "text"}}},
            {"input": "x", "previous_response_id": "resp_1"},
        ],
    }
    batches, quotes = {}, {}
    for url, bodies in jobs.items():
        quotes[url] = door.quote(lines(url, bodies), endpoint=url)
        answer = door.create(quotes[url]["input_file_id"], endpoint=url)
        assert answer.status_code == 200, answer.text
        batches[url] = answer.json()["id"]
        planned.plan(batches[url])
    config = EngineConfig(model=str(tiny[0]), weight_format="float32", kv_format="float32", threads=1, num_blocks=128)
    worker = EngineRun(
        settings,
        Database(settings.database_url),
        world.store,
        Hints(),
        Engine(config),
        digest=planned.text.meta.digest,
        owner="host:1:w",
        on_failure=lambda: None,
    )
    worker.start()
    try:
        for batch_id in batches.values():
            until(completed(world, batch_id), "all lines")
    finally:
        worker.signalled()
        worker.signalled()
        worker.drain()
    found: dict[str, list[dict[str, Any]]] = {}
    auditor = Auditor(settings.database_url, world.store)
    for url, batch_id in batches.items():
        assert Finalizer(settings, world.db, world.store, "f").finalize(batch_id)
        world.judge(batch_id, Status.COMPLETED)
        rows = world.result(batch_id, "output")
        found[url] = [row["response"]["body"] for row in rows]
        assert [row["custom_id"] for row in rows] == ["c1", "c2", "c3"]
        named = fingerprint(planned.text.meta.digest, None)
        assert {body["system_fingerprint"] for body in found[url]} == {named}, "whatever the endpoint"
        (rejected,) = world.result(batch_id, "error")
        assert (rejected["custom_id"], rejected["response"]["status_code"]) == ("c4", 400)
        assert sum(body["usage"]["cost_nanos"] for body in found[url]) == world.batch(batch_id).cost_nanos > 0
        quote = quotes[url]
        assert world.batch(batch_id).cost_nanos <= quote["cost"]["most_nanos"]
        report = auditor.batch(batch_id)
        assert report is not None and not report.differences
    auditor.close()

    three, biased, _ = (ChatCompletion.model_validate(body, strict=True) for body in found["/v1/chat/completions"])
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert three.usage is not None and biased.usage is not None
    assert (three.usage.completion_tokens, biased.usage.completion_tokens) == (9, 3)
    assert three.usage.prompt_tokens == biased.usage.prompt_tokens, "the prompt counts once"
    for choice in three.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2, 2]
    for completion in found["/v1/completions"]:
        shown = Completion.model_validate(completion, strict=True)
        assert shown.choices[0].finish_reason in ("stop", "length")
    forked = found["/v1/completions"][1]
    assert forked["usage"]["completion_tokens"] == 6
    assert [len(choice["logprobs"]["tokens"]) for choice in forked["choices"]] == [3, 3]
    for response in found["/v1/responses"]:
        made = Response.model_validate(response)
        assert made.usage is not None and made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
        assert (made.status == "incomplete") == (made.incomplete_details is not None)
        assert made.output_text == made.output[0].content[0].text
    assert found["/v1/responses"][0]["instructions"] == SHARED
    single, several, encoded = found["/v1/embeddings"]
    vector = np.array(CreateEmbeddingResponse.model_validate(single).data[0].embedding)
    assert len(vector) == 64 and abs(np.linalg.norm(vector) - 1) < 1e-5
    assert [len(one["embedding"]) for one in several["data"]] == [8, 8]
    assert all(abs(np.linalg.norm(one["embedding"]) - 1) < 1e-5 for one in several["data"])
    decoded = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, vector, atol=1e-6)

    with world.db.reading() as session:
        arguments = [("start_time", str(world.batch(batches["/v1/embeddings"]).created_ms // 1000 - 60))]
        page = usage_service.answer(session, Kind.EMBEDDINGS, arguments)
        results = [result for bucket in page["data"] for result in bucket["results"]]
    tokens = sum(body["usage"]["prompt_tokens"] for body in found["/v1/embeddings"])
    assert sum(result["input_tokens"] for result in results) == tokens
    assert sum(result["num_model_requests"] for result in results) == 3
