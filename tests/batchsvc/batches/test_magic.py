"""Magic prompts are read from whatever shape of body, and only where they stand alone in the first line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc import mode
from batchsvc.batches import magic
from batchsvc.batches.magic import FAIL_CODES, Magic
from batchsvc.files.envelope import CheckedRecord, Line
from engine.errors import RequestError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("test:slow 2.5", Magic("slow", value=2.5)),
        (" test:flaky 2 \nand a prompt", Magic("flaky", value=2.0)),
        ("test:expire", Magic("expire")),
        ("test:expire\n", Magic("expire")),
        ("test:refuse unsupported_parameter", Magic("refuse", code="unsupported_parameter")),
        ("test:invalid invalid_json", Magic("invalid", code="invalid_json")),
        *((f"test:fail {code}", Magic("fail", code=code)) for code in FAIL_CODES),
        ("Say test:expire", None),
        ("test:other 3", None),
        ("test:expire now please", None),
        ("", None),
    ],
)
def test_a_spell_is_the_first_line_of_a_prompt(text: str, found: Magic | None) -> None:
    assert magic.parse(text) == found


@pytest.mark.parametrize(
    "text",
    ["test:slow", "test:slow x", "test:slow 99999", "test:flaky 9", "test:fail oops", "test:refuse NO", "test:fail"],
)
def test_a_misspelt_spell_is_refused_because_it_would_test_nothing(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        magic.parse(text)
    assert refused.value.code == "invalid_value"


@given(st.text(max_size=80))
def test_no_text_breaks_it(text: str) -> None:
    try:
        magic.parse(text)
    except RequestError:
        assert text.lstrip().startswith("test:")


def test_a_line_and_a_call_fail_each_by_its_own_codes() -> None:
    for code in FAIL_CODES:
        body = {"messages": [{"role": "user", "content": f"test:fail {code}"}]}
        for codes in (magic.LINE_CODES, magic.CALL_CODES):
            if code in codes:
                assert magic.params_of(body, codes) == {"magic": f"test:fail {code}"}
            else:
                with pytest.raises(RequestError, match=f"here, not '{code}'"):
                    magic.params_of(body, codes)


SPELL = "test:expire"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": SPELL}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": SPELL}]}]},
        {"messages": [{"role": "user", "content": SPELL}, {"role": "assistant", "content": "x"}]},
        {"prompt": SPELL},
        {"prompt": [SPELL, "other"]},
        {"input": SPELL},
        {"input": [SPELL, "other"]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": SPELL}]}]},
    ],
)
def test_it_is_found_in_every_shape_of_body(body: dict[str, Any]) -> None:
    assert magic.prompt_of(body) == SPELL
    assert magic.params_of(body) == {"magic": SPELL}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "x"},
        {"messages": [1]},
        {"prompt": [1, 2]},
        {"input": None},
        {"messages": [{"role": "user"}]},
    ],
)
def test_a_body_without_a_text_has_none(body: dict[str, Any]) -> None:
    assert magic.params_of(body) == {}


def test_a_line_that_asks_for_a_broken_envelope_has_one() -> None:
    body = {"messages": [{"role": "user", "content": "test:invalid duplicate_custom_id"}]}
    line = Line(line_no=3, custom_id="a", body=body, model_id="m")
    record = CheckedRecord(line_no=3, next_offset=9, custom_id="a", line=line)
    good = CheckedRecord(line_no=4, next_offset=19, custom_id="b")
    broken, same = magic.checked([record, good])
    assert broken.line is None
    assert [(problem.line, problem.code) for problem in broken.problems] == [(3, "duplicate_custom_id")]
    assert same is good


def test_the_mode_of_a_project_is_told_by_its_id() -> None:
    twin = mode.twin_of("proj_abc")
    assert twin == "proj_test_abc"
    assert mode.is_test(twin)
    assert mode.twin_of(twin) == twin
    assert not mode.is_test("proj_abc")
    assert not mode.is_test("proj_testabc")
    assert not mode.is_test(None)
    assert mode.served_by(twin, "d") == mode.DIGEST
    assert mode.served_by("proj_abc", "d") == "d"
