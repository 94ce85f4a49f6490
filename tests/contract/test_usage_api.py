"""The official client asks for usage and costs: buckets, pages, groups, refusals; and asking writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from sqlalchemy import func, select

from batchsvc.billing import service as billing
from batchsvc.db.session import database_now_ms
from batchsvc.money import Rates, line_cost_nanos
from batchsvc.tables import metadata
from tests.contract.conftest import Api

DAY_S = 86_400
_numbers = count(1)
BATCH_RATES = Rates(input=10_000_000, cached_input=2_500_000, output=40_000_000)


def post(api: Api, at_ms: int, **changes: Any) -> SimpleNamespace:
    """One part with one delivered line, committed at that time, and its batch."""
    number = next(_numbers)
    said = {"model": "smollm2-135m", "key": "key1", "project": api.project_id, "input": 37, "cached": 16, "output": 5}
    said |= {"endpoint": "/v1/chat/completions", "batch": f"batch_{number}"} | changes
    batch = SimpleNamespace(
        id=said["batch"],
        project_id=said["project"],
        api_key_id=said["key"],
        model_id=said["model"],
        tier="batch_24h",
        endpoint=said["endpoint"],
        price_version=1,
        reserved_nanos=10**9,
        fin_epoch=1,
    )
    tokens = {"input_tokens": said["input"], "cached_tokens": said["cached"], "output_tokens": said["output"]}
    cost = line_cost_nanos(BATCH_RATES, **tokens)
    part = SimpleNamespace(id=f"part_{number}", lines_ok=1, cost_nanos=cost, created_ms=at_ms, **tokens)
    with api.db.transaction() as session:
        billing.post_part(session, batch, part)
    return SimpleNamespace(batch=batch, part=part, cost=cost)


@pytest.fixture
def usage(api: Api) -> Iterator[Any]:
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", admin_api_key=api.admin_key, max_retries=0)
    yield client.admin.organization.usage
    client.close()


@pytest.fixture
def today_s(api: Api) -> int:
    with api.db.reading() as session:
        return database_now_ms(session) // 1000 // DAY_S * DAY_S


def test_buckets_of_a_day_with_and_without_usage(api: Api, usage: Any, today_s: int) -> None:
    first = (today_s - 5 * DAY_S) * 1000
    made = [post(api, first), post(api, first + DAY_S * 1000 - 1), post(api, first + DAY_S * 1000, output=7)]
    page = usage.completions(start_time=today_s - 6 * DAY_S, project_ids=[api.project_id])
    assert (page.object, page.has_more, page.next_page) == ("page", False, None)
    starts = [bucket.start_time for bucket in page.data]
    assert starts == [today_s - day * DAY_S for day in (6, 5, 4, 3, 2, 1, 0)]
    assert all(bucket.object == "bucket" and bucket.end_time == bucket.start_time + DAY_S for bucket in page.data)
    assert [len(bucket.results) for bucket in page.data] == [0, 1, 1, 0, 0, 0, 0]
    (result,) = page.data[1].results
    assert result.object == "organization.usage.completions.result"
    assert (result.input_tokens, result.input_cached_tokens, result.input_uncached_tokens) == (74, 32, 42)
    assert (result.output_tokens, result.num_model_requests, result.input_cache_write_tokens) == (10, 2, 0)
    groups = (result.project_id, result.api_key_id, result.model, result.batch, result.service_tier, result.user_id)
    assert groups == (None,) * 6
    assert page.data[2].results[0].output_tokens == 7
    costs = usage.costs(start_time=today_s - 6 * DAY_S, project_ids=[api.project_id])
    amounts = [[result.model_extra["amount_nanos"] for result in bucket.results] for bucket in costs.data]
    assert amounts == [[], [made[0].cost + made[1].cost], [made[2].cost], [], [], [], []]
    (result,) = costs.data[2].results
    assert result.object == "organization.costs.result"
    assert (result.amount.value, result.amount.currency) == (made[2].cost / 1_000_000_000, "usd")
    assert (result.line_item, result.quantity, result.project_id) == (None, None, None)


def test_pages_are_walked_by_their_cursor_and_hold_each_bucket_once(api: Api, usage: Any, today_s: int) -> None:
    for day in range(9):
        post(api, (today_s - day * DAY_S) * 1000 + day)
    asked: dict[str, Any] = {"start_time": today_s - 9 * DAY_S + 3600, "project_ids": [api.project_id]}
    for call in (usage.completions, usage.costs):
        for limit in (1, 2, 3, 31):
            seen, page, more = [], None, {}
            while page is None or page.has_more:
                page = call(**asked, limit=limit, **more)
                assert 1 <= len(page.data) <= limit and page.has_more == (page.next_page is not None)
                seen += [(bucket.start_time, bucket.end_time, len(bucket.results)) for bucket in page.data]
                more = {"page": page.next_page}
            ends = [today_s - day * DAY_S for day in range(8, -2, -1)]
            starts = [asked["start_time"], *ends[:-1]]  # the first is cut where the question begins
            assert seen == list(zip(starts, ends, [0] + [1] * 9, strict=True))
    page = usage.completions(**asked, limit=1)
    for other in ({"limit": 1, "bucket_width": "1h"}, {"group_by": ["model"]}, {"models": ["x"]}):
        with pytest.raises(openai.BadRequestError) as refused:
            usage.completions(**asked, **other, page=page.next_page)
        assert refused.value.param == "page"


def test_hours_and_minutes(api: Api, usage: Any, today_s: int) -> None:
    start = today_s - DAY_S
    for second in (0, 59, 60, 3599, 3600, 7199):
        post(api, (start + second) * 1000 + 999)
    only = {"project_ids": [api.project_id]}

    def requests(**asked: Any) -> list[int]:
        page = usage.completions(**asked, **only)
        return [sum(result.num_model_requests for result in bucket.results) for bucket in page.data]

    assert requests(start_time=start, bucket_width="1h") == [4, 2] + [0] * 22
    assert requests(start_time=start, bucket_width="1m") == [2, 1] + [0] * 57 + [1]
    assert requests(start_time=start, end_time=start + 7200, bucket_width="1m", limit=1440)[60] == 1
    assert requests(start_time=start + 59, end_time=start + 61, bucket_width="1m") == [1, 1]
    assert requests(start_time=start + 59, end_time=start + 3600, bucket_width="1h") == [3]
    assert requests(start_time=start + 60, end_time=start + 3601, bucket_width="1d") == [3]
    for width, most in (("1m", 1440), ("1h", 168), ("1d", 31)):
        assert len(usage.completions(start_time=0, bucket_width=width, limit=most).data) == most
        with pytest.raises(openai.BadRequestError) as refused:
            usage.completions(start_time=0, bucket_width=width, limit=most + 1)
        assert refused.value.param == "limit"
    assert len(usage.costs(start_time=0, limit=180).data) == 180
    assert [len(usage.completions(start_time=0, bucket_width=width).data) for width in ("1m", "1h", "1d")] == [
        60,
        24,
        7,
    ]
    assert len(usage.costs(start_time=0).data) == 7


def test_groups_and_filters(api: Api, usage: Any, today_s: int) -> None:
    at, other = (today_s - DAY_S) * 1000, api.new_project()[0]
    post(api, at, model="a", key="k1", batch="batch_x", input=10, cached=0)
    post(api, at, model="b", key="k1", input=20, cached=0)
    post(api, at, model="b", key="k2", input=40, cached=0)
    post(api, at, model="b", key="k3", project=other, input=80, cached=0)
    post(api, at, model="e", key="k1", endpoint="/v1/embeddings", input=160, cached=0, output=0)
    asked: dict[str, Any] = {
        "start_time": today_s - DAY_S,
        "end_time": today_s,
        "project_ids": [api.project_id, other],
    }

    def by(*names: str, **more: Any) -> list[tuple[Any, ...]]:
        (bucket,) = usage.completions(**asked | more, group_by=list(names)).data
        return [(*(result.to_dict().get(name) for name in names), result.input_tokens) for result in bucket.results]

    assert by("model") == [("a", 10), ("b", 140)]
    assert by("api_key_id", "model") == [("k1", "a", 10), ("k1", "b", 20), ("k2", "b", 40), ("k3", "b", 80)]
    assert sorted(by("project_id")) == sorted([(api.project_id, 70), (other, 80)])
    assert by("batch", "service_tier", "user_id", "api_source") == [(True, "batch_24h", None, "unlabeled", 150)]
    assert by("model", models=["b"], api_key_ids=["k1", "k3"]) == [("b", 100)]
    assert by("model", project_ids=[other]) == [("b", 80)]
    assert by("model", batch=True) == by("model")
    assert by("model", batch=False) == by("model", user_ids=["u"]) == by("model", models=["none"]) == []
    assert by("batch_id", models=["a"]) == [("batch_x", 10)]
    (bucket,) = usage.embeddings(**asked, group_by=["model", "project_id"]).data
    (result,) = bucket.results
    assert result.object == "organization.usage.embeddings.result"
    assert (result.input_tokens, result.num_model_requests, result.model) == (160, 1, "e")
    assert result.project_id == api.project_id
    (bucket,) = usage.costs(**asked, group_by=["project_id", "api_key_id"]).data
    assert {(r.project_id, r.api_key_id) for r in bucket.results} == {
        (api.project_id, "k1"),
        (api.project_id, "k2"),
        (other, "k3"),
    }


def test_line_items_add_up_to_the_cost(api: Api, usage: Any, today_s: int) -> None:
    at = (today_s - DAY_S) * 1000
    made = [post(api, at, input=37, cached=16 * (i % 3), output=i) for i in range(7)]
    total = sum(item.cost for item in made)
    asked: dict[str, Any] = {"start_time": today_s - DAY_S, "end_time": today_s, "project_ids": [api.project_id]}
    (bucket,) = usage.costs(**asked, group_by=["line_item"]).data
    items = {result.line_item: result for result in bucket.results}
    assert sum(result.model_extra["amount_nanos"] for result in items.values()) == total
    output = items["smollm2-135m, batch_24h, output_tokens"]
    assert (output.quantity, output.quantity_unit, output.model_extra["amount_nanos"]) == (21, "tokens", 21 * 40)
    assert items["smollm2-135m, batch_24h, cached_input_tokens"].quantity == sum(p.part.cached_tokens for p in made)
    (bucket,) = usage.costs(**asked, line_items=[output.line_item]).data
    assert [result.model_extra["amount_nanos"] for result in bucket.results] == [21 * 40]
    assert bucket.results[0].line_item is None


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("usage/completions", "", "start_time"),
        ("usage/completions", "start_time=x", "start_time"),
        ("usage/completions", "start_time=-1", "start_time"),
        ("usage/completions", "start_time=1.5", "start_time"),
        ("usage/completions", "start_time=1730419200000", "start_time"),
        ("usage/completions", "start_time=1&start_time=2", "start_time"),
        ("usage/completions", "start_time=10&end_time=10", "end_time"),
        ("usage/completions", "start_time=10&end_time=9", "end_time"),
        ("usage/completions", "start_time=1&end_time=", "end_time"),
        ("usage/completions", "start_time=1&limit=0", "limit"),
        ("usage/completions", "start_time=1&limit=32", "limit"),
        ("usage/completions", "start_time=1&limit=many", "limit"),
        ("usage/completions", "start_time=1&bucket_width=2d", "bucket_width"),
        ("usage/completions", "start_time=1&group_by[]=colour", "group_by"),
        ("usage/completions", "start_time=1&group_by=model,line_item", "group_by"),
        ("usage/completions", "start_time=1&batch=maybe", "batch"),
        ("usage/completions", "start_time=1&page=page_2", "page"),
        ("usage/completions", "start_time=1&page=page_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "page"),
        ("usage/completions", "start_time=1&after=batch_1", "after"),
        ("usage/completions", "start_time=1&project=x", "project"),
        ("usage/embeddings", "start_time=1&group_by[]=batch", "group_by"),
        ("usage/embeddings", "start_time=1&batch=true", "batch"),
        ("costs", "start_time=1&bucket_width=1h", "bucket_width"),
        ("costs", "start_time=1&limit=181", "limit"),
        ("costs", "start_time=1&limit=0", "limit"),
        ("costs", "start_time=1&group_by[]=batch", "group_by"),
    ],
)
def test_a_wrong_question_is_refused_by_name(api: Api, path: str, query: str, param: str) -> None:
    answer = api.call("GET", f"/v1/organization/{path}?{query}", api.admin_key)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error


def test_only_admin_keys_may_ask(api: Api) -> None:
    for path in ("usage/completions", "usage/embeddings", "costs"):
        url = f"/v1/organization/{path}?start_time=1"
        assert api.call("GET", url, api.admin_key).status_code == 200
        assert api.call("GET", url, api.key).status_code == 403
        assert api.call("GET", url, None).status_code == 401
        assert api.call("GET", url, "sk_wrong").status_code == 401


def test_what_a_void_takes_back_counts_where_it_was_committed(api: Api, usage: Any, today_s: int) -> None:
    made = post(api, (today_s - 2 * DAY_S) * 1000)
    with api.db.transaction() as session:
        billing.post_void(session, made.batch, made.part)
    asked: dict[str, Any] = {"start_time": today_s - 2 * DAY_S, "project_ids": [api.project_id]}
    amounts = [
        [result.model_extra["amount_nanos"] for result in bucket.results] for bucket in usage.costs(**asked).data
    ]
    assert amounts == [[made.cost], [], [-made.cost]]
    tokens = [
        [(result.input_tokens, result.num_model_requests) for result in bucket.results]
        for bucket in usage.completions(**asked).data
    ]
    assert tokens == [[(37, 1)], [], [(-37, -1)]]


def test_a_hundred_parallel_questions_write_nothing(api: Api, today_s: int) -> None:
    post(api, today_s * 1000)

    def rows() -> dict[str, int]:
        with api.db.reading() as session:
            return {
                name: session.scalar(select(func.count()).select_from(table)) or 0
                for name, table in metadata.tables.items()
            }

    before = rows()
    paths = [
        f"/v1/organization/{path}?start_time={today_s - DAY_S}&group_by[]=model"
        for path in ("usage/completions", "costs")
    ]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda i: api.call("GET", paths[i % 2], api.admin_key), range(100)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 2
    assert rows() == before
