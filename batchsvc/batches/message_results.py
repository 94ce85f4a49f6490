"""Lines of result files as results of a message batch: succeeded, errored, canceled or expired. Pure.

Tokens are counted as Anthropic counts them: `input_tokens` are those that were computed, and those from the cache
stand beside them in `cache_read_input_tokens`, whereas a chat's `prompt_tokens` are both.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from batchsvc.batches import message_tools

_OURS = {"budget_exceeded": "billing_error", "unit_unreadable": "api_error"}
_ENDED = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_STOPPED = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def results(output: Iterable[bytes], error: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of both files as results, in the order of the requests."""
    rows = heapq.merge(map(orjson.loads, output), map(orjson.loads, error), key=lambda row: row["line"])
    return (result_line(str(row["custom_id"]), result_of(row)) for row in rows)


def result_line(custom_id: str, result: dict[str, Any]) -> bytes:
    """A line of the results."""
    return orjson.dumps({"custom_id": custom_id, "result": result}, option=orjson.OPT_APPEND_NEWLINE)


def result_of(row: dict[str, Any]) -> dict[str, Any]:
    """What became of the request of a line of a result file."""
    response, error = row["response"], row["error"]
    if response is None:
        kind = _ENDED.get(error["code"])
        if kind is not None:
            return {"type": kind}
        return errored(_OURS.get(error["code"], "invalid_request_error"), error["message"])
    body = response["body"]
    if response["status_code"] == 200:
        return {"type": "succeeded", "message": message_of(body)}
    kind = "invalid_request_error" if response["status_code"] < 500 else "api_error"
    return errored(kind, body["error"]["message"], response["request_id"])


def errored(kind: str, message: str, request_id: str | None = None) -> dict[str, Any]:
    """The result of a request that failed."""
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    return {"type": "errored", "error": error}


def message_of(chat: dict[str, Any]) -> dict[str, Any]:
    """A chat completion as a message."""
    choice, usage = chat["choices"][0], chat["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    stop = choice.get("stop_reason") if choice["finish_reason"] == "stop" else None  # a sequence that ended it
    return {
        "id": "msg_" + chat["id"].removeprefix("chatcmpl-"),
        "type": "message",
        "role": "assistant",
        "model": chat["model"],
        "content": message_tools.blocks_of(choice["message"]),
        "stop_reason": _STOPPED.get(choice["finish_reason"], "end_turn") if stop is None else "stop_sequence",
        "stop_sequence": stop,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "service_tier": "batch",
            "cost_nanos": usage["cost_nanos"],
        },
        "system_fingerprint": chat.get("system_fingerprint"),
    }
