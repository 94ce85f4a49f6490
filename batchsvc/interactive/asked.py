"""What the body of an interactive call asks for: what a line of a batch may ask, and whether to stream.

The body is read as strictly as a line and by the same code (batches/endpoints.py), so a call and a line with the same
body get the same answer, or the same refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from batchsvc.batches import endpoints, magic
from batchsvc.batches.body_values import allow, wrong
from batchsvc.batches.line_prompt import Fitting, tokenized
from batchsvc.errors import InvalidRequestError, OverloadedError, UnavailableError
from batchsvc.files.request_object import request_object
from engine.errors import RequestError
from engine.text import TextModel

MOST_LOGPROBS = 200_000
"""Of all answers of a call: tenths of a second of a process, and tens of megabytes."""
_STREAM_OPTIONS = "stream_options"
_OPTIONS = frozenset({"include_usage"})
_HARMLESS_OPTIONS: dict[str, tuple[Any, ...]] = {  # nothing is padded here, whatever is asked for
    "include_obfuscation": (True, False),
    "continuous_usage_stats": (False,),
}
_OF_NO_ENGINE: dict[str, type[OverloadedError | UnavailableError]] = {
    "too_many_calls": OverloadedError,
    "no_worker": UnavailableError,
    "worker_lost": UnavailableError,
}  # what the API process says of a call, without a word from an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body whose model isn't looked up yet. `rest` is what a line would have."""

    model: str
    rest: dict[str, Any]
    streams: bool
    includes_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to run: `params` are those of a unit row, with `max_tokens`."""

    prompt_ids: list[int]
    params: dict[str, Any]

    @property
    def most_output_tokens(self) -> int:
        """The most that its answers can have together."""
        return int(self.params.get("n", 1)) * int(self.params["max_tokens"])

    @property
    def most_logprobs(self) -> int:
        """The most logprobs that these can have."""
        top = self.params.get("logprobs")
        return 0 if top is None else self.most_output_tokens * (1 + int(top))


def read_body(data: bytes) -> Body:
    """Raises InvalidRequestError."""
    body = request_object(data)
    model = body.get("model")
    if model is None:
        raise InvalidRequestError("The body names no model.", code="missing_required_parameter", param="model")
    try:
        if not isinstance(model, str):
            raise wrong("model", "the name of a model", model)
        streams = _flag(body.get("stream"), "stream")
        includes_usage = _includes_usage(body.get(_STREAM_OPTIONS), streams=streams)
    except RequestError as error:
        raise refused(error) from error
    rest = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return Body(model=model, rest=rest, streams=streams, includes_usage=includes_usage)


def ask(endpoint: str, body: Body, text: TextModel, *, default_max_tokens: int) -> Asked:
    """What the body asks of this model. Raises InvalidRequestError with the code and param of OpenAI's error body."""
    try:
        call, prompt = endpoints.prepare(endpoints.PARSERS[endpoint](body.rest), text)
        (ids,) = next(tokenized([prompt], text))
        params = call.fit([len(ids)], Fitting(meta=text.meta, default_max_tokens=default_max_tokens))
    except RequestError as error:
        raise refused(error) from error
    asked = Asked(prompt_ids=ids, params=params)
    _refuse_many_logprobs(asked)
    return asked


def with_magic(asked: Asked, body: Body) -> Asked:
    """The same of a test key, with what its prompt asks of the engine of test mode. Raises InvalidRequestError, and
    the errors of a call that no worker takes or ends, if it asks for one."""
    try:
        params = magic.params_of(body.rest, magic.CALL_CODES)
    except RequestError as error:
        raise refused(error) from error
    spell = magic.parse(params.get(magic.PARAM, ""))
    if spell is not None and spell.code in _OF_NO_ENGINE:
        raise _OF_NO_ENGINE[spell.code]("A prompt of test mode asked for this error.", code=spell.code)
    return replace(asked, params=asked.params | params)


def _refuse_many_logprobs(asked: Asked) -> None:
    """A batch takes them: it is read by nobody who waits, and written in parts."""
    if asked.most_logprobs > MOST_LOGPROBS:
        raise InvalidRequestError(
            f"The answers can have {asked.most_output_tokens:,} tokens (n times max_tokens) with"
            f" {asked.most_logprobs // asked.most_output_tokens} logprobs each, {asked.most_logprobs:,} in all; a call"
            f" can have {MOST_LOGPROBS:,}: ask for fewer, or use a batch.",
            code="invalid_value",
            param="logprobs",
        )


def refused(error: RequestError) -> InvalidRequestError:
    """A refusal of a line as that of a call."""
    return InvalidRequestError(str(error), code=error.code, param=error.param)


def _includes_usage(options: Any, *, streams: bool) -> bool:
    if options is None or options == {}:
        return False
    if not isinstance(options, dict):
        raise wrong(_STREAM_OPTIONS, "an object", options)
    if not streams:
        says = f"{_STREAM_OPTIONS} say how to stream: set stream to true, or remove them from the body."
        raise RequestError(says, code="invalid_value", param=_STREAM_OPTIONS)
    try:
        allow(options, _OPTIONS, _HARMLESS_OPTIONS)
    except RequestError as error:
        raise RequestError(str(error), code=error.code, param=f"{_STREAM_OPTIONS}.{error.param}") from error
    return _flag(options.get("include_usage"), f"{_STREAM_OPTIONS}.include_usage")


def _flag(value: Any, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise wrong(name, "true or false", value)
    return bool(value)
