"""The bodies of interactive calls as OpenAI's client reads them, whole and as the chunks of a stream.

A stream of a chat or a text completion is chunks and `[DONE]`, one of a response is numbered events that name
themselves. Chunks carry what became certain; what is left comes with the end, so that all of them together are the
whole answer. Answers that may call tools are held back until they are whole, because only then it shows what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from batchsvc.batches import answers
from batchsvc.batches.answers import Answered
from batchsvc.batches.choices import choices_of, logprobs_of, text_choices_of, text_logprobs_of
from batchsvc.batches.endpoints import CHAT, COMPLETIONS, RESPONSES
from batchsvc.batches.part_file import chat_body, chat_usage
from batchsvc.errors import ServiceError
from batchsvc.interactive.growth import Growth
from batchsvc.json_bytes import one_line_json
from engine.request import Completion, NewText, SpelledLogprob

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of an answer before it begins; `params` are those of a unit row."""

    ident: str
    model: str
    created_s: int
    params: Mapping[str, Any]
    includes_usage: bool = False


class Shape(Protocol):
    """The stream of one call."""

    def grow(self, texts: Iterable[NewText]) -> Iterator[bytes]:
        """What is sent of text that became certain; with the first, what begins the stream."""

    def end(self, answered: Answered, completion: Completion) -> Iterator[bytes]:
        """What is left, and the end."""

    def fail(self, error: ServiceError) -> bytes:
        """The end of a stream that broke off."""


def whole_body(answered: Answered, completion: Completion) -> dict[str, Any]:
    """The body of an answer that isn't streamed."""
    body = answers.body_of(answered)
    if body is not None:
        return body
    return chat_body(
        ident=answered.line_ident,
        model=answered.model,
        created_s=answered.created_s,
        choices=choices_of(completion, answered.params, ident=answered.line_ident),
        system_fingerprint=answered.system_fingerprint,
        service_tier=answered.params.get("service_tier"),
        usage=_usage(answered),
    )


def stream_of(endpoint: str, head: Head) -> Shape:
    """The stream of a call of an endpoint."""
    return _SHAPES[endpoint](head)


