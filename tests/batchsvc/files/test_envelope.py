"""The envelope check finds everything that is wrong, in order, and remembers ids over windows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.files.envelope import CheckedRecord, EnvelopeCheck, SeenIds
from batchsvc.files.lines import Record

URL = "/v1/chat/completions"
MODELS = {"m": "m", "alias-of-m": "m", "other": "other"}


def checker(**options: Any) -> EnvelopeCheck:
    return EnvelopeCheck(**({"endpoint": URL, "resolve": MODELS.get, "seen": SeenIds()} | options))


def record(line_no: int = 1, **changes: Any) -> Record:
    value = {"custom_id": f"id{line_no}", "method": "POST", "url": URL, "body": {"model": "m"}} | changes
    value = {key: item for key, item in value.items() if item is not ...}
    return Record(line_no=line_no, next_offset=line_no, value=value)


def found(checked: CheckedRecord) -> list[tuple[str, str | None]]:
    return [(problem.code, problem.param) for problem in checked.problems]


def test_a_good_line_passes_and_settles_the_model() -> None:
    check = checker()
    checked = check.check(record(body={"model": "alias-of-m", "n": 1}))
    assert checked.line is not None
    assert checked.line.body == {"model": "alias-of-m", "n": 1}
    assert check.model_id == "m"


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": ...}, "missing_required_parameter", "custom_id"),
        ({"custom_id": 123}, "invalid_type", "custom_id"),
        ({"custom_id": None}, "invalid_type", "custom_id"),
        ({"custom_id": True}, "invalid_type", "custom_id"),
        ({"custom_id": ""}, "invalid_value", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({"custom_id": "a\x00b"}, "invalid_value", "custom_id"),
        ({"custom_id": "a\ud800"}, "invalid_value", "custom_id"),
        ({"method": ...}, "missing_required_parameter", "method"),
        ({"method": "post"}, "invalid_method", "method"),
        ({"method": ["POST"]}, "invalid_method", "method"),
        ({"url": ...}, "missing_required_parameter", "url"),
        ({"url": "v1/chat/completions"}, "url_mismatch", "url"),
        ({"url": URL + "/"}, "url_mismatch", "url"),
        ({"url": URL + "?x=1"}, "url_mismatch", "url"),
        ({"url": "/evil" + URL}, "url_mismatch", "url"),
        ({"body": ...}, "missing_required_parameter", "body"),
        ({"body": "text"}, "invalid_type", "body"),
        ({"body": {}}, "missing_required_parameter", "body.model"),
        ({"body": {"model": 3}}, "invalid_type", "body.model"),
        ({"body": {"model": "unknown"}}, "model_not_found", "body.model"),
    ],
)
def test_each_wrong_field_is_named(changes: dict[str, Any], code: str, param: str) -> None:
    checked = checker().check(record(**changes))
    assert checked.line is None
    assert found(checked) == [(code, param)]
    assert checked.problems[0].line == 1


@pytest.mark.parametrize("custom_id", ["007", "x" * 512, "a\nb", "\U0001f600", " ", "e\u0301"])
def test_unusual_ids_are_kept_as_they_are(custom_id: str) -> None:
    checked = checker().check(record(custom_id=custom_id))
    assert checked.line is not None
    assert checked.line.custom_id == custom_id


def test_everything_wrong_with_a_line_is_listed() -> None:
    checked = checker().check(record(custom_id=..., method="GET", url="/x", body={}))
    assert found(checked) == [
        ("missing_required_parameter", "custom_id"),
        ("invalid_method", "method"),
        ("url_mismatch", "url"),
        ("missing_required_parameter", "body.model"),
    ]
    assert '"/x"' in checked.problems[2].message


def test_one_file_is_one_model_and_only_a_good_line_settles_it() -> None:
    check = checker()
    assert found(check.check(record(1, url="/x", body={"model": "other"}))) == [("url_mismatch", "url")]
    assert check.model_id is None
    assert check.check(record(2)).line is not None
    assert found(check.check(record(3, body={"model": "other"}))) == [("model_mismatch", "body.model")]
    assert check.check(record(4, body={"model": "alias-of-m"})).line is not None


def test_a_model_given_by_the_batch_overrides_the_lines() -> None:
    check = checker(model_id="m", is_model_given=True)
    assert check.check(record(1, body={"model": "gpt-9"})).line is not None
    assert check.check(record(2, body={})).line is not None


def test_a_duplicate_names_both_lines_even_across_windows() -> None:
    seen = SeenIds()
    seen.add_finished([1, 2, 3], ["a", None, "b"])
    seen.add_finished([5, 6], ["c", "a"])
    check = checker(seen=seen)
    for line, custom_id, first in ((8, "a", 1), (9, "c", 5), (10, "d", None), (11, "d", 10), (12, "D", None)):
        checked = check.check(record(line, custom_id=custom_id))
        if first is None:
            assert checked.line is not None
        else:
            assert found(checked) == [("duplicate_custom_id", "custom_id")]
            assert f"line {line} " in checked.problems[0].message
            assert f"line {first} " in checked.problems[0].message


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=6), max_size=5))
def test_seen_ids_equal_a_dictionary(windows: list[list[str]]) -> None:
    first: dict[str, int] = {}
    finished: list[tuple[list[int], list[str | None]]] = []
    line = 0
    for window in windows:
        seen = SeenIds()
        for line_nos, ids in finished:
            seen.add_finished(line_nos, ids)
        numbers: list[int] = []
        for custom_id in window:
            line += 1
            numbers.append(line)
            assert seen.first_use(custom_id, line) == first.get(custom_id)
            first.setdefault(custom_id, line)
        finished.append((numbers, list(window)))
