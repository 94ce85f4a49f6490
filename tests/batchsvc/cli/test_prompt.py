"""A table becomes requests, line by line as its rows; results become a table, row by row as the input."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError
from batchsvc.cli.prompt import Prompting, requests_of
from batchsvc.cli.table_output import check_name, default_path, is_table, joined, write_table

URL = "/v1/chat/completions"
ROWS = b'{"id": "007", "review": "good\xe2\x80\xa8", "n": [1]}\n\n{"id": "008", "review": "bad"}\n'


def requests(source: Path, *, skip_invalid: bool = False, model: str | None = "m", **options: Any) -> list[Any]:
    """The lines of the file that is made of a table; None for a blank one."""
    prompting = Prompting(**options)
    with requests_of(source, prompting, Console(), model=model, skip_invalid=skip_invalid) as path:
        return [json.loads(line) if line else None for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.2026.data"
    path.write_bytes(ROWS)
    return path


def test_a_line_is_a_row(source: Path) -> None:
    message = {"role": "user", "content": "Classify: good\u2028"}
    first, blank, second = requests(source, prompt="Classify: {review}")
    body = {"model": "m", "messages": [message], "temperature": 0}
    assert first == {"custom_id": "row-1", "method": "POST", "url": URL, "body": body}
    assert blank is None, "so that line 3 is row 3"
    assert second["custom_id"] == "row-3"


def test_what_is_asked_of_every_row_is_in_every_body(source: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"label": {"type": "string"}}}
    path = tmp_path / "my schema.json"
    path.write_text(json.dumps(schema))
    line = requests(
        source,
        model=None,
        prompt="{review}{id}",
        id_column="id",
        system="Be brief.",
        max_tokens=5,
        temperature=0.5,
        schema=path,
    )[0]
    assert line["custom_id"] == "007"
    assert line["body"] == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "good\u2028007"}],
        "max_tokens": 5,
        "temperature": 0.5,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "my_schema", "schema": schema, "strict": True},
        },
    }


def test_text_after_the_last_column_is_told_and_moves_only_when_asked_to(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "{review}\n\nIs this praise?"
    assert requests(source, prompt=prompt)[0]["body"]["messages"][0]["content"].startswith("good")
    assert "--static-first puts it first" in capsys.readouterr().err
    moved = requests(source, prompt=prompt, static_first=True)[0]["body"]["messages"][0]["content"]
    assert moved.startswith("Is this praise?\n\ngood")
    assert "The template is now: Is this praise?" in capsys.readouterr().err


def test_the_file_goes_and_is_the_same_every_time(source: Path) -> None:
    made = []
    for _ in range(2):
        with requests_of(source, Prompting(prompt="{review}"), Console(), model="m", skip_invalid=False) as path:
            made.append(path.read_bytes())
        assert not path.parent.exists()
    assert made[0] == made[1]


def test_a_broken_table_is_refused_with_its_line(source: Path) -> None:
    source.write_bytes(ROWS + b"{broken\n")
    with pytest.raises(CommandError, match="Line 4 can't be used"):
        requests(source, prompt="{review}")


class Server:
    """What holds the result lines of a batch."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    @contextmanager
    def content(self, file_id: str) -> Iterator[Iterator[bytes]]:
        yield iter([self._data])


def result(line: int, content: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cost_nanos": 5}
    body = {"choices": [{"message": {"content": content}}], "usage": usage}
    return {"custom_id": str(line), "line": line, "response": {"status_code": 200, "body": body}, "error": None}


def write(
    lines: list[dict[str, Any]], out: Path, source: Path | None, schema: Path | None = None, endpoint: str = URL
) -> int:
    server: Any = Server(lines)
    batch = {"endpoint": endpoint, "output_file_id": "file-o", "request_counts": {"total": len(lines)}}
    return write_table(server, batch, out, source=source, schema=schema)


def test_another_table_than_that_of_the_batch_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="has 2 rows, and the batch was run on 3"):
        write([result(number, "yes") for number in (1, 2, 3)], tmp_path / "o.csv", source)
    assert not (tmp_path / "o.csv").exists()


@given(st.sets(st.integers(1, 40)), st.sets(st.integers(1, 45)))
def test_rows_and_results_are_joined_by_number(rows: set[int], answered: set[int]) -> None:
    batches = [
        (some, pa.record_batch([pa.array(some, pa.int64())], ["n"]))
        for some in (sorted(rows)[:7], sorted(rows)[7:])
        if some
    ]
    found = {}
    for columns, results in joined(batches, iter([(n, result(n, str(n))) for n in sorted(answered)])):
        for number, row in zip(columns["n"].to_pylist(), results, strict=True):
            found[number] = None if row is None else row["line"]
    assert found == {number: number if number in answered else None for number in rows}


