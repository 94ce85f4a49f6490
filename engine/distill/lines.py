"""Reads what a student learns from: the lines of a batch, with the answers that they had, as token ids; no torch.

An input file holds requests (`body` with `messages` or a `prompt`); results are lines of a result or an error file,
joined by `custom_id`, or a line holds its `response` itself. A line whose answer failed teaches nothing; one that has
no answer yet is for the teacher to answer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.distill.errors import DistillError
from engine.distill.options import MOST_SAMPLES
from engine.errors import EngineError, RequestError
from engine.request import SamplingParams
from engine.text import TextModel

MOST_LINE_BYTES = 16 << 20
DEFAULT_ANSWER_TOKENS = 256
"""Of a line that the teacher answers and that names no most."""
_ROLES = {"developer": "system"}  # templates know system; developer is its later name


class Line(NamedTuple):
    """`number` in the file, from 1; `answer` None: there is none yet, and `params` are how it is asked for. `sample`: 0
    for its own answer, then further ones."""

    number: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    params: SamplingParams
    sample: int = 0

    @property
    def key(self) -> int:
        """Of number and sample: that of no other line of the file."""
        return self.number * (MOST_SAMPLES + 1) + self.sample


@dataclass(slots=True)
class Lines:
    """The usable lines, and why others aren't: how many for each reason."""

    usable: list[Line] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """In a sentence, what the file has given."""
        missing = sum(line.answer is None for line in self.usable)
        sentence = f"{len(self.usable):,} lines to learn from"
        if missing:
            sentence += f", {missing:,} of them still to be answered by the teacher"
        if self.skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.skipped.items()))
            sentence += f"; {sum(self.skipped.values()):,} lines are skipped ({reasons})"
        return sentence + "."


def read_lines(data: Path, results: Sequence[Path], text: TextModel, *, most: int) -> Lines:
    """The first `most` lines of a file that can be used. Raises DistillError for files that can't be read, and where
    nothing can be used."""
    found = Lines()
    values = dict(_numbered(data, most, found))
    wanted = {value["custom_id"]: number for number, value in values.items() if isinstance(value.get("custom_id"), str)}
    answers: dict[int, Any] = {number: value for number, value in values.items() if "response" in value}
    for path in results:
        for _, line in _lines(path):
            value = _object(line)
            custom_id = None if value is None else value.get("custom_id")
            if not isinstance(custom_id, str):
                found.skipped["results that name no line"] += 1
            elif custom_id in wanted:
                answers[wanted[custom_id]] = value
    for number, value in values.items():
        _add(found, number, value, answers.get(number), text)
    if not found.usable:
        raise DistillError(f"{data} gives nothing to learn from: {found.told()}")
    return found


def split(lines: Sequence[Line], holdout: float, seed: int) -> tuple[list[Line], list[Line]]:
    """Those to learn from, and about the share `holdout` kept apart, each in order. Lines of equal prompts stay on one
    side: who has learned an answer to a prompt has seen it. Raises DistillError where there is one prompt only."""
    order = [line.prompt for line in lines]
    prompts = list(dict.fromkeys(order))
    if len(prompts) < 2:
        raise DistillError(
            "A student needs lines of at least 2 different prompts: some to learn from, and some to be held against."
        )
    counts, wanted = Counter(order), max(round(holdout * len(lines)), 1)
    apart, found = set[tuple[int, ...]](), 0
    for place in np.random.default_rng(seed).permutation(len(prompts)).tolist()[:-1]:
        if found >= wanted:
            break
        apart.add(prompts[place])
        found += counts[prompts[place]]
    return [line for line in lines if line.prompt not in apart], [line for line in lines if line.prompt in apart]


def _add(found: Lines, number: int, value: dict[str, Any], result: Any, text: TextModel) -> None:
    body = value.get("body", value)
    try:
        prompt = _prompt(body, text)
        answer = None if result is None else _answer(result, text)
        params = _params(body, number)
    except _UnusableError as error:
        found.skipped[str(error)] += 1
        return
    except (EngineError, UnicodeError):  # half a surrogate is no text
        found.skipped["can't be rendered"] += 1
        return
    room = text.meta.context_tokens - len(prompt)
    if not prompt or room < 1 or answer == ():
        found.skipped["too long" if room < 1 else "empty"] += 1
        return
    found.usable.append(Line(number, prompt, None if answer is None else answer[:room], params))


