"""The endpoints that lines may name: for each, how a body is read and how its prompts become token ids.

A batch has one endpoint. Whatever it is, a line becomes a `Call`: `prepare` gives the texts (or ids) of its prompts,
its `fit` the parameters that its unit row carries once their lengths are known. Those say what the answer looks like,
too: without `endpoint` among them, a chat completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchsvc.batches.body import ChatCall, parse_chat
from batchsvc.batches.completion_body import CompletionCall, parse_completion
from batchsvc.batches.embedding_body import EmbeddingCall, parse_embedding
from batchsvc.batches.line_prompt import ChatLine, LinePrompt
from batchsvc.batches.message_body import MessageCall
from batchsvc.batches.responses_body import ResponseCall, parse_response
from engine.text import TextModel

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"

Parsed = ChatCall | MessageCall | CompletionCall | EmbeddingCall | ResponseCall
Call = ChatLine | CompletionCall | EmbeddingCall | ResponseCall

PARSERS: Mapping[str, Callable[[dict[str, Any]], Parsed]] = {
    CHAT: parse_chat,
    COMPLETIONS: parse_completion,
    EMBEDDINGS: parse_embedding,
    RESPONSES: parse_response,
}


def prepare(parsed: Parsed, text: TextModel) -> tuple[Call, LinePrompt]:
    """A parsed body with what the model's template settles of it, and its prompts. Raises RequestError."""
    return ChatLine.of(parsed, text) if isinstance(parsed, ChatCall) else parsed.prepare(text)
