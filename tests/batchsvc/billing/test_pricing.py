"""The price book: what is shipped, what is refused, and that a reservation is never too small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from batchsvc import tables
from batchsvc.billing import pricing, service
from batchsvc.billing.tables import Price
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError
from batchsvc.money import Rates, line_cost_nanos

RATE = st.integers(0, 10**11)
RATES = st.builds(Rates, input=RATE, cached_input=RATE, output=RATE)


def test_the_shipped_book_is_the_designs_and_a_batch_costs_exactly_half() -> None:
    book = pricing.shipped_book()
    for model in ("smollm2-135m", "default"):
        standard, batch = book.rates[model, "standard"], book.rates[model, "batch_24h"]
        assert standard == Rates(input=20_000_000, cached_input=5_000_000, output=80_000_000)
        for kind in pricing.KINDS:
            assert 2 * getattr(batch, kind) == getattr(standard, kind)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, "5"])
def test_a_wrong_price_is_refused_by_name(wrong: Any) -> None:
    data = {"version": 1, "models": {"m": {"standard": {"input": 1, "cached_input": wrong, "output": 1}}}}
    with pytest.raises(InvalidRequestError, match="cached_input of m, standard"):
        pricing.parse_book(data)


@pytest.mark.parametrize("wrong", [None, [], {"version": 1}, {"version": 0, "models": {}}, {"version": 1, "models": 3}])
def test_what_is_no_price_book_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError):
        pricing.parse_book(wrong)


@given(RATES, st.integers(0, 10**6), st.integers(1, 10**6), st.data())
def test_no_delivered_line_costs_more_than_was_reserved(
    rates: Rates, prompt: int, max_tokens: int, data: st.DataObject
) -> None:
    planned = data.draw(st.integers(0, prompt))
    most = pricing.most_nanos(rates, input_tokens=prompt, planned_cached_tokens=planned, max_tokens=max_tokens)
    cached = data.draw(st.integers(planned, prompt))
    output = data.draw(st.integers(0, max_tokens))
    assert line_cost_nanos(rates, input_tokens=prompt, cached_tokens=cached, output_tokens=output) <= most


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    tables.metadata.create_all(database.engine)
    yield database
    database.dispose()


def test_prices_are_looked_up_by_model_then_default_and_never_change(db: Database) -> None:
    with db.transaction() as session:
        with pytest.raises(InvalidRequestError) as refused:
            service.current_version(session)
        assert refused.value.code == "model_not_priced"
    for _ in range(2):
        with db.transaction() as session:
            service.seed_prices(session)
    with db.transaction() as session:
        assert service.current_version(session) == 1
        assert session.scalar(select(func.count()).select_from(Price)) == 12
        for model in ("smollm2-135m", "/models/some/path.gguf"):
            rates = service.rates_for(session, model, "batch_24h", 1)
            assert rates == Rates(input=10_000_000, cached_input=2_500_000, output=40_000_000)
        changed = pricing.parse_book(
            {"version": 1, "models": {"default": {"standard": {"input": 1, "cached_input": 1, "output": 1}}}}
        )
        service.publish_book(session, changed)
        assert service.rates_for(session, "default", "standard", 1).input == 20_000_000


def test_an_unpriced_model_is_refused(db: Database) -> None:
    book = pricing.parse_book(
        {"version": 4, "models": {"m": {"standard": {"input": 1, "cached_input": 1, "output": 1}}}}
    )
    with db.transaction() as session:
        service.publish_book(session, book)
        assert service.current_version(session) == 4
        assert service.rates_for(session, "m", "standard", 4) == Rates(input=1, cached_input=1, output=1)
        for model, tier, version in (("x", "standard", 4), ("m", "batch_24h", 4), ("m", "standard", 3)):
            with pytest.raises(InvalidRequestError) as refused:
                service.rates_for(session, model, tier, version)
            assert refused.value.code == "model_not_priced"
