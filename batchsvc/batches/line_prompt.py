"""What passes between a body's parser and the window that tokenizes it: prompts, and what they have to fit into."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchsvc.batches.body import ChatCall
from batchsvc.batches.body import fit as fit_chat
from batchsvc.batches.body_values import wrong
from batchsvc.batches.rendering import render_chat
from engine.errors import RequestError
from engine.load.meta import ModelMeta
from engine.text import TextModel


class LinePrompt(NamedTuple):
    """The prompts of a line: `texts` to tokenize, or the `ids` that it gives itself. Of `is_plain` texts the tokenizer
    adds what belongs around one; in a rendered chat that is there already."""

    texts: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    is_plain: bool = False

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts)) + sum(map(len, self.ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The model that a line runs on, and what it gets if it says nothing of its length."""

    meta: ModelMeta
    default_max_tokens: int


@dataclass(frozen=True, slots=True)
class ChatLine:
    """A chat whose messages the model's template has rendered: endpoints.Call."""

    call: ChatCall

    @classmethod
    def of(cls, call: ChatCall, text: TextModel) -> tuple[ChatLine, LinePrompt]:
        """The call and its prompt. Raises RequestError."""
        settled, rendered = render_chat(call, text)
        return cls(settled), LinePrompt(texts=(rendered,))

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.call.messages

    def fit(self, lengths: Sequence[int], fitting: Fitting) -> dict[str, Any]:
        return fit_chat(
            self.call,
            prompt_tokens=lengths[0],
            context_tokens=fitting.meta.context_tokens,
            default_max_tokens=fitting.default_max_tokens,
            vocab_size=fitting.meta.vocab_size,
        )


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """An error of a chat in the words of another endpoint."""
    says, param = str(error), error.param or ""
    for chat, other in names.items():
        if param == chat or param.startswith((f"{chat}[", f"{chat}.")):
            param = other + param.removeprefix(chat)
        says = re.sub(rf"(?<![\w.]){chat}(?!\w)", other, says)
    return RequestError(says, code=error.code, param=param or None)


def tokenized(prompts: Sequence[LinePrompt], text: TextModel) -> Iterator[list[list[int]]]:
    """Token ids of all prompts of each line, in order."""
    rendered = iter(text.encode_prompts([one for prompt in prompts if not prompt.is_plain for one in prompt.texts]))
    plain = iter(text.tokenizer.encode_texts([one for prompt in prompts if prompt.is_plain for one in prompt.texts]))
    for prompt in prompts:
        source = plain if prompt.is_plain else rendered
        yield [list(ids) for ids in prompt.ids] or [next(source) for _ in prompt.texts]


def prompts_of(body: dict[str, Any], name: str) -> LinePrompt:
    """The prompts under `name` in the four forms that OpenAI takes: a text, token ids, or a list of either."""
    value = body.get(name)
    if value is None:
        raise RequestError(f"The body has no {name}.", code="missing_required_parameter", param=name)
    if isinstance(value, str):
        return LinePrompt(texts=(value,), is_plain=True)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return LinePrompt(texts=tuple(value), is_plain=True)
        if _are_ids(value):
            return LinePrompt(ids=(tuple(value),), is_plain=True)
        if all(_are_ids(item) for item in value):
            return LinePrompt(ids=tuple(map(tuple, value)), is_plain=True)
    raise wrong(name, "a string, a list of token ids, or a list of either, none empty", value)


def check_ids(prompt: LinePrompt, meta: ModelMeta, name: str) -> None:
    """Raises RequestError for token ids that the model doesn't have."""
    largest = max((max(ids) for ids in prompt.ids), default=0)
    if largest >= meta.vocab_size:
        raise RequestError(
            f"{name} has the token id {largest}, which is outside of the model's vocabulary of {meta.vocab_size}.",
            code="invalid_value",
            param=name,
        )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 2**31 for item in value)
