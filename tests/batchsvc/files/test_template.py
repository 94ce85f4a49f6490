"""Templates: what is filled in is what was written, whatever braces it has; the static part moves only as a whole."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.files.template import NoTextError, Template, TemplateError, parse, text_of

NAMES = st.text(st.characters(exclude_characters="{}"), max_size=8)


@given(st.lists(st.tuples(NAMES, st.text(max_size=10)), max_size=4), st.text(max_size=10), st.data())
def test_a_template_is_read_as_it_was_meant(parts: list[tuple[str, str]], first: str, data: st.DataObject) -> None:
    template = Template((first, *(text for _, text in parts)), tuple(name for name, _ in parts))
    assert parse(str(template)) == template
    values = [data.draw(st.text(max_size=5)) for _ in parts]
    expected = first + "".join(value + text for value, (_, text) in zip(values, parts, strict=True))
    assert template.fill(values) == expected


@pytest.mark.parametrize("text", ["{a", "a}", "{a}}", "{{a}", "}"])
def test_a_lone_brace_is_refused(text: str) -> None:
    with pytest.raises(TemplateError, match="brace of the text"):
        parse(text)


def test_json_in_a_prompt_is_written_with_double_braces() -> None:
    template = parse('Answer as {{"label": "..."}}: {review.text}')
    assert template.columns == ("review.text",)
    assert template.fill(["{x}"]) == 'Answer as {"label": "..."}: {x}'


def test_static_first_moves_what_stands_after_the_last_column() -> None:
    template = parse("{product}: {review}\n\nIs this praise? Answer yes or no.")
    assert template.unshared == "Is this praise? Answer yes or no."
    assert str(template.static_first()) == "Is this praise? Answer yes or no.\n\n{product}: {review}"
    for fixed in ("Classify: {review}", "no column", "{a} \n"):
        assert parse(fixed).static_first() == parse(fixed)
        assert not parse(fixed).unshared


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("007", "007"),
        (7, "7"),
        (True, "true"),
        (1.5, "1.5"),
        (Decimal("0.10"), "0.10"),
        ([1, {"a": None}], '[1,{"a":null}]'),
        (b"caf\xc3\xa9", "café"),
    ],
)
def test_values_as_text(value: Any, text: str) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize("value", [None, math.nan, b"\xff"])
def test_what_has_no_text_is_told(value: Any) -> None:
    with pytest.raises(NoTextError):
        text_of(value)
