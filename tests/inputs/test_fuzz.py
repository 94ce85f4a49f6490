"""Whatever stands around it, a good line comes out with its number, and nothing that is wrong is an error of ours.

Laws only: which of them a random line reaches is asserted nowhere. A minute of it, or FUZZ_S seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchsvc.batches import endpoints, window
from batchsvc.batches.message_body import MESSAGES, parse_message
from batchsvc.batches.window import WindowDraft
from batchsvc.files.envelope import EnvelopeCheck, SeenIds
from batchsvc.files.lines import Record, jsonl_records
from batchsvc.files.rows import problem_line, row_line, row_records, too_long
from engine.text import TextModel, load_text
from tests.inputs.service import Service

FUZZ_S = float(os.environ.get("FUZZ_S", "60"))
"""Of all three laws together."""
fuzzed = pytest.mark.timeout(FUZZ_S + 300)
MOST_LINE_BYTES = 4_000
BOM = b"\xef\xbb\xbf"
LIMITS = window.Limits(
    window_lines=1_000, window_tokens=1 << 40, lines_left=1_000, max_problems=1_000, default_max_tokens=16
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 8}
GOOD: dict[str, dict[str, Any]] = {
    endpoints.CHAT: CHAT | {"temperature": 0, "stop": ["x"], "logit_bias": {"5": 1}, "seed": 3},
    endpoints.COMPLETIONS: {"prompt": ["Where?"], "max_tokens": 3, "n": 2, "logprobs": 1},
    endpoints.EMBEDDINGS: {"input": ["Where?", "Here."], "dimensions": 8},
    endpoints.RESPONSES: {"input": [{"role": "user", "content": "Where?"}], "max_output_tokens": 8},
    MESSAGES: CHAT,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
NAMES = sorted(
    {name for body in GOOD.values() for name in body}
    | {"model", "tools", "tool_choice", "response_format", "top_logprobs", "top_p", "top_k", "min_p", "min_tokens"}
    | {"stop_token_ids", "guided_json", "guided_regex", "structured_outputs", "reasoning_effort", "instructions"}
    | {"text", "system", "stop_sequences", "chat_template_kwargs", "max_completion_tokens", "metadata", "stream"}
    | {"presence_penalty", "repetition_penalty", "encoding_format", "echo", "best_of", "suffix", "prompt_cache_key"}
)
ODD: list[Any] = [
    *(None, True, -1, 0, 2**31, 2**64, 10**30, 1e300, -0.0, float("nan"), float("inf"), "@big", "", "\0", "\ud800"),
    *("x" * 600, "\u2028\x85", "\ufeff", [], {}, [[]], [{}], {"": None}, [[5, 6], [7]], [0], TOOL, [TOOL], "auto"),
    *({"type": "json_object"}, {"type": "text"}, {"role": "user"}, [{"role": "tool", "content": None}]),
    *({"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": ["string"]}}}, {"format": {}}),
]
VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner),
    max_leaves=5,
)
EDITS = st.lists(
    st.tuples(
        st.integers(0, 400), st.integers(0, 3), st.binary(max_size=3) | st.sampled_from([BOM, b'"', b"{", b"1e400"])
    ),
    max_size=3,
)


class Row(NamedTuple):
    """A row of a table, and how many bytes it is said to have."""

    custom_id: str | None
    body: str | None
    size: int = 10
    is_good: bool = False


class Fuzzed(NamedTuple):
    """A file of one endpoint. `good`: the ids of lines that must come out, by their numbers."""

    endpoint: str
    data: bytes
    good: dict[int, str]


def request(endpoint: str, custom_id: str) -> dict[str, Any]:
    body = {"model": "tiny", **GOOD[endpoint]}
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


@st.composite
def bad_lines(draw: st.DrawFn, endpoint: str) -> bytes:
    """A request with odd values in odd places, cut and spliced."""
    made = request(endpoint, "bad")
    made["body"] |= draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
    made |= draw(st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body", "x"]), VALUES, max_size=1))
    text = json.dumps(made, ensure_ascii=draw(st.booleans())).replace('"@big"', "1e400")
    data = text.encode(errors="surrogatepass")
    for place, dropped, added in draw(EDITS):
        at = place % (len(data) + 1)
        data = data[:at] + added + data[at + dropped :]
    return data


@st.composite
def files(draw: st.DrawFn) -> Fuzzed:
    endpoint = draw(st.sampled_from(sorted(GOOD)))
    kinds = st.sampled_from(["good", "bad", "bad", "bad", "bytes", "blank"])
    data, good, number = bytearray(), dict[int, str](), 1
    for index, kind in enumerate(draw(st.lists(kinds, min_size=1, max_size=7))):
        match kind:
            case "good":
                line = json.dumps(request(endpoint, f"good-{index}")).encode()
                good[number] = f"good-{index}"
            case "bad":
                line = draw(bad_lines(endpoint))
            case "bytes":
                line = draw(st.binary(max_size=60))
            case _:
                line = draw(st.sampled_from([b"", b" \t", BOM, b"\r"]))
        line = draw(st.sampled_from([b"", b"", b"", BOM])) + line + draw(st.sampled_from([b"\n", b"\n", b"\r\n"]))
        data += line
        number += line.count(b"\n")
    return Fuzzed(endpoint, bytes(data), good)


@cache
def text_of(path: Path) -> TextModel:
    return load_text(path)


def collected(endpoint: str, records: Iterator[Record], text: TextModel, *, is_strict: bool) -> WindowDraft:
    """As a planner reads a window."""
    check = EnvelopeCheck(endpoint=endpoint, resolve={"tiny": "tiny"}.get, seen=SeenIds())
    return window.collect(
        check.check_all(records),
        batch_id="b",
        limits=LIMITS,
        offset=0,
        text_model=lambda _: text,
        is_strict=is_strict,
        is_failing=False,
        parse=parse_message if endpoint == MESSAGES else endpoints.PARSERS[endpoint],
    )


def judge(draft: WindowDraft, numbers: list[int], good: dict[int, str]) -> None:
    """Every line is there once; good ones run, all others have a reason that is JSON."""
    running = {one.line_no: one.custom_id for one in draft.requests}
    rejected = {one.line_no: orjson.loads(one.row) for one in draft.rejected}
    assert draft.line_nos == numbers
    assert sorted([*running, *rejected]) == numbers
    assert good.items() <= running.items()
    for number, row in rejected.items():
        assert row["line"] == number
        error = row["error"] or row["response"]["body"]["error"]
        assert error["code"] and error["message"]


def without_twins(good: dict[int, str], ids: dict[int, Any]) -> dict[int, str]:
    """Of good lines those whose id no other line has: of two such lines the later one pays."""
    others = {custom_id for number, custom_id in ids.items() if isinstance(custom_id, str) and number not in good}
    return {number: custom_id for number, custom_id in good.items() if custom_id not in others}


def law_of_lines(file: Fuzzed, cut: int, text: TextModel) -> None:
    chunks = [file.data[at : at + cut] for at in range(0, len(file.data), cut)]

    def records() -> Iterator[Record]:
        return jsonl_records(chunks, max_line_bytes=MOST_LINE_BYTES)

    physical = file.data.split(b"\n")
    numbers = [number for number, line in enumerate(physical, 1) if line.removeprefix(BOM).strip(b" \t\r")]
    read = list(records())
    assert [record.line_no for record in read] == numbers
    for record in read:
        assert record.next_offset == min(len(file.data), sum(len(line) + 1 for line in physical[: record.line_no]))
    good = without_twins(file.good, {record.line_no: record.value.get("custom_id") for record in read})
    lenient = collected(file.endpoint, records(), text, is_strict=False)
    judge(lenient, numbers, good)
    strict = collected(file.endpoint, records(), text, is_strict=True)
    if strict.num_problems:
        assert not strict.requests
        assert {problem.line for problem in strict.problems} <= set(numbers) - good.keys()
    else:
        assert strict.requests == lenient.requests


def law_of_rows(endpoint: str, rows: list[Row], text: TextModel) -> None:
    """The same of a table's rows."""
    made = []
    for number, row in enumerate(rows, start=1):
        if row.size > MOST_LINE_BYTES:
            made.append(problem_line(too_long(number, row.size, MOST_LINE_BYTES)))
        else:
            made.append(row_line(row.custom_id, row.body, number, MOST_LINE_BYTES))
    good = {number: row.custom_id or "" for number, row in enumerate(rows, start=1) if row.is_good}
    good = without_twins(good, {number: row.custom_id for number, row in enumerate(rows, start=1)})
    records = row_records([b"".join(made)], endpoint=endpoint, max_line_bytes=MOST_LINE_BYTES)
    judge(collected(endpoint, records, text, is_strict=False), list(range(1, len(rows) + 1)), good)


