"""Inputs 1 to 10, 14 and 15: lines that are odd, and lines that are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.batchsvc.batches.planned import URL, jsonl, line
from tests.batchsvc.batches.test_formats import in_csv
from tests.inputs.service import Problem, Service

BOM = b"\xef\xbb\xbf"
SKIP = {"on_invalid": "skip"}


def raw(custom_id: str, text: str = "Where is it?", **body: Any) -> bytes:
    """A good line without its end, its text as it is."""
    return json.dumps(line(custom_id, text, **{"seed": 1} | body), ensure_ascii=False).encode()


def test_input_01_byte_order_marks(running: Service) -> None:
    """The first is dropped; so are later ones, and they are noted. No number shifts."""
    data = BOM + raw("a") + b"\n" + BOM + b"\n" + BOM + raw("b") + b"\n" + raw("c") + b"\n" + BOM + b"{nonsense\n"
    ended = running.run(data, **SKIP)
    assert {number: row["custom_id"] for number, row in ended.output.items()} == {1: "a", 3: "b", 4: "c"}
    assert ended.codes == {5: "invalid_json_line"}
    noted = ended.batch["warnings"]["data"]
    assert [(note["line"], note["code"]) for note in noted] == [(3, "byte_order_mark"), (5, "byte_order_mark")]
    assert running.run(BOM + raw("a")).batch["warnings"] is None


def test_input_02_carriage_returns_and_no_last_line_end(running: Service) -> None:
    """The same records as with plain line ends, in number, in id and in text."""
    lines = [raw("a", "one\r\ntwo"), raw("b", "two\rthree"), raw("c")]
    odd, plain = running.run(b"\r\n".join(lines)), running.run(b"\n".join(lines) + b"\n")
    assert odd.batch["request_counts"] == plain.batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert odd.texts == plain.texts
    assert odd.batch["usage"] == plain.batch["usage"]


def test_input_03_blank_lines(running: Service) -> None:
    """Skipped and not counted; the number of a line is that in the file."""
    data = b"\n" + raw("a") + b"\n\n \t\r\n\t\n" + raw("b") + b"\n[]\n" + raw("c") + b"\n\n  \n"
    ended = running.run(data, **SKIP)
    assert {number: row["custom_id"] for number, row in ended.output.items()} == {2: "a", 6: "b", 8: "c"}
    assert ended.codes == {7: "expected_object"}
    assert ended.batch["request_counts"]["total"] == 4


def test_input_04_characters_that_end_lines_elsewhere(running: Service) -> None:
    """Only a line feed ends a line. In the output such characters are escaped: no client's reader is cut."""
    seps = "a\u2028b\u2029c\u0085d"
    ended = running.run(raw(seps, seps) + b"\n" + raw("plain", "abcd") + b"\n")
    assert [row["custom_id"] for row in ended.output.values()] == [seps, "plain"]
    content = running.content(ended.batch["output_file_id"])
    assert not {"\u2028", "\u2029", "\x85"} & set(content.decode())
    one, other = (body["usage"]["prompt_tokens"] for body in ended.answers.values())
    assert one > other, "they reach the tokenizer"
    for control in (b"\x0b", b"\x0c", b"\x1e", b"\x00"):
        assert running.refusal(raw("a").replace(b"Where", control)) == [(1, "invalid_json_line", None)]


def test_input_05_ids_that_are_equal_or_nearly(running: Service) -> None:
    same = running.start(raw("a") + b"\n" + raw("b") + b"\n\n" + raw("a") + b"\n")
    (problem,) = running.shown(same)["errors"]["data"]
    assert (problem["line"], problem["code"], problem["param"]) == (4, "duplicate_custom_id", "custom_id")
    assert "line 4 " in problem["message"] and "line 1 " in problem["message"]
    ids = ["caf\u00e9", "cafe\u0301", "Caf\u00e9", "caf\u00e9 ", " caf\u00e9"]
    ended = running.run(b"\n".join(map(raw, ids)))
    assert [row["custom_id"] for row in ended.output.values()] == ids, "bytes are compared, nothing is normalized"


@pytest.mark.parametrize("custom_id", [123, 1.0, True, None, [], {}])
def test_input_06_ids_of_other_types(running: Service, custom_id: Any) -> None:
    assert running.refusal(jsonl(line(custom_id))) == [(1, "invalid_type", "custom_id")]


def test_input_06_odd_ids(running: Service) -> None:
    """Empty and endless ones are refused; any other text comes back as it was."""
    odd = [
        "007",
        "x" * 65,
        "x" * 512,
        "\U0001f600\U0001f468\u200d\U0001f469",
        "a\nb",
        " ",
        "../../etc/passwd",
        "\u202e",
        '"',
    ]
    ended = running.run(jsonl(*map(line, odd)))
    assert [row["custom_id"] for row in ended.output.values()] == odd
    refused: list[Problem] = [(number, "invalid_value", "custom_id") for number in (1, 2)]
    assert running.refusal(jsonl(line(""), line("x" * 513))) == refused


def test_input_07_a_key_that_stands_twice(running: Service) -> None:
    """Two readers of such a line may see two requests, so nobody runs it."""
    whole = raw("a").decode()
    twice = [
        whole.replace('"custom_id": "a"', '"custom_id": "a", "custom_id": "b"'),
        whole.replace('"max_tokens"', '"model": "tiny", "max_tokens"'),
        whole.replace('"role": "user"', '"role": "user", "r\\u006fle": "system"'),
    ]
    ended = running.run("\n".join([*twice, raw("good").decode()]).encode(), **SKIP)
    assert ended.codes == dict.fromkeys((1, 2, 3), "invalid_json_line")
    assert "twice" in ended.errors[3]["error"]["message"]
    assert list(ended.texts) == ["good"]


