"""Templates: a prompt with names of columns in braces, filled in for every row. Pure.

`{review}` is the value of the column `review`, whatever else stands between the braces is a name, too; `{{` and `}}`
are braces of the text. Nothing else is special: no formats, no attributes. Text stays as it is, other values are
written as in JSON, dates in ISO 8601. A null (or NaN) has no text: its row can't be filled in.

Requests share what they have in common at their beginning. The text before the first column is shared as it stands;
text after the last one is computed for every row, unless it is put first, which only the user can decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson


class TemplateError(ValueError):
    """The template can't be used; the message says why in one sentence."""


class NoTextError(ValueError):
    """A value that has no text."""


@dataclass(frozen=True, slots=True)
class Template:
    """Text around columns: one piece more than columns."""

    texts: tuple[str, ...]
    columns: tuple[str, ...]

    def fill(self, values: Sequence[str]) -> str:
        """The prompt of a row, from the texts of its columns."""
        filled = [self.texts[0]]
        for value, text in zip(values, self.texts[1:], strict=True):
            filled += (value, text)
        return "".join(filled)

    @property
    def unshared(self) -> str:
        """The text after the last column, if it says something."""
        return self.texts[-1].strip() if self.columns else ""

    def static_first(self) -> Template:
        """The same with the text after the last column put first, as a paragraph of its own."""
        if not self.unshared:
            return self
        first = f"{self.unshared}\n\n{self.texts[0]}"
        return Template((first, *self.texts[1:-1], ""), self.columns)

    def __str__(self) -> str:
        escaped = [text.replace("{", "{{").replace("}", "}}") for text in self.texts]
        return escaped[0] + "".join(f"{{{name}}}{text}" for name, text in zip(self.columns, escaped[1:], strict=True))


def parse(text: str) -> Template:
    """Reads a template. Raises TemplateError."""
    texts, columns = [""], list[str]()
    at = 0
    while at < len(text):
        character = text[at]
        if text[at : at + 2] in ("{{", "}}"):
            texts[-1] += character
            at += 2
        elif character == "}":
            raise TemplateError("The template has a } without a {: write }} for a brace of the text.")
        elif character == "{":
            end = text.find("}", at)
            if end < 0:
                raise TemplateError("The template has a { without a }: write {{ for a brace of the text.")
            columns.append(text[at + 1 : end])
            texts.append("")
            at = end + 1
        else:
            end = min((found for mark in "{}" if (found := text.find(mark, at)) >= 0), default=len(text))
            texts[-1] += text[at:end]
            at = end
    return Template(tuple(texts), tuple(columns))


def text_of(value: Any) -> str:
    """How a value of a column is written into a prompt. Raises NoTextError for one that is missing."""
    match value:
        case str():
            return value
        case None:
            raise NoTextError
        case float() if math.isnan(value):
            raise NoTextError
        case Decimal():
            return format(value, "f")
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise NoTextError from None
        case _:
            return json_text(value)


def json_text(value: Any) -> str:
    """Any value as JSON; what JSON doesn't know as text."""
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