class _UnusableError(Exception):
    """A line teaches nothing; the message is a reason."""


def _numbered(path: Path, most: int, found: Lines) -> Iterator[tuple[int, dict[str, Any]]]:
    count = 0
    for number, line in _lines(path):
        value = _object(line)
        if value is None:
            found.skipped["no JSON objects"] += 1
            continue
        yield number, value
        count += 1
        if count == most:
            return


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that aren't blank."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise DistillError(f"Line {number} of {path.name} is longer than {MOST_LINE_BYTES >> 20} MiB.")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DistillError(f"{path} can't be read: {error.strerror or error}.") from error


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _prompt(body: Any, text: TextModel) -> tuple[int, ...]:
    if not isinstance(body, dict):
        raise _UnusableError("without a body")
    if body.get("tools") or (body.get("n") or 1) != 1:
        raise _UnusableError("with tools or several answers")
    messages, prompt = body.get("messages"), body.get("prompt")
    try:
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return tuple(text.tokenizer.encode(text.render(_chat(body, messages), **_variables(body, text))))
        if isinstance(prompt, str) and prompt:
            return tuple(text.tokenizer.encode_texts([prompt])[0])
    except (TypeError, AttributeError) as error:
        raise _UnusableError("can't be rendered") from error
    raise _UnusableError("without messages or a prompt")


def _chat(body: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a template is given them when the line is served: a message's body has its system prompt beside
    them."""
    system = body.get("system")
    chat = [{"role": "system", "content": system}, *messages] if system else messages
    if any(message.get("role") == "tool" or message.get("tool_calls") for message in chat):
        raise _UnusableError("with tools or several answers")
    return [{"role": _ROLES.get(str(role), role), "content": content} for role, content in map(_spoken, chat)]


def _spoken(message: dict[str, Any]) -> tuple[Any, Any]:
    return message.get("role"), message.get("content")


def _variables(body: dict[str, Any], text: TextModel) -> dict[str, Any]:
    """What else the template is given; what this teacher's doesn't know would be another prompt than the line's."""
    known = frozenset[str]() if text.template is None else text.template.variables
    given, config = body.get("chat_template_kwargs") or {}, body.get("output_config")
    effort = body.get("reasoning_effort") or (config.get("effort") if isinstance(config, dict) else None)
    if not isinstance(given, dict) or not given.keys() <= known:
        raise _UnusableError("with variables that the teacher's chat template doesn't know")
    if effort is None:
        return given
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort, **given}
    if "enable_thinking" in known:
        return {"enable_thinking": effort != "none", **given}
    if effort != "none":
        raise _UnusableError("with variables that the teacher's chat template doesn't know")
    return given


def _answer(result: Any, text: TextModel) -> tuple[int, ...]:
    """The tokens of an answer, its end included if the model ended it."""
    response = result.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    if result.get("error") or not isinstance(body, dict) or response.get("status_code", 200) != 200:
        raise _UnusableError("failed")
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    said = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not isinstance(said, str):
        raise _UnusableError("without an answer's text")
    ids = text.tokenizer.encode(said)
    end = text.tokenizer.token_id(text.meta.eos_token)
    ended_it = choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None  # no string of `stop` did
    if ended_it and end in text.meta.eos_ids:
        ids.append(int(end))
    return tuple(ids)


def _params(body: dict[str, Any], number: int) -> SamplingParams:
    """How a line without an answer is asked for; the seed is its number, so that a resumed run says the same."""
    most = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_ANSWER_TOKENS
    try:
        return SamplingParams(
            max_tokens=int(most),
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            seed=int(body.get("seed") or number),
            ignore_eos=body.get("ignore_eos") is True,
        )
    except (TypeError, ValueError, OverflowError, RequestError) as error:
        raise _UnusableError("with parameters that can't be run") from error