def test_input_08_numbers_that_json_has_not(running: Service) -> None:
    for constant in ("NaN", "Infinity", "-Infinity", "01", "1.", ".5", "0x10"):
        data = raw("a", temperature=0.5).replace(b"0.5", constant.encode())
        assert running.refusal(data) == [(1, "invalid_json_line", None)], constant


def test_input_08_numbers_that_nobody_can_hold(running: Service) -> None:
    """Valid JSON: the field is named, and the line alone pays, however it is uploaded."""
    fields = {"temperature": "1e400", "top_p": "-1e999", "seed": "1" + "0" * 30, "max_tokens": "9" * 400}
    lines = [raw(name, **{name: 7}).replace(b": 7", f": {number}".encode()) for name, number in fields.items()]
    bias = raw("bias", logit_bias={"5": 7}).replace(b": 7", b": 1e400")
    ignored = raw("note", metadata={"a": [1, 7]}).replace(b"7]", b"1e400]")
    zero = raw("zero", temperature=7).replace(b": 7", b": -0")
    ended = running.run(b"\n".join([*lines, bias, ignored, zero]))
    params = [*fields, "logit_bias.5", "metadata.a[1]"]
    assert ended.refusals == {number: ("invalid_value", param) for number, param in enumerate(params, start=1)}
    assert list(ended.texts) == ["zero"]
    table = in_csv([line("a", temperature=7), line("b")]).replace(b'""temperature"": 7', b'""temperature"": 1e400')
    assert running.run(table).refusals == {1: ("invalid_value", "temperature")}
    assert running.refusal(raw("7").replace(b'"7"', b"1e400")) == [(1, "invalid_type", "custom_id")]


def test_input_09_half_characters_and_nul(running: Service) -> None:
    """A prompt that is no text costs its line alone, an id that is none the file; or both their lines, if that is asked
    for. On both databases: test_hostile_inputs.py."""
    half = raw("half", "x").replace(b'"x"', b'"\\ud800"')
    half_id = raw("?").replace(b'"?"', b'"\\udfff"')
    data = b"\n".join(
        [half, half_id, jsonl(line("nul\0")).strip(), raw("good", "nul \0 in the text"), raw("pair", "\U0001f600")]
    )
    ended = running.run(data, **SKIP)
    answers = {number: row["response"] for number, row in ended.errors.items()}
    assert (answers[1]["status_code"], answers[2], answers[3]) == (400, None, None)
    assert answers[1]["body"]["error"]["param"] == "messages[0].content"
    assert set(ended.texts) == {"good", "pair"}
    assert running.refusal(data) == [(2, "invalid_value", "custom_id"), (3, "invalid_value", "custom_id")]
    alone = running.run(half + b"\n" + raw("good"))
    assert (alone.refusals, list(alone.texts)) == ({1: ("invalid_value", "messages[0].content")}, ["good"])


def test_input_10_json_that_is_no_request(running: Service) -> None:
    """One clear error a line."""
    pretty = json.dumps(line("p"), indent=1).encode()
    odd = [b"[]", b'"x"', b"null", b"42", raw("a") + raw("b"), raw("a") + b" {}"]
    data = b"\n".join([*odd, pretty, raw("good")])
    num_bad = len(odd) + pretty.count(b"\n") + 1
    ended = running.run(data, **SKIP)
    assert list(ended.codes) == list(range(1, num_bad + 1))
    assert [ended.codes[number] for number in range(1, 7)] == ["expected_object"] * 4 + ["invalid_json_line"] * 2
    assert list(ended.texts) == ["good"]
    assert [number for number, _, _ in running.refusal(data)] == list(range(1, num_bad + 1))


def test_input_14_addresses_and_methods(running: Service) -> None:
    """Only the exact path and exactly POST; what was seen is said."""
    urls = [
        "v1/chat/completions",
        f"{URL}/",
        f"{URL}?x=1",
        f"/evil{URL}",
        f"https://evil.example{URL}",
        URL.upper(),
        "",
    ]
    methods = ["post", "GET", "POST ", None]
    lines = [line(f"u{url}") | {"url": url} for url in urls] + [line(f"m{name}") | {"method": name} for name in methods]
    batch = running.shown(running.start(jsonl(*lines)))
    problems = batch["errors"]["data"]
    want = ["url_mismatch"] * len(urls) + ["invalid_method"] * len(methods)
    assert [problem["code"] for problem in problems] == want
    assert [problem["line"] for problem in problems] == list(range(1, len(lines) + 1))
    for problem, seen in zip(problems, [*urls, *methods], strict=True):
        assert json.dumps(seen) in problem["message"]
    assert list(running.run(jsonl(*lines, line("good")), **SKIP).texts) == ["good"]


def test_input_15_models_that_differ_or_are_missing(running: Service) -> None:
    nameless = line("d")
    del nameless["body"]["model"]
    lines = [line("a"), line("b", model="second"), line("c", model="gpt-9"), nameless, line("e", model="tiny")]
    assert running.refusal(jsonl(*lines)) == [
        (2, "model_mismatch", "body.model"),
        (3, "model_not_found", "body.model"),
        (4, "missing_required_parameter", "body.model"),
    ]
    ended = running.run(jsonl(*lines), **SKIP)
    assert ended.codes == {2: "model_mismatch", 3: "model_not_found", 4: "missing_required_parameter"}
    assert list(ended.texts) == ["a", "e"]