@st.composite
def tables(draw: st.DrawFn) -> tuple[str, list[Row]]:
    endpoint = draw(st.sampled_from(sorted(GOOD)))
    rows: list[Row] = []
    plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    for index in range(draw(st.integers(1, 6))):
        if draw(st.booleans()):
            size = draw(st.sampled_from([10, 10, 9_999]))
            body = json.dumps(request(endpoint, "")["body"])
            rows.append(Row(f"good-{index}", body, size, is_good=size <= MOST_LINE_BYTES))
            continue
        body = json.dumps(draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))).replace('"@big"', "1e400")
        rows.append(Row(draw(st.none() | plain), draw(st.none() | plain | st.just(body))))
    return endpoint, rows


def law_of_calls(service: Service, file: Fuzzed, name: str) -> None:
    """What anybody uploads: no call fails, the planner ends, and the batch says what became of it."""
    endpoint = file.endpoint if file.endpoint != MESSAGES else endpoints.CHAT
    answer = service.client.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, file.data)})
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        return
    asked = {"input_file_id": answer.json()["id"], "endpoint": endpoint, "completion_window": "24h"}
    quoted = service.client.post("/v1/batches/quote", json=asked | {"on_invalid": "skip"})
    made = service.client.post("/v1/batches", json=asked | {"on_invalid": "skip"})
    assert quoted.status_code < 500 and made.status_code == 200, (quoted.text, made.text)
    batch_id = made.json()["id"]
    service.planned.plan(batch_id)
    batch = service.shown(batch_id)
    assert batch["status"] in ("in_progress", "failed"), batch
    if endpoint == file.endpoint and batch["status"] == "in_progress":
        counts, read = batch["request_counts"], jsonl_records([file.data], max_line_bytes=1 << 20)
        good = without_twins(file.good, {record.line_no: record.value.get("custom_id") for record in read})
        assert counts["total"] - counts["failed"] >= len(good)
    assert service.client.post(f"/v1/batches/{batch_id}/cancel").status_code in (200, 400)


