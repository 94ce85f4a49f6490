"""Versions of the price book: made by import or by a change of one row, with a date, and never changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchsvc import tables
from batchsvc.billing import price_book, pricing, queries, service
from batchsvc.db.session import Database, database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError

ROW = {"input": 3, "cached_input": 2, "output": 5}


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    tables.metadata.create_all(database.engine)
    with database.transaction() as session:
        service.seed_prices(session)
    yield database
    database.dispose()


def set_price(db: Database, model: str = "m", tier: str = "batch_24h", from_text: str | None = None, **row: Any) -> int:
    shown = db.run(lambda session: price_book.set_price(session, model, tier, ROW | row, from_text))
    return int(shown["version"])


def test_a_change_is_a_new_version_that_copies_the_rest(db: Database) -> None:
    assert set_price(db) == 2
    with db.reading() as session:
        first, second = price_book.shown(session, 1)["models"], price_book.shown(session)["models"]
        assert second == first | {"m": {"batch_24h": ROW}}
        assert service.rates_for(session, "smollm2-135m", "standard", 2).input == 20_000_000
    assert set_price(db, output=6) == 3
    with db.reading() as session:
        assert price_book.shown(session, 2)["models"]["m"]["batch_24h"]["output"] == 5, "the old version stays"
        listed = price_book.versions(session)["data"]
        assert [(row["version"], row["is_in_force"]) for row in listed] == [(1, False), (2, False), (3, True)]


def test_a_version_waits_for_its_date(db: Database) -> None:
    assert set_price(db, from_text="2999-01-01") == 2
    with db.reading() as session:
        now = database_now_ms(session)
        start = 32_472_144_000_000
        assert service.current_version(session, now) == 1
        assert service.current_version(session, start - 1) == 1
        assert service.current_version(session, start) == 2, "from its first millisecond on"
    assert set_price(db, from_text="2999-01-01T00:00:00+00:00", input=4) == 3
    with db.reading() as session:
        assert service.current_version(session, start) == 3, "of two at the same millisecond the later one holds"
        assert price_book.shown(session, 3)["models"]["m"]["batch_24h"]["input"] == 4


def test_a_batch_of_the_same_millisecond_has_the_new_prices(db: Database) -> None:
    """What a batch is created with is decided by its own `created_ms`: effective at or before it."""
    set_price(db)
    with db.reading() as session:
        effective = {row["version"]: row["effective_at"] for row in price_book.versions(session)["data"]}
        at = queries.versions(session)[2]
        assert at // 1000 == effective[2]
        assert [service.current_version(session, at + shift) for shift in (-1, 0, 1)] == [1, 2, 2]


@pytest.mark.parametrize("from_text", ["yesterday", "2020-01-01", "2999-13-01"])
def test_dates_that_cannot_be_are_refused(db: Database, from_text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        set_price(db, from_text=from_text)
    assert refused.value.param == "from"


@pytest.mark.parametrize("row", [{"input": -1}, {"output": 1.5}, {"cached_input": True}, {"output": 10**16}])
def test_wrong_prices_are_refused(db: Database, row: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        set_price(db, **row)
    assert refused.value.code == "invalid_price"
    with db.reading() as session:
        assert len(price_book.versions(session)["data"]) == 1


def test_a_book_is_imported_once_and_never_over_another(db: Database) -> None:
    book = {"models": {"m": {"standard": ROW}}}
    made = db.run(lambda session: price_book.add(session, book))
    assert (made["version"], made["models"]) == (2, book["models"])
    again = db.run(lambda session: price_book.add(session, {"version": 2, **book}))
    assert again == made
    other = {"version": 2, "models": {"m": {"standard": ROW | {"input": 4}}}}
    with pytest.raises(InvalidRequestError, match="never changed") as refused:
        db.run(lambda session: price_book.add(session, other))
    assert refused.value.code == "price_version_exists"
    with db.reading() as session, pytest.raises(NotFoundError):
        price_book.shown(session, 9)


@pytest.mark.parametrize("models", [{}, {"": {"standard": ROW}}, {"m": {"standard": ROW | {"extra": 1}}}, {"m": 3}])
def test_books_that_cannot_be_are_refused(models: Any) -> None:
    with pytest.raises(InvalidRequestError):
        pricing.parse_book({"version": 1, "models": models})


def test_changes_at_once_are_one_after_the_other(db: Database) -> None:
    together, made = threading.Barrier(4), []

    def change(no: int) -> None:
        together.wait()
        made.append(set_price(db, model=f"m{no}"))

    threads = [threading.Thread(target=change, args=(no,)) for no in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [2, 3, 4, 5]
    with db.reading() as session:
        assert {f"m{no}" for no in range(4)} < price_book.shown(session, 5)["models"].keys()
