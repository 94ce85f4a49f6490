"""Magic prompts of test mode: what a line of a test key asks to happen to it, in the first line of its prompt.

    test:slow SECONDS    answered after so long
    test:fail CODE       an error line with this code, as an engine or what guards it gives it; of a call, its error
    test:flaky N         fails N times first, and is then answered: 3 is an error line
    test:expire          never answered; its batch expires some seconds after it began
    test:refuse CODE     refused for its parameters: an error line with status 400 that never ran
    test:invalid CODE    a broken envelope: fails its batch, or with on_invalid: skip costs its line

Anything else is answered as usual. The prompt is the last message of the user, the first prompt or the first input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from batchsvc.files.envelope import CheckedRecord
from batchsvc.files.lines import Problem
from engine.errors import RequestError

Verb = Literal["slow", "fail", "flaky", "expire", "refuse", "invalid"]
PARAM = "magic"
"""Where a unit row's parameters say what an engine of test mode has to do."""
MOST_SLOW_S = 3_600.0
EXPIRES_IN_S = 5.0
_ENGINE_CODES = (
    "engine_error",
    "invalid_logits",
    "kv_capacity_exceeded",
    "context_length_exceeded",
    "grammar_not_usable",
    "invalid_value",
)
LINE_CODES = (*_ENGINE_CODES, "budget_exceeded", "poison")
"""What `test:fail` knows in a batch: how a line can end there that has a plan."""
CALL_CODES = (*_ENGINE_CODES, "too_many_calls", "no_worker", "worker_lost")
"""What `test:fail` knows in a call."""
FAIL_CODES = tuple(dict.fromkeys(LINE_CODES + CALL_CODES))
_SPELL = re.compile(r"\s*test:(slow|fail|flaky|expire|refuse|invalid)(?:[ \t]+(\S{1,64}))?[ \t]*(?:\n|\Z)")
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_AT_ENGINE = ("slow", "fail", "flaky", "expire")


@dataclass(frozen=True, slots=True)
class Magic:
    """What was asked for. `value` is the number of `slow` and `flaky`, `code` that of the others."""

    verb: Verb
    value: float = 0.0
    code: str = ""


def parse(text: str) -> Magic | None:
    """The magic of a prompt, or None. Raises RequestError for one that is misspelt: it would test nothing."""
    found = _SPELL.match(text)
    if found is None:
        return None
    verb, word = cast(Verb, found[1]), found[2] or ""
    match verb:
        case "expire":
            return Magic(verb)
        case "slow" | "flaky":
            most = MOST_SLOW_S if verb == "slow" else 3
            if not re.fullmatch(r"\d{1,4}(\.\d{1,3})?", word, re.ASCII) or float(word) > most:
                raise _wrong(f"test:{verb} takes a number up to {most:g}, not {word!r}.")
            return Magic(verb, value=float(word))
        case "fail":
            if word not in FAIL_CODES:
                raise _wrong(f"test:fail knows {', '.join(FAIL_CODES)}, not {word!r}.")
            return Magic(verb, code=word)
        case "refuse" | "invalid":
            if not _CODE.fullmatch(word):
                raise _wrong(f"test:{verb} takes a code such as invalid_value, not {word!r}.")
            return Magic(verb, code=word)


def prompt_of(body: dict[str, Any]) -> str:
    """The text of a body in which magic stands: of a chat's last message of the user, of the first prompt or input."""
    messages = body.get("messages") or body.get("input")
    if isinstance(messages, list) and any(isinstance(one, dict) for one in messages):
        said = [one for one in messages if isinstance(one, dict) and one.get("role") == "user"]
        return _text_of(said[-1].get("content")) if said else ""
    return _text_of(body.get("prompt") or body.get("input"))


def params_of(body: dict[str, Any], codes: tuple[str, ...] = LINE_CODES) -> dict[str, Any]:
    """What a line's parameters get in addition; `codes` are those by which it can fail. Raises RequestError for a line
    that asks to be refused."""
    text = prompt_of(body)
    magic = parse(text)
    if magic is None:
        return {}
    if magic.verb == "fail" and magic.code not in codes:
        raise _wrong(f"test:fail knows {', '.join(codes)} here, not {magic.code!r}.")
    if magic.verb == "refuse":
        raise RequestError("A prompt of test mode asked for this refusal.", code=magic.code, param="messages")
    if magic.verb not in _AT_ENGINE:
        return {}
    return {PARAM: text.lstrip().partition("\n")[0].strip()}


def checked(records: Iterable[CheckedRecord]) -> Iterator[CheckedRecord]:
    """The records of a file, those that ask for a broken envelope with a problem of it."""
    for record in records:
        yield _broken(record) if record.line is not None else record


def _broken(record: CheckedRecord) -> CheckedRecord:
    assert record.line is not None, "only a line has a body"
    try:
        magic = parse(prompt_of(record.line.body))
    except RequestError:  # told where its parameters are read
        return record
    if magic is None or magic.verb != "invalid":
        return record
    says = "A prompt of test mode asked for this problem."
    return replace(
        record, line=None, problems=[Problem(line=record.line_no, code=magic.code, message=says, param=None)]
    )


def _text_of(content: Any) -> str:
    if isinstance(content, list) and content:
        content = content[0]
    if isinstance(content, dict):
        content = content.get("text")
    return content if isinstance(content, str) else ""


def _wrong(says: str) -> RequestError:
    return RequestError(says, code="invalid_value", param="messages")
