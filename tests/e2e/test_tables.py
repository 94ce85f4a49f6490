"""Tables through a template on a running stack: one table in every format, the same answers, every column kept."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.e2e.conftest import Result, Stack, line, read_lines

Run = Callable[..., Result]
IDS = [f"{number:03d}" for number in range(6)]
TABLE = pa.table(
    {
        "id": IDS,
        "review": [f'Line {number} says "hello",\nand\u2028more.' for number in range(6)],
        "stars": range(6),
        "answer": ["my own"] * 6,
    }
)
SAYS = "Sentiment of: {review}"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The table in every format, under names that say nothing of it."""
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in TABLE.to_pylist()).encode()
    pq.write_table(TABLE, tmp_path / "parquet")
    pyarrow.csv.write_csv(TABLE, tmp_path / "csv")
    contents = {
        "parquet": (tmp_path / "parquet").read_bytes(),
        "csv.zst": zstandard.compress((tmp_path / "csv").read_bytes()),
        "jsonl.gz": gzip.compress(b"\n" + rows),
        "parquet.gz": gzip.compress((tmp_path / "parquet").read_bytes()),
    }
    found = {}
    for name, content in contents.items():
        found[name] = tmp_path / f"in-{name.replace('.', '-')}"
        found[name].write_bytes(content)
    return found