def test_every_kind_of_table_says_the_same(source: Path, tmp_path: Path) -> None:
    lines = [result(1, "yes\u2028,\r\n"), result(3, "no")]
    want = [("007", "good\u2028", "yes\u2028,\r\n"), ("008", "bad", "no")]
    outs = {name: tmp_path / f"out.{name}" for name in ("parquet", "csv", "tsv", "csv.gz", "jsonl", "jsonl.zst")}
    for out in outs.values():
        assert write(lines, out, source) == 2
        assert not out.with_name(out.name + ".partial").exists()
    table = pq.read_table(outs["parquet"])
    assert table.schema.names[:4] == ["id", "review", "n", "answer"]
    assert list(zip(*(table[name].to_pylist() for name in ("id", "review", "answer")), strict=True)) == want
    for name, delimiter in (("csv", ","), ("tsv", "\t"), ("csv.gz", ",")):
        data = outs[name].read_bytes()
        text = (gzip.decompress(data) if name.endswith("gz") else data).decode()
        rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
        assert [(row["id"], row["review"], row["answer"]) for row in rows] == want
        assert rows[0]["n"] == "[1]" and rows[0]["error"] == "" and rows[0]["cost_nanos"] == "5"
    for name in ("jsonl", "jsonl.zst"):
        data = outs[name].read_bytes()
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data) if name.endswith("zst") else data
        assert "\u2028".encode() not in data
        objects = [json.loads(row) for row in data.split(b"\n")[:-1]]
        assert [(row["id"], row["review"], row["answer"]) for row in objects] == want
        assert objects[0]["n"] == [1] and objects[1]["n"] is None


def test_properties_of_a_schema_are_columns_of_their_type(source: Path, tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text(json.dumps({"properties": {"stars": {"type": "integer"}, "id": {"type": "string"}}}))
    write([result(1, '{"stars": 5, "id": "x"}'), result(3, "well")], tmp_path / "o.parquet", source, schema)
    table = pq.read_table(tmp_path / "o.parquet")
    assert table["stars"].to_pylist() == [5, None]
    assert table["id"].to_pylist() == ["007", "008"]
    assert table["id_2"].to_pylist() == ["x", None]
    assert table["error"].to_pylist() == [None, "invalid_answer: the answer is not JSON"]


def test_types_of_parquet_stay(tmp_path: Path) -> None:
    table = pa.table(
        {
            "when": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns", "UTC")),
            "price": pa.array([pa.scalar("1.50").cast(pa.decimal128(10, 2)).as_py()], pa.decimal128(10, 2)),
            "tags": pa.array([["a", "b"]]),
            "kind": pa.array(["x"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    for name in ("o.parquet", "o.csv", "o.jsonl"):
        write([result(1, "yes")], tmp_path / name, tmp_path / "in.parquet")
    out = pq.read_table(tmp_path / "o.parquet")
    assert out.schema.types[:3] == table.schema.types[:3]
    assert out["when"].cast(pa.int64()).to_pylist() == [1_700_000_000_123_456_789]
    assert json.loads((tmp_path / "o.jsonl").read_bytes())["price"] == "1.50"
    assert '1.50,"[""a"",""b""]",x,yes' in (tmp_path / "o.csv").read_text()


def test_names_say_what_is_written() -> None:
    assert [is_table(Path(name)) for name in ("a.parquet", "a.csv.gz", "A.TSV", "a.jsonl", "a", "csv")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    for source, out in (
        ("d/reviews.parquet", "reviews.results.parquet"),
        ("reviews.csv.gz", "reviews.results.csv"),
        ("reviews.jsonl.zst", "reviews.results.jsonl"),
        ("reviews", "reviews.results.jsonl"),
    ):
        assert default_path(Path(source)) == Path(out)


def test_rows_become_requests_of_another_endpoint(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _, second = requests(source, prompt="{review} it says", endpoint="embeddings", dimensions=4)
    assert first["url"] == second["url"] == "/v1/embeddings"
    assert first["body"] == {"model": "m", "input": "good\u2028 it says", "dimensions": 4}
    assert "--system" not in capsys.readouterr().err, "an embedding has none"


def test_vectors_are_a_column_of_numbers_beside_rows_and_text_beside_requests(source: Path, tmp_path: Path) -> None:
    def vector(line: int, *vectors: object) -> dict[str, Any]:
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
        body = {"object": "list", "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1, "cost_nanos": 5}}
        return {"line": line, "custom_id": str(line), "response": {"status_code": 200, "body": body}, "error": None}

    lines = [vector(1, [0.5, -1.0]), vector(3, "AAAA")]
    for name in ("o.parquet", "o.csv", "o.jsonl"):
        assert write(lines, tmp_path / name, source, endpoint="/v1/embeddings") == 2
    table = pq.read_table(tmp_path / "o.parquet")
    assert table["embedding"].to_pylist() == [[0.5, -1.0], None] and "answer" not in table.schema.names
    assert table.schema.field("embedding").type == pa.list_(pa.float32())
    assert [str(error)[:14] for error in table["error"].to_pylist()] == ["None", "invalid_answer"]
    assert '"[0.5,-1.0]"' in (tmp_path / "o.csv").read_text()
    assert json.loads((tmp_path / "o.jsonl").read_bytes().splitlines()[0])["embedding"] == [0.5, -1.0]
    batch_form = tmp_path / "requests.jsonl"
    batch_form.write_bytes(b'{"custom_id": "1", "body": {"input": ["a", "b"]}}\n')
    write([vector(1, [0.5], [0.25])], tmp_path / "p.parquet", batch_form, endpoint="/v1/embeddings")
    assert pq.read_table(tmp_path / "p.parquet")["answer"].to_pylist() == ["[[0.5],[0.25]]"]


@pytest.mark.parametrize(
    ("name", "says"), [("a.xlsx", "not .xlsx"), ("a.ARROW", "can't be written"), ("a.parquet.gz", "Parquet")]
)
def test_names_of_what_is_not_written_are_refused(name: str, says: str) -> None:
    with pytest.raises(CommandError, match=says):
        check_name(Path(name))
