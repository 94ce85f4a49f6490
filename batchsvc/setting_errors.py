"""What is told of a setting that can't be used: its variable, the value unless it is secret, and the way out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

_SHOWN_CHARS = 80
_MUST = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_parsing": "a number",
    "finite_number": "a number that is finite",
    "bool_parsing": "true or false",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:,g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:,g}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
}


def sentences(
    error: ValidationError, fields: Mapping[str, FieldInfo], variables: Mapping[str, str], secrets: Collection[str]
) -> dict[str, str]:
    """A sentence for each wrong setting, by field. `variables` are the names under which they were looked for."""
    return {
        name: _sentence(problem, variables[name], fields[name], is_secret=variables[name] in secrets)
        for problem in error.errors()
        for name in [_field_of(problem, fields, variables)]
    }


def named_ways(missing: str, example: str) -> str:
    """The sentence about a setting that has no default and isn't set."""
    return f"{missing} is not set: give it, such as {example}, or {missing}_FILE with the path of a file that holds it."


def check_url(value: str, begins: tuple[str, ...]) -> None:
    """Raises ValueError, without the value, for a URL that its client would choke on in the middle of the start."""
    if not value.startswith(begins):
        raise ValueError(f"it must begin with {' or '.join(begins)}")
    if value.startswith(("sqlite:", "unix:")):
        return
    if not value.isprintable() or " " in value:
        raise ValueError("a URL has no spaces and no control characters: write them as %20 and the like")
    try:
        parts = urlsplit(value)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(
            "its host and port can't be read: a / : @ ? # or [ in a password is written as %2F %3A %40 %3F %23 %5B"
        ) from error
    if not host and value.startswith(("http", "redis")):
        raise ValueError("it names no host")


def masked(value: str) -> str:
    """A value without its secrets: of a URL, the password and those of its parameters; anything else as a whole."""
    scheme, separator, rest = value.partition("://")
    if not separator:
        return "***"
    place, mark, query = rest.partition("?")
    login, at, host = place.rpartition("@")
    if at:
        user, colon, _ = login.partition(":")
        place = f"{user}{colon and ':***'}@{host}"
    query = re.sub(r"(?i)\b(\w*(?:password|secret|key))=[^&]*", r"\1=***", query)
    return f"{scheme}://{place}{mark}{query}"


def _field_of(problem: ErrorDetails, fields: Mapping[str, FieldInfo], variables: Mapping[str, str]) -> str:
    located = str(problem["loc"][0])
    if located in fields:
        return located
    return next(name for name, info in fields.items() if located in _aliases(info) or variables[name] == located)


def _aliases(info: FieldInfo) -> tuple[str, ...]:
    alias = info.validation_alias
    return tuple(map(str, getattr(alias, "choices", [alias])))


def _sentence(problem: ErrorDetails, variable: str, info: FieldInfo, *, is_secret: bool) -> str:
    if problem["type"] == "missing":
        return named_ways(variable, str((info.examples or [""])[0]))
    context: dict[str, Any] = problem.get("ctx", {})
    if problem["type"] == "value_error":  # says itself what is wrong; a URL's password must not get into a log
        return f"{variable} can't be used: {context['error']}."
    if problem["type"] == "string_pattern_mismatch":
        must = "as the description says"
    elif (phrase := _MUST.get(problem["type"])) is not None:
        must = phrase.format(**context)
    else:
        must = f"right ({problem['msg']})"
    given = "used" if is_secret else repr(str(problem["input"])[:_SHOWN_CHARS])
    return f"{variable} can't be {given}: it must be {must} ({info.description}{_default(info)})."


def _default(info: FieldInfo) -> str:
    """What leaving it out would mean, where that is a value and not told by the description anyway."""
    if info.default in (PydanticUndefined, None, ""):
        return ""
    return f"; unset, it is {info.default}"
