"""SQL of usage: sums by bucket and group, of whole hours from the rollup and of less from the usage rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Select, column, func, literal_column, select, table
from sqlalchemy import String as Text
from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.billing.line_items import Usage
from batchsvc.billing.queries import NO_BATCH
from batchsvc.billing.tables import UsageHour, UsageRow
from batchsvc.db.base import Json

# a batch's metadata stay with the batch: billing comes before batches and knows only where they are written
_BATCHES = table("batches", column("id", Text), column("metadata", Json))
_METADATA = "metadata."
_IDS_AT_ONCE = 500

_EMBEDDINGS = "/v1/embeddings"
_SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")


def sums(
    session: Session,
    *,
    whole_hours: bool,
    start_ms: int,
    end_ms: int,
    width_ms: int,
    keys: Sequence[str],
    filters: Mapping[str, Collection[str]],
    embeddings: bool | None = None,
    in_batches: bool | None = None,
    is_test: bool = False,
) -> Iterator[tuple[int, tuple[Any, ...], Usage]]:
    """(start of the bucket, values of `keys`, sums) of all usage from `start_ms` until before `end_ms`.

    Keys and filters are names of columns that usage rows and hours share, `metadata.<key>`, or `batch`: whether it was
    used in one. `embeddings` and `in_batches`: only these (True), all but these (False), or everything. `is_test`:
    that of test mode, which is never among the other. Served by ix_usage_hours_time and ix_usage_created.
    """
    query = query_of(whole_hours, start_ms, end_ms, width_ms, keys)
    source = _source(whole_hours)
    of_tests = source.project_id.like(mode.LIKE, escape="\\")
    query = query.where(of_tests if is_test else ~of_tests)
    for name, allowed in filters.items():
        query = query.where(getattr(source, name).in_(allowed))
    if embeddings is not None:
        is_embedding = source.endpoint == _EMBEDDINGS
        query = query.where(is_embedding if embeddings else ~is_embedding)
    if in_batches is not None:
        query = query.where(_is_in_batch(source) if in_batches else ~_is_in_batch(source))
    for bucket, *rest in session.execute(query):
        values = tuple(map(_shown, keys, rest))
        yield bucket, values, Usage(**{name: int(n) for name, n in zip(_SUMS, rest[len(keys) :], strict=True)})


def query_of(whole_hours: bool, start_ms: int, end_ms: int, width_ms: int, keys: Sequence[str]) -> Select[Any]:
    """The query without filters, for its plan to be looked at."""
    source = _source(whole_hours)
    time = UsageHour.hour_ms if whole_hours else UsageRow.created_ms
    # in the text, not bound: PostgreSQL must see that what is selected is what is grouped by
    width: ColumnElement[int] = literal_column(str(int(width_ms)), BigInteger)
    bucket = (time // width * width).label("bucket")
    columns = [_key(source, key).label(f"key_{i}") for i, key in enumerate(keys)]
    query = (
        select(bucket, *columns, *(func.sum(getattr(source, name)) for name in _SUMS))
        .where(time >= start_ms, time < end_ms)
        .group_by(literal_column("bucket"), *(literal_column(f"key_{i}") for i in range(len(keys))))
    )
    if any(key.startswith(_METADATA) for key in keys):
        query = query.join_from(source, _BATCHES, _BATCHES.c.id == source.batch_id, isouter=True)
    return query


def _source(whole_hours: bool) -> Any:
    return UsageHour if whole_hours else UsageRow


def _is_in_batch(source: Any) -> ColumnElement[bool]:
    found: ColumnElement[bool] = source.batch_id != NO_BATCH
    return found


def _shown(key: str, value: Any) -> Any:
    if key == "batch":
        return bool(value)
    return None if key == "batch_id" and value == NO_BATCH else value


def _key(source: Any, key: str) -> ColumnElement[Any]:
    if key == "batch":
        return _is_in_batch(source)
    if not key.startswith(_METADATA):
        plain: ColumnElement[Any] = getattr(source, key)
        return plain
    value: ColumnElement[Any] = _BATCHES.c.metadata[key.removeprefix(_METADATA)].as_string()
    return value


def metadata_of(session: Session, batch_ids: Collection[str]) -> dict[str, dict[str, str]]:
    """The metadata of batches by id; those that have none are left out."""
    found: dict[str, dict[str, str]] = {}
    ids = sorted(batch_ids)
    for at in range(0, len(ids), _IDS_AT_ONCE):
        some = select(_BATCHES.c.id, _BATCHES.c.metadata).where(_BATCHES.c.id.in_(ids[at : at + _IDS_AT_ONCE]))
        found.update((batch_id, data) for batch_id, data in session.execute(some) if data)
    return found
