"""Results as a table: the input's rows and columns in their order, and beside them what was answered.

The kind is told by the name: .parquet, .csv, .tsv, .jsonl, the text kinds also with .gz or .zst. Parquet keeps the
types of the input, CSV and JSONL the same texts. Rows and result lines are both in the order of line numbers, so that
one walk joins them, in memory that doesn't grow with the table.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import orjson
import zstandard

from batchsvc.cli import merge
from batchsvc.cli.answers import Asked, Column
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.input_file import ENDPOINTS
from batchsvc.cli.prompt import reading, schema_of
from batchsvc.files.formats import BATCH_COLUMNS
from batchsvc.files.template import NoTextError, text_of

if TYPE_CHECKING:
    import pyarrow as pa

    from batchsvc.cli.client import Client

_TABLES = (".parquet", ".csv", ".tsv")
_KINDS = (*_TABLES, ".jsonl", ".ndjson")
_PACKED = (".gz", ".zst")
_FOREIGN = (".xlsx", ".xls", ".ods", ".arrow", ".feather", ".orc", ".avro")  # whoever opens these expects no JSONL
_ROWS = 1024
_GROUP_BYTES = 32 * 1024 * 1024  # of a row group of Parquet
_FOREIGN_ENDS = ("\u2028", "\u2029", "\u0085")  # what some readers take for the end of a line
Rows = Iterable[tuple[list[int], "pa.RecordBatch"]]


def is_table(path: Path) -> bool:
    """Whether results under this name are always a table; JSONL may also hold the result lines themselves."""
    return _suffix(path) in _TABLES


def default_path(source: Path) -> Path:
    """Where the results of a table go without -o: beside us, under its name and of its kind."""
    kind = _suffix(source)
    stem = source.name.removesuffix(_packing(source))
    return Path(f"{stem.removesuffix(Path(stem).suffix)}.results{kind if kind in _TABLES else '.jsonl'}")


def check_name(path: Path) -> None:
    """Refuse a name that can't be written, before anything is paid for. Raises CommandError."""
    if path.suffix.lower() in _FOREIGN:
        raise CommandError(
            f"{path} can't be written: results are .parquet, .csv, .tsv or .jsonl, not {path.suffix}.", Exit.USAGE
        )
    if _suffix(path) == ".parquet" and _packing(path):
        raise CommandError(f"{path}: Parquet is compressed inside; name it without {_packing(path)}.", Exit.USAGE)


def write_table(
    client: Client,
    batch: dict[str, Any],
    path: Path,
    *,
    source: Path | None,
    schema: Path | None,
    lines: Iterator[bytes] | None = None,
) -> int:
    """Write the results of an ended batch, or these lines, by way of `<path>.partial`, beside the rows of `source`.
    Returns how many rows. Without `source`, the rows are the result lines, with `line` and `custom_id`."""
    described, is_embedding = schema_of(schema), batch.get("endpoint") == ENDPOINTS["embeddings"]
    partial = merge.partial_of(path)
    try:
        with ExitStack() as stack:
            results = _numbered(lines or merge.results(client, batch))
            stack.enter_context(closing(results))
            if source is None:
                count = _write(path, partial, _own_schema(), _own_rows(results), Asked.of(described))
            else:
                table = stack.enter_context(reading(source))
                rows = ((found.lines, found.columns) for found in table.batches())
                has_requests = set(BATCH_COLUMNS) <= set(table.schema.names)  # which may ask for several vectors each
                asked = Asked.of(described, is_vector=is_embedding and not has_requests)
                count = _write(path, partial, table.schema, joined(rows, results), asked)
                _check_count(source, count, (batch.get("request_counts") or {}).get("total"))
        partial.replace(path)
    except OSError as error:
        raise CommandError(f"{path} can't be written: {error.strerror or error}.", Exit.FAILED) from error
    return count


def _check_count(source: Path, count: int, total: int | None) -> None:
    if total is not None and count != total:
        raise CommandError(
            f"{source} has {count:,} rows, and the batch was run on {total:,}: it isn't the table that it was made of.",
            Exit.USAGE,
        )


def _write(
    path: Path,
    partial: Path,
    schema: pa.Schema,
    joined: Iterable[tuple[pa.RecordBatch, list[dict[str, Any] | None]]],
    asked: Asked,
) -> int:
    import pyarrow as pa

    added = [_field(column) for column in asked.columns(schema.names)]
    whole = pa.schema([*schema, *added])
    count = 0
    with _sink(path, partial, whole) as sink:
        for columns, results in joined:
            values = zip(*(asked.values(row) for row in results), strict=True)
            arrays = [pa.array(cells, column.type) for cells, column in zip(values, added, strict=True)]
            sink.write(pa.record_batch([*columns.columns, *arrays], schema=whole))
            count += len(results)
    return count


def joined(
    rows: Rows, results: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[pa.RecordBatch, list[dict[str, Any] | None]]]:
    """Rows with their result lines, by the number of the line."""
    number, row = next(results, (0, None))
    for lines, columns in rows:
        found: list[dict[str, Any] | None] = []
        for line in lines:
            while row is not None and number < line:
                number, row = next(results, (0, None))
            found.append(row if number == line else None)
        yield columns, found


