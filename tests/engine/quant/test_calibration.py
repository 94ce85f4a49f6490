"""Calibration files: the lines of a batch, chats and texts; what can't be used is named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.quant.calibration import CalibrationError, read_sequences
from engine.text import TextModel, load_text
from tests.tiny import make_tiny_model

CHAT = [{"role": "user", "content": "Where is my order?"}]


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> TextModel:
    return load_text(tiny_model)


def a_file(path: Path, *lines: Any) -> Path:
    file = path / "calib.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return file


def test_lines_of_all_kinds_are_read(tmp_path: Path, text: TextModel) -> None:
    batch_line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT}}
    file = a_file(tmp_path, batch_line, "", {"messages": CHAT}, {"text": "The parcel was late."}, {"prompt": "Order"})
    chat, same, plain, prompt = read_sequences(file, text, tokens=10_000, most=512)
    assert chat == same == text.prompt_ids(CHAT)
    assert plain == text.tokenizer.encode_texts(["The parcel was late."])[0]
    assert prompt == text.tokenizer.encode_texts(["Order"])[0]


def test_no_more_is_taken_than_was_asked_for(tmp_path: Path, text: TextModel) -> None:
    file = a_file(tmp_path, *[{"text": "The customer asks for a refund. " * 5}] * 20, "broken, but never reached")
    found = read_sequences(file, text, tokens=50, most=20)
    assert [len(ids) for ids in found] == [20, 20, 10]


BAD = [
    ("{", "Line 2 of calib.jsonl is no JSON"),
    ("[1]", "Line 2 of calib.jsonl is no JSON object"),
    ({"body": 3}, "Line 2 of calib.jsonl is no JSON object"),
    ({"id": 1}, "Line 2 of calib.jsonl has no text"),
    ({"messages": []}, "Line 2 of calib.jsonl has messages"),
    ({"messages": [7]}, "Line 2 of calib.jsonl has messages"),
    ({"messages": [{"role": "user"}]}, "Line 2 of calib.jsonl has a message without role or content"),
    ({"messages": [{"content": "Hi"}]}, "Line 2 of calib.jsonl has a message without role or content"),
    ({"messages": [{"role": "user", "content": 7}]}, "Line 2 of calib.jsonl can't be rendered"),
]


@pytest.mark.parametrize(("line", "says"), BAD, ids=lambda value: str(value)[:24])
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, text: TextModel, line: Any, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        read_sequences(a_file(tmp_path, {"text": "fine and good"}, line), text, tokens=1000, most=100)


def test_a_file_without_text_and_none_at_all(tmp_path: Path, text: TextModel) -> None:
    with pytest.raises(CalibrationError, match="no line with text"):
        read_sequences(a_file(tmp_path, "", {"text": ""}), text, tokens=1000, most=100)
    with pytest.raises(CalibrationError, match="can't be read"):
        read_sequences(tmp_path / "none.jsonl", text, tokens=1000, most=100)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    plain = load_text(make_tiny_model(tmp_path / "plain", chat_template=None))
    with pytest.raises(
        CalibrationError, match="Line 1 of calib\\.jsonl can't be rendered: The model plain has no chat"
    ):
        read_sequences(a_file(tmp_path, {"messages": CHAT}), plain, tokens=1000, most=100)
