"""What form an answer must have, as one canonical string, and its translation for llguidance.

A spec is a JSON object with one key that says its kind:

    {"json": {…}}       a JSON schema; {"type": "object"} for any object
    {"regex": "…"}      a regular expression of Rust's regex crate, for the whole answer
    {"choice": ["…"]}   one of these texts
    {"grammar": "…"}    a grammar in llguidance's Lark dialect, or GBNF; {"lark": "…"}: surely Lark

Equal specs are equal strings, so that each is compiled once. Nothing is ever fetched: a schema that refers to an
address is refused. JSON is written on one line as `json.dumps` does by default: white space without end is what small
models fall into, and no schema can forbid it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from engine.errors import GrammarError as GrammarError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SPEC_CHARS = 128 * 1024
MAX_DEPTH = 64
LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
"""Of one grammar: some 100 MB and 30 ms to compile at worst; the step limits of the library bound each mask."""

JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPTIONS: JsonCompileOptions = {**JSON_FORM, "lenient": False, "coerce_one_of": False}
_MAX_REASON_CHARS = 300


def spec_of(kind: str, value: Any) -> str:
    """The canonical string; the order of a schema's properties stays, because answers follow it. Raises GrammarError
    for one that is too large or too deep to be looked at."""
    if _depth_exceeds(value, MAX_DEPTH):
        raise GrammarError(f"it is nested more than {MAX_DEPTH} levels deep")
    spec = json.dumps({kind: value}, ensure_ascii=False, separators=(",", ":"))
    if len(spec) > MAX_SPEC_CHARS:
        raise GrammarError(f"it has {len(spec)} characters; at most {MAX_SPEC_CHARS} are compiled")
    return spec


@lru_cache(maxsize=256)
def reason_against(spec: str) -> str:
    """Why a spec can't be compiled; "" if it can. Takes milliseconds, whatever the spec."""
    try:
        grammar = to_grammar(spec)
    except GrammarError as error:
        return str(error)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return as_reason(messages[0]) if is_error else ""


def to_grammar(spec: str) -> str:
    """The grammar in llguidance's own form. Raises GrammarError when it can't be translated."""
    ((kind, value),) = json.loads(spec).items()
    try:
        if kind == "json":
            return LLMatcher.grammar_from_json_schema(value, overrides=_OPTIONS)  # after options in the schema itself
        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "lark":
            return LLMatcher.grammar_from_lark(value)
        if kind == "choice":
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            )
        return LLMatcher.grammar_from_lark(any_to_lark(value))
    except Exception as error:  # the library's readers raise plain exceptions of several kinds
        raise GrammarError(as_reason(str(error))) from error


def as_reason(message: str) -> str:
    """A message of the library as the end of a sentence."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return (text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…").rstrip(".")


def _depth_exceeds(value: Any, most: int) -> bool:
    """Level by level, so that depth itself costs no stack."""
    level = [value]
    for _ in range(most + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return False
        level = inner
    return True