class _ChatStream:
    """Chunks of a chat completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sent = Growth()
        self._fingerprint: str | None = None  # nobody knows it before the end
        self._may_call = "calls" in head.params

    def grow(self, texts: Iterable[NewText]) -> Iterator[bytes]:
        if self._may_call:
            return
        for news in texts:
            yield from self._begin(news.choice)
            self._sent.add(news)
            if news.text or news.logprobs:
                yield self._chunk(news.choice, {"content": news.text}, news.logprobs)

    def end(self, answered: Answered, completion: Completion) -> Iterator[bytes]:
        self._fingerprint = answered.system_fingerprint
        shown = choices_of(completion, answered.params, ident=answered.line_ident)
        for choice, (whole, end) in enumerate(zip(completion.answers, shown, strict=True)):
            yield from self._begin(choice)
            rest = self._sent.rest(choice, whole)
            calls = end["message"].get("tool_calls")
            if calls:
                numbered = [{"index": index, **call} for index, call in enumerate(calls)]
                text = end["message"]["content"]
                delta = {"tool_calls": numbered} | ({"content": text} if text else {})
                yield self._chunk(choice, delta, rest.logprobs)
            elif rest.text or rest.logprobs:
                yield self._chunk(choice, {"content": rest.text}, rest.logprobs)
            ended = {name: end[name] for name in ("finish_reason", "stop_reason") if name in end}
            yield self._chunk(choice, {}, (), **ended)
        if self._head.includes_usage:
            yield _data({**self._frame(), "choices": [], "usage": _usage(answered)})
        yield DONE

    def fail(self, error: ServiceError) -> bytes:
        return _data(error.envelope())

    def _begin(self, choice: int) -> Iterator[bytes]:
        if not self._sent.has_begun(choice):
            self._sent.add(NewText("", choice))
            yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None}, ())

    def _frame(self) -> dict[str, Any]:
        head, tier = self._head, self._head.params.get("service_tier")
        frame = {
            "id": f"chatcmpl-{head.ident}",
            "object": "chat.completion.chunk",
            "created": head.created_s,
            "model": head.model,
            "system_fingerprint": self._fingerprint,
        }
        return frame if tier is None else frame | {"service_tier": tier}

    def _chunk(
        self,
        choice: int,
        delta: Mapping[str, Any],
        logprobs: tuple[SpelledLogprob, ...],
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        shown = logprobs_of(logprobs) if logprobs else None
        one = {"index": choice, "delta": delta, "logprobs": shown, "finish_reason": finish_reason, **more}
        return _data({**self._frame(), "choices": [one], **({"usage": None} if self._head.includes_usage else {})})


class _TextStream:
    """Chunks of a text completion."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sent = Growth()
        self._fingerprint: str | None = None  # nobody knows it before the end

    def grow(self, texts: Iterable[NewText]) -> Iterator[bytes]:
        for news in texts:
            if news.text or news.logprobs:
                yield self._chunk(news)
            self._sent.add(news)

    def end(self, answered: Answered, completion: Completion) -> Iterator[bytes]:
        self._fingerprint = answered.system_fingerprint
        shown = text_choices_of(completion.answers)
        for choice, (whole, end) in enumerate(zip(completion.answers, shown, strict=True)):
            ended = {name: end[name] for name in ("finish_reason", "stop_reason") if name in end}
            yield self._chunk(self._sent.rest(choice, whole), **ended)
        if self._head.includes_usage:
            yield _data({**self._frame(), "choices": [], "usage": _usage(answered)})
        yield DONE

    def fail(self, error: ServiceError) -> bytes:
        return _data(error.envelope())

    def _frame(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self._head.ident}",
            "object": "text_completion",
            "created": self._head.created_s,
            "model": self._head.model,
            "system_fingerprint": self._fingerprint,
        }

    def _chunk(self, news: NewText, finish_reason: str | None = None, **more: Any) -> bytes:
        logprobs = None
        if news.logprobs:
            logprobs = text_logprobs_of(news.logprobs)
            before = self._sent.chars(news.choice)
            logprobs["text_offset"] = [before + offset for offset in logprobs["text_offset"]]
        one = {"index": news.choice, "text": news.text, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        return _data({**self._frame(), "choices": [one], **({"usage": None} if self._head.includes_usage else {})})


class _ResponseStream:
    """Events of a response: one message of one text."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._sent = Growth()
        self._num_events = 0

    def grow(self, texts: Iterable[NewText]) -> Iterator[bytes]:
        yield from self._begin()
        for news in texts:
            self._sent.add(news)
            yield from self._delta(news.text)

    def end(self, answered: Answered, completion: Completion) -> Iterator[bytes]:
        yield from self._begin()
        yield from self._delta(self._sent.rest(0, completion.answers[0]).text)
        body = answers.body_of(answered)
        assert body is not None, "a response has a shape of its own"
        (item,) = body["output"]
        (part,) = item["content"]
        yield self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{body['status']}", response=body)

    def fail(self, error: ServiceError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _begin(self) -> Iterator[bytes]:
        if self._num_events:
            return
        begun = self._begun()
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        item = {"type": "message", "id": self._item_id, "status": "in_progress", "role": "assistant", "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", **self._place(), part=part)

    def _begun(self) -> dict[str, Any]:
        """The response without an answer."""
        head = self._head
        body = answers.body_of(
            Answered(
                line_ident=head.ident,
                model=head.model,
                created_s=head.created_s,
                params=head.params,
                text="",
                finish_reason="stop",
                vectors=(),
                input_tokens=0,
                cached_tokens=0,
                output_tokens=0,
                cost_nanos=0,
            )
        )
        assert body is not None, "a response has a shape of its own"
        return body | {"status": "in_progress", "output": [], "usage": None}

    def _delta(self, text: str) -> Iterator[bytes]:
        if text:
            yield self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    @property
    def _item_id(self) -> str:
        return f"msg_{self._head.ident}"

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        said = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\n" + _data(said)


_SHAPES: Mapping[str, Callable[[Head], Shape]] = {
    CHAT: _ChatStream,
    COMPLETIONS: _TextStream,
    RESPONSES: _ResponseStream,
}


def _usage(answered: Answered) -> dict[str, Any]:
    return chat_usage(answered.input_tokens, answered.cached_tokens, answered.output_tokens, answered.cost_nanos)


def _data(value: Mapping[str, Any]) -> bytes:
    return b"data: " + one_line_json(value) + b"\n\n"
