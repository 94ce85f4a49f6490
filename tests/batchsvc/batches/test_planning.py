"""Planning end to end on a real database and a real store: what runs, what is rejected, what fails the batch."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchsvc.batches import planning, worker_queries
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.reading import PlanContext
from batchsvc.batches.tables import Unit, Window
from batchsvc.billing import pricing
from batchsvc.money import Rates
from engine.errors import ModelError
from tests.batchsvc.batches.planned import PROJECT, Planned, jsonl, line

on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # where the SQL is not the point


def codes(planned: Planned, data: bytes, **changes: Any) -> list[tuple[str, int | None, str | None]]:
    """Code, line and param of every error of a batch that must fail without a trace."""
    reserved_before = planned.balance(f"reserved:{PROJECT}")
    batch = planned.run(data, **changes)
    assert batch.status == "failed"
    assert batch.errors is not None and batch.errors_total >= len(batch.errors)
    assert (batch.total, batch.failed, batch.reserved_nanos, batch.in_progress_ms) == (0, 0, 0, None)
    assert planned.rows(Unit, batch.id) == [] and planned.rows(Window, batch.id) == []
    assert planned.objects(batch.id) <= planned.garbage()
    assert planned.balance(f"reserved:{PROJECT}") == reserved_before
    assert all(error["message"] for error in batch.errors)
    return [(error["code"], error["line"], error["param"]) for error in batch.errors]


def test_a_batch_gets_units_a_reservation_and_starts(planned: Planned) -> None:
    data = jsonl(line("a"), b"\n", line("b", "Another text", max_tokens=3), line("c", temperature=1))
    with planned.db.transaction() as session:
        served = {"weight_format": "int8", "kv_format": "bf16", "quality": {"verdict": "within"}}
        worker_queries.note_formats(session, planned.text.meta.digest, **served)
    batch = planned.run(data)
    assert (batch.status, batch.total, batch.failed, batch.errors_total) == ("in_progress", 3, 0, 0)
    assert (batch.model_id, batch.model_digest) == ("tiny", planned.text.meta.digest)
    assert (batch.weight_format, batch.kv_format, batch.quality) == ("int8", "bf16", {"verdict": "within"})
    assert batch.in_progress_ms is not None
    lines = planned.lines(batch.id)
    assert {number: (row[0], row[3]) for number, row in lines.items()} == {1: ("a", 8), 3: ("b", 3), 4: ("c", 8)}
    for unit, file in zip(planned.rows(Unit, batch.id), planned.units(batch.id), strict=True):
        assert (unit.state, unit.num_lines, unit.model_digest) == ("ready", file.num_lines, batch.model_digest)
        assert unit.done_bitmap == bytes((unit.num_lines + 7) // 8)
    prompt = planned.text.prompt_ids([{"role": "user", "content": "Another text"}])
    rows = [row for unit in planned.units(batch.id) for row in unit.rows if row.line_nos == (3,)]
    assert rows[0].prompt_ids.tolist() == prompt
    assert batch.rates == {
        "tier": {"input": 10_000_000, "cached_input": 2_500_000, "output": 40_000_000},
        "standard": {"input": 20_000_000, "cached_input": 5_000_000, "output": 80_000_000},
    }
    rates = Rates(**batch.rates["tier"])
    most = sum(
        pricing.most_nanos(rates, input_tokens=tokens, planned_cached_tokens=cached, max_tokens=most)
        for _, tokens, cached, most in lines.values()
    )
    (window,) = planned.rows(Window, batch.id)
    assert window.reserve_nanos == most > 0
    unlikely = 4 + 1 + 4  # tokens: an answer is expected to be a quarter of the most, and a long one twice as long
    high = most - unlikely * 40
    assert batch.reserved_nanos == window.high_nanos == high
    assert planned.balance(f"reserved:{PROJECT}") == high == -planned.balance(f"available:{PROJECT}")
    assert planned.plan(batch.id) == PlanProgress.DONE
    assert planned.batch(batch.id).plan_epoch == batch.plan_epoch


@on_sqlite
def test_messages_are_planned_as_the_chats_that_they_mean(planned: Planned) -> None:
    url = "/v1/messages"
    system = [{"type": "text", "text": "Be brief."}]
    text = "Where is my parcel?"
    chat = line("chat", messages=[{"role": "system", "content": system}, {"role": "user", "content": text}])
    wanted = planned.lines(planned.run(jsonl(chat)).id)[1]
    params = {key: value for key, value in line("a")["body"].items() if key != "max_tokens"}
    lines = [
        {**line("a", system=system), "url": url},
        {**line("b"), "url": url, "body": params},
        {**line("c", tools=[{"name": "f"}]), "url": url},
        {**line("d", model=None), "url": url},
    ]
    batch = planned.run(jsonl(*lines), endpoint=url, on_invalid="skip")
    assert (batch.status, batch.total, batch.failed) == ("in_progress", 4, 3)
    assert planned.lines(batch.id)[1][1] == wanted[1], "as many prompt tokens as the chat has"
    rejected = planned.rejected(batch.id)
    assert [rejected[number]["response"]["body"]["error"]["param"] for number in (2, 3)] == [
        "max_tokens",
        "tools.0.input_schema",
    ]
    assert rejected[4]["error"]["code"] == "missing_required_parameter"


def test_windows_are_cut_by_lines_and_number_everything_on(planned: Planned) -> None:
    data = jsonl(*(line(f"id{i}", f"text {i % 3}") for i in range(11)), b"\n\n")
    small = planned.with_settings(window_lines=4, unit_lines=2)
    batch = small.run(data)
    assert batch.total == 11
    windows = small.rows(Window, batch.id)
    assert [(w.no, w.first_line, w.last_line, w.num_lines) for w in windows] == [
        (0, 1, 4, 4),
        (1, 5, 8, 4),
        (2, 9, 11, 3),
    ]
    assert [list(w.line_nos) for w in small.window_lines(batch.id)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    assert [w.custom_ids[0] for w in small.window_lines(batch.id)] == ["id0", "id4", "id8"]
    units = small.rows(Unit, batch.id)
    assert [unit.no for unit in units] == list(range(len(units)))
    for unit, file in zip(units, small.units(batch.id), strict=True):
        numbers = {number for row in file.rows for number in row.line_nos}
        window = windows[unit.window_no]
        assert all(window.first_line <= number <= window.last_line for number in numbers)
        assert file.num_lines <= 2
    assert sorted(small.lines(batch.id)) == list(range(1, 12))


@on_sqlite
def test_windows_are_cut_by_tokens(planned: Planned) -> None:
    tokens = len(planned.text.prompt_ids([{"role": "user", "content": "x"}]))
    small = planned.with_settings(window_tokens=2 * tokens)
    batch = small.run(jsonl(*(line(f"id{i}", "x") for i in range(5))))
    assert [window.num_lines for window in small.rows(Window, batch.id)] == [2, 2, 1]
    assert sorted(small.lines(batch.id)) == [1, 2, 3, 4, 5]
    tiny = planned.with_settings(window_tokens=1)
    assert [w.num_lines for w in tiny.rows(Window, tiny.run(jsonl(line("a"), line("b"))).id)] == [1, 1]


@on_sqlite
def test_duplicates_fold_only_when_they_must_answer_alike(planned: Planned) -> None:
    data = jsonl(
        line("greedy1"),
        line("greedy2", seed=5),
        line("seed1", temperature=1, seed=7),
        line("seed2", temperature=1, seed=7),
        line("seed3", temperature=1, seed=8),
        line("free1", temperature=1),
        line("free2", temperature=1),
        line("longer", max_tokens=9),
    )
    batch = planned.run(data)
    groups = sorted(row.custom_ids for unit in planned.units(batch.id) for row in unit.rows)
    assert groups == [("free1",), ("free2",), ("greedy1", "greedy2"), ("longer",), ("seed1", "seed2"), ("seed3",)]


@on_sqlite
def test_planned_cached_tokens_equal_a_brute_force_oracle(planned: Planned) -> None:
    shared = "You are a helpful assistant that reads tickets. Order 1234567 was shipped to Berlin. "
    texts = [shared * (i % 3) + "Please answer " * (i % 2) + str(i // 4) for i in range(40)]
    batch = planned.with_settings(unit_lines=7).run(jsonl(*(line(f"id{i}", t) for i, t in enumerate(texts))))
    lines = planned.lines(batch.id)
    earlier: list[list[int]] = []
    for unit in planned.units(batch.id):
        for row in unit.rows:
            prompt = row.prompt_ids.tolist()
            for member, number in enumerate(row.line_nos):
                if member == 0 and prompt not in earlier:
                    common = max((_common(prompt, other) for other in earlier), default=0)
                    assert lines[number][2] == 16 * (min(common, len(prompt) - 1) // 16)
                else:
                    assert lines[number][2] == len(prompt)
                earlier.append(prompt)
    assert sum(row[2] for row in lines.values()) > 0


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@on_sqlite
def test_parameters_and_prompts_that_cannot_run_cost_their_line_alone(planned: Planned) -> None:
    data = jsonl(
        line("ok"),
        line("functions", functions=[{}]),
        line("long", "word " * 400),
        line("greedy-for-tokens", max_tokens=255),
        line("image", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    )
    batch = planned.run(data)
    assert (batch.status, batch.total, batch.failed, batch.completed) == ("in_progress", 5, 4, 0)
    assert list(planned.lines(batch.id)) == [1]
    rejected = planned.rejected(batch.id)
    errors = {number: row["response"]["body"]["error"] for number, row in rejected.items()}
    assert {number: (error["code"], error["param"]) for number, error in errors.items()} == {
        2: ("unsupported_parameter", "functions"),
        3: ("context_length_exceeded", "messages"),
        4: ("context_length_exceeded", "messages"),
        5: ("unsupported_parameter", "messages[0].content[0]"),
    }
    assert all(row["error"] is None and row["response"]["status_code"] == 400 for row in rejected.values())
    assert {row["custom_id"] for row in rejected.values()} == {"functions", "long", "greedy-for-tokens", "image"}
    assert "256" in errors[3]["message"] and "255" in errors[4]["message"]


def test_strict_batches_fail_with_all_problems_of_all_windows(planned: Planned) -> None:
    data = jsonl(
        line("a"),
        line("b", functions=[{}]),
        b"{nonsense\n",
        line("a"),
        line("c") | {"url": "/v1/embeddings", "method": "GET"},
        line(""),
        line("d", model="unknown"),
        line("e", model="second"),
        line("f", model="other-name"),
    )
    expected = [
        ("invalid_json_line", 3, None),
        ("duplicate_custom_id", 4, "custom_id"),
        ("invalid_method", 5, "method"),
        ("url_mismatch", 5, "url"),
        ("invalid_value", 6, "custom_id"),
        ("model_not_found", 7, "body.model"),
        ("model_mismatch", 8, "body.model"),
    ]
    for size in (100, 2, 1):
        assert codes(planned.with_settings(window_lines=size), data) == expected


@on_sqlite
def test_problems_are_listed_up_to_the_limit_and_counted_exactly(planned: Planned) -> None:
    small = planned.with_settings(window_lines=5, max_problems=7)
    batch = small.run(jsonl(line("good"), *[b"[]\n"] * 23))
    assert (batch.status, batch.errors_total, len(batch.errors or [])) == ("failed", 23, 7)


def test_skipping_turns_problems_into_error_lines(planned: Planned) -> None:
    data = jsonl(b"{nonsense\n", line("a"), line("a"), line(7), line("b", model="second"), line("c"))
    for size in (100, 1):
        small = planned.with_settings(window_lines=size)
        batch = small.run(data, on_invalid="skip")
        assert (batch.status, batch.total, batch.failed) == ("in_progress", 6, 4)
        assert {number: row[0] for number, row in small.lines(batch.id).items()} == {2: "a", 6: "c"}
        rejected = small.rejected(batch.id)
        assert {number: (row["custom_id"], row["error"]["code"]) for number, row in rejected.items()} == {
            1: (None, "invalid_json_line"),
            3: ("a", "duplicate_custom_id"),
            4: (None, "invalid_type"),
            5: ("b", "model_mismatch"),
        }
        assert all(row["response"] is None for row in rejected.values())
        ids = [custom_id for window in small.window_lines(batch.id) for custom_id in window.custom_ids]
        assert ids == [None, "a", "a", None, "b", "c"]


@on_sqlite
@pytest.mark.parametrize(
    ("item", "on_invalid"),
    [(b"{nonsense\n", "skip"), (line("a", functions=[{}]), "skip"), (line("a", functions=[{}]), "fail")],
)
def test_a_batch_whose_every_line_is_rejected_starts_without_units(
    planned: Planned, item: Any, on_invalid: str
) -> None:
    batch = planned.run(jsonl(item), on_invalid=on_invalid)
    assert (batch.status, batch.total, batch.failed, batch.reserved_nanos) == ("in_progress", 1, 1, 0)
    assert planned.rows(Unit, batch.id) == []
    assert len(planned.rejected(batch.id)) == 1


@on_sqlite
@pytest.mark.parametrize("data", [b"", b"\n \r\n\t\n"])
@pytest.mark.parametrize("on_invalid", ["fail", "skip"])
def test_a_file_without_requests_fails(planned: Planned, data: bytes, on_invalid: str) -> None:
    assert codes(planned, data, on_invalid=on_invalid) == [("empty_file", None, "input_file_id")]


@on_sqlite
@pytest.mark.parametrize("on_invalid", ["fail", "skip"])
def test_the_limit_of_lines_is_exact(planned: Planned, on_invalid: str) -> None:
    data = [line(f"id{i}") for i in range(5)]
    for size in (100, 5, 2):
        small = planned.with_settings(max_lines=4, window_lines=size)
        assert small.run(jsonl(*data[:4], b"\n"), on_invalid=on_invalid).total == 4
        assert codes(small, jsonl(*data), on_invalid=on_invalid) == [("too_many_tasks", None, "input_file_id")]


@on_sqlite
def test_a_file_with_too_many_lines_has_its_problems_listed_too(planned: Planned) -> None:
    data = jsonl(line("a"), b"[]\n", *[line(f"id{i}") for i in range(4)], b"{nonsense\n", line("z"), b"[]\n")
    found = [("expected_object", 2, None), ("invalid_json_line", 7, None)]
    for size in (100, 3, 2):
        small = planned.with_settings(max_lines=8, window_lines=size)
        batch = small.run(data)
        listed = [(error["code"], error["line"], error["param"]) for error in batch.errors or []]
        assert listed == [("too_many_tasks", None, "input_file_id"), *found]
        assert batch.errors_total == 3
        few = small.with_settings(max_problems=2).run(data)
        assert [error["code"] for error in few.errors or []] == ["too_many_tasks", "expected_object"]
        assert few.errors_total == 3


@on_sqlite
def test_a_table_that_becomes_too_large_fails_for_that_alone(planned: Planned) -> None:
    bodies = ["[1]", *[json.dumps(line("x")["body"])] * 70]
    sink = io.BytesIO()
    pq.write_table(pa.table({"custom_id": [f"id{i}" for i in range(71)], "body": bodies}), sink)
    less_than_all = sum(len(body) for body in bodies) - 100
    for size in (1000, 3):
        batch = planned.with_settings(max_input_bytes=less_than_all, window_lines=size).run(sink.getvalue())
        listed = [(error["code"], error["line"]) for error in batch.errors or []]
        assert (batch.status, batch.errors_total) == ("failed", 1)
        assert listed == [("invalid_file", None)]


@on_sqlite
def test_a_model_of_the_batch_overrides_the_lines(planned: Planned) -> None:
    data = jsonl(line("a", model="gpt-9"), line("b", model=None))
    assert planned.run(data, model_requested="other-name").model_id == "tiny"
    assert planned.run(data, model_requested="second").total == 2
    assert codes(planned, data, model_requested="gpt-9") == [("model_not_found", None, "model")]


def test_a_model_without_a_price_fails_the_batch(planned: Planned) -> None:
    assert codes(planned, jsonl(line("a")), price_version=99) == [("model_not_priced", None, "model")]


@on_sqlite
def test_a_model_that_cannot_be_loaded_fails_the_batch(planned: Planned) -> None:
    def refuse(path: str) -> Any:
        raise ModelError(f"{path} is gone.")

    broken = Planned(PlanContext(planned.db, planned.store, planned.context.settings, refuse), planned.text)
    assert codes(broken, jsonl(line("a"))) == [("model_not_available", None, "model")]


def test_a_missing_or_replaced_input_fails_the_batch(planned: Planned) -> None:
    small = planned.with_settings(window_lines=1)
    for change in ("delete", "replace"):
        batch_id = small.add_batch(jsonl(line("a"), line("b")))
        (key,) = [key for key, _ in small.store.list_keys("in/")]
        assert planning.plan_next_window(small.context, batch_id, "w") == PlanProgress.AGAIN
        if change == "delete":
            small.store.delete([key])
        else:
            small.store.put(key, jsonl(line("x"), line("y"), line("z")))
        assert small.plan(batch_id) == PlanProgress.DONE
        batch = small.batch(batch_id)
        assert batch.status == "failed"
        assert [(e["code"], e["param"]) for e in batch.errors or []] == [("invalid_request", "input_file_id")]
        small.store.delete([key])
    batch_id = small.add_batch(jsonl(line("a")), input_file_id="file-none")
    assert small.plan(batch_id) == PlanProgress.DONE
    assert small.batch(batch_id).status == "failed"


@on_sqlite
def test_parquet_is_planned_like_jsonl(planned: Planned) -> None:
    lines = [line(f"id{i}", f"text {i}") for i in range(7)]
    sink = io.BytesIO()
    bodies = [json.dumps(item["body"]) for item in lines]
    pq.write_table(pa.table({"custom_id": [item["custom_id"] for item in lines], "body": bodies}), sink)
    small = planned.with_settings(window_lines=3)
    one, two = small.run(sink.getvalue()), small.run(jsonl(*lines))
    assert small.lines(one.id) == small.lines(two.id)
    assert [w.num_lines for w in small.rows(Window, one.id)] == [3, 3, 1]
    bad = io.BytesIO()
    pq.write_table(pa.table({"custom_id": [1], "body": ["{}"]}), bad)
    assert codes(planned, bad.getvalue()) == [("invalid_file", None, None)]
    assert codes(planned, b"PAR1 but nothing else", on_invalid="skip") == [("invalid_file", None, None)]


def test_nul_in_a_value_that_an_error_shows_is_no_trouble(planned: Planned) -> None:
    data = jsonl(line("a\x00b") | {"url": "\x00"}, line("c", model="\x00x"))
    assert [code for code, _, _ in codes(planned, data)] == ["invalid_value", "url_mismatch", "model_not_found"]
    batch = planned.run(jsonl(line("ok", "nul \x00 in the text")))
    assert batch.total == 1
