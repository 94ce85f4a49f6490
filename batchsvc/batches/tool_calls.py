"""The message of an answer: its text, or the calls of tools that it consists of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from engine.text.calls import CallFormat, parse_calls


def message_of(
    text: str, finish_reason: str, params: Mapping[str, Any], *, ident: str, choice: int = 0
) -> tuple[dict[str, Any], str]:
    """The message of a chat completion and its finish_reason. `params` are those of the unit's row; with the same
    `ident` (one a line) and `choice`, calls have the same ids, so that a rerun gives the same bytes."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if "calls" not in params:
        return message, finish_reason
    parsed = parse_calls(text, CallFormat(params["calls"]))
    if not parsed.calls:
        return message, finish_reason
    message["content"] = parsed.text or None
    message["tool_calls"] = [
        {
            "id": f"call_{_ident(ident, choice, index)}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(parsed.calls)
    ]
    return message, "tool_calls" if finish_reason == "stop" else finish_reason


def _ident(ident: str, choice: int, index: int) -> str:
    return hashlib.blake2b(f"{ident}:{choice}:{index}:call".encode(), digest_size=12).hexdigest()