def _own_rows(
    results: Iterator[tuple[int, dict[str, Any]]],
) -> Iterator[tuple[pa.RecordBatch, list[dict[str, Any] | None]]]:
    import pyarrow as pa

    numbers: list[int] = []
    rows: list[dict[str, Any] | None] = []

    def batch() -> tuple[pa.RecordBatch, list[dict[str, Any] | None]]:
        names = [row.get("custom_id") if row else None for row in rows]
        return pa.record_batch(
            [pa.array(numbers, pa.int64()), pa.array(names, pa.string())], schema=_own_schema()
        ), rows

    for number, row in results:
        numbers.append(number)
        rows.append(row)
        if len(rows) == _ROWS:
            yield batch()
            numbers, rows = [], []
    if rows:
        yield batch()


def _own_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema([pa.field("line", pa.int64()), pa.field("custom_id", pa.string())])


def _numbered(lines: Iterable[bytes]) -> Generator[tuple[int, dict[str, Any]], None, None]:
    for line in lines:
        row = orjson.loads(line)
        number = row.get("line")
        if not isinstance(number, int):
            raise CommandError("This server doesn't number its result lines: write them as JSONL, with -o FILE.jsonl.")
        yield number, row


class _Sink(Protocol):
    """A table that is written batch by batch; complete when its context is left."""

    def __enter__(self) -> _Sink: ...

    def __exit__(self, kind: object, /, *_: object) -> None: ...

    def write(self, batch: pa.RecordBatch) -> None: ...


def _sink(path: Path, partial: Path, schema: pa.Schema) -> _Sink:
    kind = _suffix(path)
    if kind == ".parquet":
        return _ParquetSink(partial, schema)
    return _TextSink(partial, _packing(path), schema, delimiter={".csv": ",", ".tsv": "\t"}.get(kind))


class _ParquetSink:
    """Row groups of some megabytes."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0

    def __enter__(self) -> _ParquetSink:
        return self

    def __exit__(self, kind: object, /, *_: object) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def write(self, batch: pa.RecordBatch) -> None:
        self._waiting.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, schema=self._schema))
        self._waiting, self._bytes = [], 0


class _TextSink:
    """CSV with a `delimiter`, or JSONL without."""

    def __init__(self, path: Path, packing: str, schema: pa.Schema, *, delimiter: str | None) -> None:
        from batchsvc.files.arrow_table import IS_JSON

        self._stack = ExitStack()
        raw = self._stack.enter_context(path.open("wb"))
        self._out = self._stack.enter_context(_packer(raw, packing))
        self._names = schema.names
        self._is_json = [bool(column.metadata and IS_JSON.items() <= column.metadata.items()) for column in schema]
        self._delimiter = delimiter
        if delimiter is not None:
            self._out.write(_csv_rows([self._names], delimiter))

    def __enter__(self) -> _TextSink:
        return self

    def __exit__(self, kind: object, /, *_: object) -> None:
        self._stack.close()

    def write(self, batch: pa.RecordBatch) -> None:
        from batchsvc.files.table_reader import values_of

        rows = zip(*(values_of(column) for column in batch.columns), strict=True)
        if self._delimiter is not None:
            self._out.write(_csv_rows(([_cell(value) for value in row] for row in rows), self._delimiter))
        else:
            self._out.write(b"".join(self._json_line(row) for row in rows))

    def _json_line(self, row: tuple[Any, ...]) -> bytes:
        cells = [
            orjson.Fragment(value) if is_json and value is not None else value
            for value, is_json in zip(row, self._is_json, strict=True)
        ]
        line = orjson.dumps(dict(zip(self._names, cells, strict=True)), default=str)
        if not line.isascii():
            for end in _FOREIGN_ENDS:
                line = line.replace(end.encode(), f"\\u{ord(end):04x}".encode())
        return line + b"\n"


def _packer(raw: BinaryIO, packing: str) -> Any:
    match packing:
        case ".gz":
            return gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0)
        case ".zst":
            return zstandard.ZstdCompressor().stream_writer(raw, closefd=False)
        case _:
            return raw


def _csv_rows(rows: Iterable[Iterable[str]], delimiter: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator="\r\n").writerows(rows)  # with "\n" it leaves "\r" unquoted
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    try:
        return text_of(value)
    except NoTextError:
        return ""


def _field(column: Column) -> pa.Field:
    import pyarrow as pa

    from batchsvc.files.arrow_table import IS_JSON

    kinds = {
        "text": pa.string(),
        "integer": pa.int64(),
        "number": pa.float64(),
        "boolean": pa.bool_(),
        "vector": pa.list_(pa.float32()),
    }
    metadata = IS_JSON if column.kind == "json" else None
    return pa.field(column.name, kinds.get(column.kind, pa.string()), metadata=metadata)


def _packing(path: Path) -> str:
    return path.suffix.lower() if path.suffix.lower() in _PACKED else ""


def _suffix(path: Path) -> str:
    """The kind in a name, without its packing."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _PACKED]
    return suffixes[-1] if suffixes and suffixes[-1] in _KINDS else ""