def tried(law: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """A law held against new examples for a third of FUZZ_S seconds."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    some = settings(max_examples=25, deadline=None, suppress_health_check=checks)(given(**drawn)(law))
    end_s = time.monotonic() + FUZZ_S / 3
    while time.monotonic() < end_s:
        some()


@fuzzed
def test_good_lines_come_out_and_bad_ones_have_a_reason(tiny_model: Path) -> None:
    text = text_of(tiny_model)
    tried(lambda file, cut: law_of_lines(file, cut, text), file=files(), cut=st.integers(1, 500))


@fuzzed
def test_good_rows_come_out_and_bad_ones_have_a_reason(tiny_model: Path) -> None:
    text = text_of(tiny_model)
    tried(lambda table: law_of_rows(table[0], table[1], text), table=tables())


@fuzzed
def test_no_upload_makes_a_call_fail(service: Service) -> None:
    names = st.sampled_from(["in.jsonl", "in.csv", "in.parquet", "in.jsonl.gz"])
    tried(lambda file, name: law_of_calls(service, file, name), file=files(), name=names)


@pytest.mark.parametrize(
    "line",
    [
        b'{"custom_id": "a", "body": {"temperature": 1e400}, "custom_id": "b"}',
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b'{"a": "\\ud800\\udc00"}',
        b'{"' + b"k" * 3_990 + b'": 1}',
        b"[" * 4_000,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"a": 1e400, "b": ' + b'"\\' * 900,
        b"-" * 50,
        b"1e400",
        b"\x00",
    ],
)
def test_examples_that_are_hard_on_parsers(tiny_model: Path, line: bytes) -> None:
    around = [json.dumps(request(endpoints.CHAT, f"good-{number}")).encode() for number in (1, 3)]
    data = b"\n".join([around[0], line, around[1]])
    law_of_lines(Fuzzed(endpoints.CHAT, data, {1: "good-1", 3: "good-3"}), 64, text_of(tiny_model))
