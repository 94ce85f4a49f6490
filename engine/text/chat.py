"""Chat messages to prompt text, in jinja2's immutable sandbox: the only place where a template is rendered.

A template comes with an installed model, never from a tenant: the sandbox stops escapes, not a template that burns CPU.
`strftime_now` is left out on purpose: a prompt must not depend on the day it is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError
from engine.text.calls import CallFormat, format_of

MAX_PROMPT_CHARS = 64 << 20
_ALWAYS = {"messages", "add_generation_prompt"}


class _TemplateRefusalError(Exception):
    """The template called raise_exception."""


class ChatTemplate:
    """A compiled chat template. `variables` are the names it asks for, beyond what every template has."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._source = source
        try:
            asked = meta.find_undeclared_variables(environment.parse(source))
            self.variables = frozenset(asked - environment.globals.keys() - self._tokens.keys() - _ALWAYS)
            self._template = environment.from_string(source)
            # a plain dictionary: the template's own chain of them takes longer to copy than a short chat to render
            self._globals = dict(self._template.globals)
        except jinja2.TemplateError as error:
            raise ModelError(f"The model's chat template can't be compiled: {error}.") from error

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls of tools; None if its template doesn't say so, or in no way that we can read."""
        return format_of(self._source) if "tools" in self.variables else None

    @property
    def knows_calls(self) -> bool:
        """Whether it renders the calls in earlier messages, and their results."""
        return "tool_calls" in self._source and "tool" in self._source.replace("tool_calls", "")

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for `messages`, ready for the answer (`add_generation_prompt` is True unless given).

        Content that is a list of text parts is joined first, as templates expect text. Raises RequestError with
        param "messages" when the template refuses them or a part is no text.
        """
        variables = {"add_generation_prompt": True, **self._tokens, **variables}
        size, pieces = 0, []
        try:
            names = {**self._globals, **variables, "messages": [_plain(message) for message in messages]}
            for piece in self._template.root_render_func(self._template.new_context(names, shared=True)):
                size += len(piece)
                if size > MAX_PROMPT_CHARS:
                    _refuse(f"the prompt is longer than {MAX_PROMPT_CHARS} characters")
                pieces.append(piece)
        except RequestError:
            raise
        except Exception as error:  # a template can raise anything: KeyError, TypeError, UndefinedError, ...
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise RequestError(
                f"The model's chat template refuses these messages: {reason}.", code="invalid_value", param="messages"
            ) from error
        return "".join(pieces)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(_text_of(part) for part in content)
    return {**message, "content": content}


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError("Message content may hold parts of type text only.", code="invalid_value", param="messages")
    return text


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """jinja2's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusalError(message)
