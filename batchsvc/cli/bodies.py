"""The bodies of requests that are made of rows of a table: what `--prompt` and its companions ask of each endpoint.

Pure. They differ in one text, the filled-in template. An option that an endpoint has no word for is refused, never
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.input_file import ENDPOINTS

_NO_ANSWER = "nothing is written there, the answer is a vector"
# endpoint -> options that make no sense with it, and why
_SENSELESS: Mapping[str, Mapping[str, str]] = {
    "chat": {"dimensions": "only embeddings have dimensions"},
    "completions": {
        "system": "a text completion has no system message; write it into --prompt",
        "dimensions": "only embeddings have dimensions",
    },
    "embeddings": {
        "system": "an embedding has no system message; write it into --prompt",
        "schema": _NO_ANSWER,
        "max_tokens": _NO_ANSWER,
        "temperature": _NO_ANSWER,
    },
    "responses": {"dimensions": "only embeddings have dimensions"},
}


def named_endpoint(text: str) -> str:
    """The endpoint that --endpoint names: a word, or its url. Raises CommandError."""
    name = text.strip().removeprefix("/").removeprefix("v1/").removesuffix("/")
    name = "chat" if name == "chat/completions" else name
    if name not in ENDPOINTS:
        words = list(ENDPOINTS)
        raise CommandError(
            f"--endpoint can't be {text!r}: it is {', '.join(words[:-1])} or {words[-1]}.",
            Exit.USAGE,
        )
    return name


def check_options(endpoint: str, options: Mapping[str, Any]) -> None:
    """Raises CommandError for an option that is given, and makes no sense with this endpoint."""
    for name, why in _SENSELESS[endpoint].items():
        if options.get(name) is not None:
            option, kind = name.replace("_", "-"), "" if endpoint == "chat" else f" with --endpoint {endpoint}"
            raise CommandError(f"--{option} makes no sense{kind}: {why}.", Exit.USAGE)


class Bodies:
    """The bodies of one table's requests. `model` is None where the batch names it; `schema` is (name, JSON schema)."""

    def __init__(
        self,
        endpoint: str,
        *,
        model: str | None,
        system: str | None = None,
        schema: tuple[str, dict[str, Any]] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        dimensions: int | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._system = system
        self._first = {} if model is None else {"model": model}
        if endpoint == "embeddings":
            self._rest: dict[str, Any] = {} if dimensions is None else {"dimensions": dimensions}
            return
        length = "max_output_tokens" if endpoint == "responses" else "max_tokens"
        self._rest = ({} if max_tokens is None else {length: max_tokens}) | {"temperature": temperature or 0}
        if schema is not None:
            described = {"name": schema[0], "schema": schema[1], "strict": True}
            if endpoint == "responses":
                self._rest["text"] = {"format": {"type": "json_schema", **described}}
            else:
                self._rest["response_format"] = {"type": "json_schema", "json_schema": described}

    def asking(self, prompt: str) -> dict[str, Any]:
        """The body of the row whose prompt this is."""
        return {**self._first, **self._text(prompt), **self._rest}

    def _text(self, prompt: str) -> dict[str, Any]:
        match self._endpoint:
            case "completions":
                return {"prompt": prompt}
            case "embeddings":
                return {"input": prompt}
            case "responses":
                return {"input": prompt} | ({} if self._system is None else {"instructions": self._system})
            case _:
                system = [] if self._system is None else [{"role": "system", "content": self._system}]
                return {"messages": [*system, {"role": "user", "content": prompt}]}
