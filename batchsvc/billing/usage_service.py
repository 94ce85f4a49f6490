"""Answers questions about usage and costs: OpenAI's pages of buckets, with our extensions as further fields.

Costs are usage and what was given back of it, each in the day in which it was posted, as invoices have it: a month's
costs are the net amount of its invoice and of the credit notes that were issued in it. What is asked is read and added
up; nothing is stored, so asking a hundred times changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.billing import correction_queries, service, usage_queries
from batchsvc.billing.line_items import CORRECTIONS, Item, Usage, items
from batchsvc.billing.usage import Bucket, Kind, Question, page_of, parse, spans
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError
from batchsvc.money import NANOS_PER_DOLLAR, Rates

_COLUMNS = {"service_tier": "tier"}  # every other group is the column of its name
_FILTERS = {"project_ids": "project_id", "api_key_ids": "api_key_id", "models": "model", "batch_ids": "batch_id"}
_ALWAYS: Mapping[str, Any] = {"user_id": None, "api_source": "unlabeled"}  # the same for all that we run
_PRICE_ROW = ("model", "tier", "price_version")

Group = tuple[tuple[str, Any], ...]  # (name, value) of everything that was grouped by


def answer(
    session: Session, kind: Kind, arguments: Sequence[tuple[str, str]], *, test_project_id: str | None = None
) -> dict[str, Any]:
    """The page of buckets that the arguments of a URL ask for. Raises InvalidRequestError, which names one.

    With `test_project_id` it is that of this project for tests alone; without, nothing of test mode is in it.
    """
    question = parse(kind, arguments)
    if test_project_id is not None:
        question = replace(question, filters={**question.filters, "project_ids": (test_project_id,)})
    elif asked := question.filters.get("project_ids"):
        live = tuple(project_id for project_id in asked if not mode.is_test(project_id))
        question = replace(question, filters={**question.filters, "project_ids": live})
    page = page_of(question, database_now_ms(session) // 1000)
    results = _results(session, question, page.buckets)
    return {
        "object": "page",
        "data": [
            {
                "object": "bucket",
                "start_time": bucket.start_s,
                "end_time": bucket.end_s,
                "results": results.get(bucket.start_s, []),
            }
            for bucket in page.buckets
        ],
        "has_more": page.next_page is not None,
        "next_page": page.next_page,
    }


def _results(session: Session, question: Question, buckets: Sequence[Bucket]) -> dict[int, list[dict[str, Any]]]:
    """Results by the start of their bucket."""
    if not buckets or question.filters.get("user_ids"):
        return {}  # keys belong to projects
    found: dict[int, list[dict[str, Any]]] = {}
    if question.kind == Kind.COSTS:
        for start_s, amounts in _costs(session, question, buckets).items():
            found[start_s] = [_cost_result(question, *entry) for entry in _ordered(amounts)]
    else:
        for start_s, usages in _usages(session, question, buckets).items():
            found[start_s] = [_usage_result(question, *entry) for entry in _ordered(usages)]
    if "batch_id" in question.group_by:
        _add_metadata(session, [result for results in found.values() for result in results])
    return found


def _usages(session: Session, question: Question, buckets: Sequence[Bucket]) -> dict[int, dict[Group, Usage]]:
    names = [name for name in question.group_by if name not in _ALWAYS]
    found: dict[int, dict[Group, Usage]] = defaultdict(lambda: defaultdict(Usage))
    for start_s, values, usage in _sums(session, question, buckets, [_COLUMNS.get(name, name) for name in names]):
        found[start_s][tuple(zip(names, values, strict=True))] += usage
    return found


def _costs(session: Session, question: Question, buckets: Sequence[Bucket]) -> dict[int, dict[Group, list[Item]]]:
    names = [name for name in question.group_by if name not in (*_ALWAYS, "line_item")]
    columns = [_COLUMNS.get(name, name) for name in names]
    extra = _PRICE_ROW if question.by_line_item else ()
    rates: dict[tuple[Any, ...], Rates | None] = {}
    wanted = question.filters.get("line_items")
    found: dict[int, dict[Group, list[Item]]] = defaultdict(lambda: defaultdict(list))
    for start_s, values, usage in _sums(session, question, buckets, [*columns, *extra]):
        group = tuple(zip(names, values[: len(names)], strict=True))
        if not question.by_line_item:
            found[start_s][group].append(Item("", "", None, None, usage.cost_nanos))
            continue
        model, tier, version = price_row = values[len(names) :]
        if price_row not in rates:
            rates[price_row] = _rates(session, model, tier, version)
        for item in items(model, tier, rates[price_row], usage):
            if wanted is None or item.name in wanted:
                named = (("line_item", item.name),) if "line_item" in question.group_by else ()
                found[start_s][group + named].append(item)
    for start_s, values, kind, amount in _corrections(session, question, buckets, columns):
        name = CORRECTIONS[kind]
        if wanted is None or name in wanted:
            named = (("line_item", name),) if "line_item" in question.group_by else ()
            group = tuple(zip(names, values, strict=True)) + named
            found[start_s][group].append(Item(name, name, None, None, amount))
    return found


def _corrections(
    session: Session, question: Question, buckets: Sequence[Bucket], keys: Sequence[str]
) -> Iterable[tuple[int, tuple[Any, ...], str, int]]:
    """(start of the bucket in seconds, values of `keys`, kind, amount) of what was given back, when that was posted."""
    start_s = buckets[0].start_s
    found = correction_queries.sums(
        session,
        start_ms=start_s * 1000,
        end_ms=buckets[-1].end_s * 1000,
        width_ms=question.width.seconds * 1000,
        keys=keys,
        filters=_column_filters(question),
    )
    for bucket_ms, values, kind, amount in found:
        yield max(bucket_ms // 1000, start_s), values, kind, amount


def _column_filters(question: Question) -> dict[str, Sequence[str]]:
    return {_FILTERS[name]: values for name, values in question.filters.items() if name in _FILTERS}


def _sums(
    session: Session, question: Question, buckets: Sequence[Bucket], keys: Sequence[str]
) -> Iterable[tuple[int, tuple[Any, ...], Usage]]:
    """(start of the bucket in seconds, values of `keys`, sums); a bucket and its keys may come more than once."""
    start_s, width_ms = buckets[0].start_s, question.width.seconds * 1000
    for whole_hours, begin_ms, end_ms in spans(start_s * 1000, buckets[-1].end_s * 1000, width_ms):
        found = usage_queries.sums(
            session,
            whole_hours=whole_hours,
            start_ms=begin_ms,
            end_ms=end_ms,
            width_ms=width_ms,
            keys=keys,
            filters=_column_filters(question),
            embeddings=None if question.kind == Kind.COSTS else question.kind == Kind.EMBEDDINGS,
            in_batches=question.batch,
            is_test=any(map(mode.is_test, question.filters.get("project_ids", ()))),
        )
        for bucket_ms, values, usage in found:
            yield max(bucket_ms // 1000, start_s), values, usage


def _rates(session: Session, model: str, tier: str, version: int) -> Rates | None:
    try:
        return service.rates_for(session, model, tier, version)
    except InvalidRequestError:
        return None


def _usage_result(question: Question, group: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "object": f"organization.usage.{question.kind}.result",
        "input_tokens": usage.input_tokens,
        "num_model_requests": usage.requests,
    }
    uncached = usage.input_tokens - usage.cached_tokens
    if question.kind == Kind.COMPLETIONS:
        shown |= {
            "output_tokens": usage.output_tokens,
            "input_cached_tokens": usage.cached_tokens,
            "input_uncached_tokens": uncached,
            "input_cache_write_tokens": 0,
            "input_text_tokens": uncached,
            "input_cached_text_tokens": usage.cached_tokens,
            "output_text_tokens": usage.output_tokens,
            "input_audio_tokens": 0,
            "input_cached_audio_tokens": 0,
            "output_audio_tokens": 0,
            "input_image_tokens": 0,
            "input_cached_image_tokens": 0,
            "output_image_tokens": 0,
        }
        names: tuple[str, ...] = ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier", "api_source")
    else:
        shown["input_cached_tokens"] = usage.cached_tokens
        names = ("project_id", "user_id", "api_key_id", "model")
    return {**shown, "cost_nanos": usage.cost_nanos, **_group_fields(question, names, group)}


def _cost_result(question: Question, group: Mapping[str, Any], found: Sequence[Item]) -> dict[str, Any]:
    amount = sum(item.amount_nanos for item in found)
    by_item = "line_item" in question.group_by and found[0].tokens is not None
    rates = {item.rate_nanos for item in found}
    shown = {
        "object": "organization.costs.result",
        # the one place where money becomes a float: the nearest to the exact quotient of two integers
        "amount": {"value": amount / NANOS_PER_DOLLAR, "currency": "usd"},
        "amount_nanos": amount,
        "line_item": group.get("line_item"),
        "quantity": sum(item.tokens or 0 for item in found) if by_item else None,
        "quantity_unit": "tokens" if by_item else None,
        "rate_nanos": rates.pop() if by_item and len(rates) == 1 else None,
    }
    return {**shown, **_group_fields(question, ("project_id", "user_id", "api_key_id", "api_source"), group)}


def _group_fields(question: Question, names: Sequence[str], group: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's group fields, null unless grouped by, and the extensions that were asked for."""
    values = {**group, **{name: _ALWAYS[name] for name in question.group_by if name in _ALWAYS}}
    shown = {name: values.get(name) for name in names}
    own = {name: value for name, value in values.items() if name not in names and name != "line_item"}
    return {**shown, **own}


def _add_metadata(session: Session, results: Sequence[dict[str, Any]]) -> None:
    found = usage_queries.metadata_of(session, {result["batch_id"] for result in results if result["batch_id"]})
    for result in results:
        result["metadata"] = found.get(result["batch_id"])


def _ordered(groups: Mapping[Group, Any]) -> list[tuple[dict[str, Any], Any]]:
    """Groups in an order that is the same every time."""
    return [
        (dict(group), groups[group])
        for group in sorted(groups, key=lambda group: [(name, value is not None, value) for name, value in group])
    ]
