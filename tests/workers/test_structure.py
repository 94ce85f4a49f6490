"""From a line's body to its row: planned, run on the real engine, answered in the form that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import orjson
import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletion

from batchsvc.batches import message_results, unit_file
from batchsvc.batches.body import ChatCall, fit, parse_chat
from batchsvc.batches.message_body import parse_message
from batchsvc.batches.rendering import render_chat
from batchsvc.batches.unit_file import UnitRow
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.cli.prompt import Prompting, bodies_of
from engine.config import EngineConfig
from engine.engine import Engine
from engine.text import TextModel, load_text
from tests.tiny import make_tiny_model
from tests.workers.conftest import RATES
from workers.translate import open_rows, to_lines, to_request

SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["gut", "schlecht"]}, "stars": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["label", "stars"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "rate",
        "parameters": {"type": "object", "properties": {"stars": {"enum": [1, 2, 3]}}, "required": ["stars"]},
    },
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("structure") / "tiny")


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> TextModel:
    return load_text(tiny_model)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(
        EngineConfig(model=str(tiny_model), weight_format="float32", kv_format="float32", threads=1, num_blocks=64)
    )


def answered(engine: Engine, text: TextModel, body: dict[str, Any] | ChatCall) -> dict[str, Any]:
    """The body of the response to one line, through the unit file."""
    call, prompt = render_chat(body if isinstance(body, ChatCall) else parse_chat(body), text)
    prompt_ids = text.tokenizer.encode(prompt)
    params = fit(call, prompt_tokens=len(prompt_ids), context_tokens=512, default_max_tokens=100)
    row = UnitRow(
        line_nos=(1,),
        custom_ids=("a",),
        prompt_ids=np.asarray(prompt_ids, np.int32),
        params={name: value for name, value in params.items() if name != "max_tokens"},
        planned_cached_tokens=0,
        max_tokens=params["max_tokens"],
    )
    file = unit_file.read(unit_file.write([row], []))
    unit = ClaimedUnit(
        id="u",
        epoch=1,
        batch_id="b",
        window_no=0,
        no=0,
        s3_key="k",
        sha256="",
        num_lines=1,
        done_bitmap=b"\0",
        salt="",
        model_id="tiny",
        created_s=1,
        rates={"tier": RATES, "standard": RATES},
    )
    (open_row,) = open_rows(unit, file)
    (completion,) = engine.run([to_request(unit, open_row)])
    (line,) = to_lines(unit, open_row, completion)
    assert line.line.is_ok, line.line.row
    response: dict[str, Any] = orjson.loads(line.line.row)["response"]["body"]
    return response


def asking(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Rate it."}], **fields}


def test_the_schema_of_the_command_line_is_followed(engine: Engine, text: TextModel, tmp_path: Path) -> None:
    (tmp_path / "my schema.json").write_bytes(orjson.dumps(SCHEMA))
    prompting = Prompting(prompt="Rate {review}", schema=tmp_path / "my schema.json", temperature=1)
    choice = answered(engine, text, bodies_of(prompting, "m").asking("Rate it."))["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(orjson.loads(choice["message"]["content"]), {**SCHEMA, "additionalProperties": False})


def test_a_forced_call_is_a_call(engine: Engine, text: TextModel) -> None:
    body = asking(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "rate"}}, seed=3)
    first = answered(engine, text, body)
    ChatCompletion.model_validate(first, strict=True)
    choice = first["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["type"] == "function" and call["function"]["name"] == "rate"
    jsonschema.validate(orjson.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])
    assert answered(engine, text, body)["choices"] == first["choices"], "the ids of calls are the same in every run"


def test_a_message_that_must_use_a_tool_does_so_in_anthropics_words(engine: Engine, text: TextModel) -> None:
    tool = {"name": "rate", "input_schema": TOOL["function"]["parameters"]}
    asked = {"max_tokens": 100, "tools": [tool], "tool_choice": {"type": "tool", "name": "rate"}, "temperature": 0}
    chat = parse_message({**asked, "messages": [{"role": "user", "content": "Rate it."}]}).chat
    message = Message.model_validate(message_results.message_of(answered(engine, text, chat)))
    (block,) = message.content
    assert message.stop_reason == "tool_use" and block.type == "tool_use" and block.name == "rate"
    assert block.input["stars"] in (1, 2, 3)


def test_a_choice_of_vllm_is_followed(engine: Engine, text: TextModel) -> None:
    for fields in ({"guided_choice": ["ja", "nein"]}, {"structured_outputs": {"choice": ["ja", "nein"]}}):
        assert answered(engine, text, asking(**fields))["choices"][0]["message"]["content"] in ("ja", "nein")
