"""The bodies of answers that aren't chat completions: text completions, embeddings and responses, in OpenAI's shapes.

Ours on top are `usage.cost_nanos`, the cached tokens of an embedding, without which its bill couldn't be checked, and
`system_fingerprint` where OpenAI has none: vectors of other formats don't belong in one index.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchsvc.batches.choices import text_choices_of
from batchsvc.batches.endpoints import COMPLETIONS, EMBEDDINGS, RESPONSES
from batchsvc.batches.part_file import chat_usage
from engine.request import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of a line: its unit row's `params`, and what the engine says."""

    line_ident: str
    model: str
    created_s: int
    params: Mapping[str, Any]
    text: str
    finish_reason: str
    vectors: tuple[bytes, ...]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int
    choices: tuple[Choice, ...] = ()
    system_fingerprint: str | None = None


def body_of(answered: Answered) -> dict[str, Any] | None:
    """The body of an answer. None: it is a chat completion."""
    shape = _SHAPES.get(answered.params.get("endpoint", ""))
    return None if shape is None else shape(answered)


def _completion(answered: Answered) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answered.line_ident}",
        "object": "text_completion",
        "created": answered.created_s,
        "model": answered.model,
        "choices": text_choices_of(answered.choices),
        "usage": chat_usage(answered.input_tokens, answered.cached_tokens, answered.output_tokens, answered.cost_nanos),
        "system_fingerprint": answered.system_fingerprint,
    }


def _embedding(answered: Answered) -> dict[str, Any]:
    size, is_base64 = answered.params.get("dimensions"), answered.params["encoding_format"] == "base64"
    found = [shortened(np.frombuffer(vector, "<f4"), size) for vector in answered.vectors]
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode() if is_base64 else vector,
            }
            for index, vector in enumerate(found)
        ],
        "model": answered.model,
        "usage": {
            "prompt_tokens": answered.input_tokens,
            "total_tokens": answered.input_tokens,
            "prompt_tokens_details": {"cached_tokens": answered.cached_tokens},
            "cost_nanos": answered.cost_nanos,
        },
        "system_fingerprint": answered.system_fingerprint,
    }


def shortened(vector: np.ndarray[Any, np.dtype[np.float32]], size: int | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The first `size` numbers of a vector, of length 1 again (all zero, where these are)."""
    if size is None or size >= len(vector):
        return np.ascontiguousarray(vector, "<f4")
    first = vector[:size].astype(np.float64)
    return np.ascontiguousarray(first / (np.linalg.norm(first) or 1.0), "<f4")


def _response(answered: Answered) -> dict[str, Any]:
    is_whole = answered.finish_reason != "length"
    status = "completed" if is_whole else "incomplete"
    shown, params = answered.params.get("shown", {}), answered.params
    return {
        "id": f"resp_{answered.line_ident}",
        "object": "response",
        "created_at": answered.created_s,
        "status": status,
        "error": None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "instructions": shown.get("instructions"),
        "max_output_tokens": shown.get("max_output_tokens"),
        "metadata": {},
        "model": answered.model,
        **({"service_tier": params["service_tier"]} if "service_tier" in params else {}),
        "output": [
            {
                "type": "message",
                "id": f"msg_{answered.line_ident}",
                "status": status,
                "role": "assistant",
                "content": [{"type": "output_text", "text": answered.text, "annotations": [], "logprobs": []}],
            }
        ],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "temperature": params.get("temperature", 1.0),
        "text": {"format": {"type": "text"}} | shown.get("text", {}),
        "tool_choice": "none",
        "tools": [],
        "top_p": params.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": {
            "input_tokens": answered.input_tokens,
            "input_tokens_details": {"cached_tokens": answered.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answered.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.input_tokens + answered.output_tokens,
            "cost_nanos": answered.cost_nanos,
        },
        "system_fingerprint": answered.system_fingerprint,
    }


_SHAPES: Mapping[str, Callable[[Answered], dict[str, Any]]] = {
    COMPLETIONS: _completion,
    EMBEDDINGS: _embedding,
    RESPONSES: _response,
}
