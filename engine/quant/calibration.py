"""Reads a calibration file: JSONL whose lines are chats, prompts or plain texts, as token ids.

A line is a line of a batch (`body` with `messages`, `prompt` or `input`), or an object with `messages` or `text`. The
best file is one of the jobs that the model will run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import EngineError, ModelError, RequestError
from engine.text import TextModel

MOST_LINE_BYTES = 16 << 20
_TEXT_FIELDS = ("text", "prompt", "input")


class CalibrationError(EngineError):
    """A calibration file can't be used; the sentence names the line."""


def read_sequences(path: Path, text: TextModel, *, tokens: int, most: int) -> list[list[int]]:
    """The file's first lines, each cut to `most` token ids, until they are `tokens` in all.

    Raises CalibrationError for the first line that can't be used, and for a file without any.
    """
    sequences: list[list[int]] = []
    left = tokens
    for where, line in _lines(path):
        ids = _ids(where, line, text)[: min(most, left)]
        if len(ids) > 1:
            sequences.append(ids)
            left -= len(ids)
        if left <= 1:
            break
    if not sequences:
        raise CalibrationError(f"{path} has no line with text: calibration needs some text to run.")
    return sequences


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that aren't blank, and what to call each."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                where = f"Line {number} of {path.name}"
                if len(line) > MOST_LINE_BYTES:
                    raise CalibrationError(f"{where} is longer than {MOST_LINE_BYTES >> 20} MiB.")
                if line.strip():
                    yield where, line
    except OSError as error:
        raise CalibrationError(f"The calibration file {path} can't be read: {error.strerror or error}.") from error


def _ids(where: str, line: bytes, text: TextModel) -> list[int]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where} is no JSON: {error}.") from error
    body = value.get("body", value) if isinstance(value, dict) else None
    if not isinstance(body, dict):
        raise CalibrationError(f"{where} is no JSON object.")
    try:
        if "messages" in body:
            return text.prompt_ids(_messages(where, body["messages"]))
        for name in _TEXT_FIELDS:
            if isinstance(body.get(name), str):
                return text.tokenizer.encode_texts([body[name]])[0]
    except (RequestError, ModelError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{where} can't be rendered: {str(error).rstrip('.')}.") from error
    raise CalibrationError(f"{where} has no text: give messages, prompt or text.")


def _messages(where: str, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise CalibrationError(f"{where} has messages that aren't a list of objects.")
    for message in messages:
        has_words = message.get("content") is not None or message.get("tool_calls")
        if not isinstance(message.get("role"), str) or not has_words:
            raise CalibrationError(f"{where} has a message without role or content.")
    return messages