def test_every_format_gives_the_same_answers_beside_the_same_rows(
    stack: Stack, stack_cli: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    outs = {}
    for name, path in files.items():
        out = tmp_path / f"{name}.out.parquet"
        options = ("--model", stack.model, "--prompt", SAYS, "--id-column", "id", "--max-tokens", 4)
        ran = stack_cli("run", path, *options, "--system", "Be brief.", "--temperature", 0, "-o", out)
        assert ran.code == 0, ran.err
        outs[name] = pq.read_table(out)
    for name, out in outs.items():
        assert out["id"].to_pylist() == IDS, name
        assert out["review"].to_pylist() == TABLE["review"].to_pylist()
        assert [str(value) for value in out["stars"].to_pylist()] == ["0", "1", "2", "3", "4", "5"]
        assert out["answer"].to_pylist() == ["my own"] * 6
        assert out["input_tokens"].to_pylist() == outs["parquet"]["input_tokens"].to_pylist()
        assert all(out["answer_2"].to_pylist())
        assert all(1 <= count <= 4 for count in out["output_tokens"].to_pylist())
        assert all(cost > 0 for cost in out["cost_nanos"].to_pylist())
        assert out["error"].null_count == 6
    assert outs["parquet"].schema.field("stars").type == pa.int64()
    assert len(set(outs["parquet"]["answer_2"].to_pylist())) > 1


def test_results_of_a_batch_are_written_beside_its_table_later(
    stack: Stack, stack_cli: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    options = ("--model", stack.model, "--prompt", SAYS, "--max-tokens", 4)
    batch_id = stack_cli("submit", files["jsonl.gz"], *options).out.strip()
    assert stack_cli("watch", batch_id).code == 0
    out = tmp_path / "out.csv"
    assert stack_cli("results", batch_id, "--input", files["jsonl.gz"], "-o", out).code == 0
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == IDS
    assert all(row["answer_2"] for row in rows)
    assert stack_cli("results", batch_id, "-o", tmp_path / "bare.parquet").code == 0
    bare = pq.read_table(tmp_path / "bare.parquet")
    assert bare.schema.names[:3] == ["line", "custom_id", "answer"]
    assert bare["custom_id"].to_pylist() == [f"row-{number}" for number in range(2, 8)], (
        "as in the file: line 1 is blank"
    )
    assert bare["answer"].to_pylist() == [row["answer_2"] for row in rows]


def test_files_in_batch_form_are_read_by_content(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    lines = [line(number, stack.model) for number in range(3)]
    jsonl = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    table = pa.table(
        {"custom_id": ["007", "b", "c"], "body": [json.dumps(one["body"]) for one in lines], "x": [1, 2, 3]}
    )
    pyarrow.csv.write_csv(table, tmp_path / "csv")
    answers = []
    for name, content in (
        ("a.gz", gzip.compress(jsonl)),
        ("b.txt", zstandard.compress(jsonl)),
        ("c.jsonl", (tmp_path / "csv").read_bytes()),
    ):
        (tmp_path / name).write_bytes(content)
        ran = stack_cli("run", tmp_path / name, "-o", tmp_path / "out.jsonl")
        assert ran.code == 0, ran.err
        rows = read_lines(tmp_path / "out.jsonl")
        assert [row["line"] for row in rows] == [1, 2, 3]
        answers.append([row["response"]["body"]["choices"][0]["message"]["content"] for row in rows])
    assert rows[0]["custom_id"] == "007"
    assert all(all(texts) for texts in answers)


def test_rows_without_a_value_are_refused_or_become_error_lines(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"review": "good"}\n{"review": null}\n{"other": 1}\n')
    options = ("--model", stack.model, "--prompt", "{review}", "--max-tokens", 4, "-o", tmp_path / "out.jsonl")
    refused = stack_cli("run", source, *options)
    assert refused.code == 4
    assert "2 rows have no value to ask about (row 2 has no 'review'" in refused.err
    assert stack_cli("run", source, *options, "--skip-invalid").code == 3
    rows = read_lines(tmp_path / "out.jsonl")
    assert [bool(row["answer"]) for row in rows] == [True, False, False]
    assert rows[1]["error"].startswith("missing_required_parameter: ")
    assert rows[2]["other"] == 1


def test_wrong_templates_and_names_are_told_before_anything_is_sent(stack_cli: Run, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("review,id\ngood,1\n")
    for options, says in (
        (("--prompt", "{revue}"), "no column 'revue'; it has review, id"),
        (("--prompt", "{review"), "write {{"),
        (("--prompt", "{review}", "--id-column", "x"), "no column 'x'"),
        (("--system", "s"), "--system needs --prompt"),
        (("--prompt", "{review}", "-o", "x.parquet.gz"), "Parquet is compressed inside"),
        (("--prompt", "{review}", "--schema", source), "is not JSON"),
    ):
        refused = stack_cli("run", source, *options)
        assert refused.code == 2, refused.err
        assert says in refused.err


def test_a_table_is_asked_on_any_endpoint(stack: Stack, stack_cli: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Completions, responses and vectors of the same rows; and a packed file of requests runs as what it is."""
    asked = ("--model", stack.model, "--prompt", SAYS, "--id-column", "id")
    for endpoint, options in (("completions", ()), ("responses", ("--system", "Be brief."))):
        out = tmp_path / f"{endpoint}.parquet"
        ran = stack_cli("run", files["parquet"], *asked, "--endpoint", endpoint, *options, "--max-tokens", 4, "-o", out)
        assert ran.code == 0, ran.err
        table = pq.read_table(out)
        assert table["id"].to_pylist() == IDS and all(table["answer_2"].to_pylist())
        assert set(table["output_tokens"].to_pylist()) <= {1, 2, 3, 4}
    out = tmp_path / "vectors.parquet"
    ran = stack_cli("run", files["parquet"], *asked, "--endpoint", "embeddings", "--dimensions", 8, "-o", out)
    assert ran.code == 0, ran.err
    table = pq.read_table(out)
    assert [len(vector) for vector in table["embedding"].to_pylist()] == [8] * 6
    assert table["cost_nanos"].to_pylist() and set(table["output_tokens"].to_pylist()) == {None}

    row = {"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": stack.model, "input": "x"}}
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(json.dumps(row).encode()))
    ran = stack_cli("run", packed, "-o", tmp_path / "packed.jsonl")
    assert ran.code == 0, ran.err
    (answer,) = read_lines(tmp_path / "packed.jsonl")
    assert answer["response"]["body"]["data"][0]["embedding"]
    ran = stack_cli("run", packed, "--endpoint", "completions")
    assert ran.code == 2 and "asks for /v1/completions, and the first line" in ran.err
