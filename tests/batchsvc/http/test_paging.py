"""Pages: whatever the sizes and however many rows share a millisecond, a walk meets every row once, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session
from starlette.requests import Request

from batchsvc.batches.tables import Model
from batchsvc.db.base import Base
from batchsvc.db.keyset import Cursor, page
from batchsvc.errors import InvalidRequestError
from batchsvc.http.paging import PageArgs, array, page_object


@given(st.lists(st.integers(0, 4), max_size=14), st.integers(1, 6), st.booleans())
def test_a_walk_meets_every_row_once(times: list[int], limit: int, ascending: bool) -> None:
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine, tables=[Base.metadata.tables["models"]])
    with Session(engine) as session:
        session.add_all(Model(id=f"m{number:02}", created_ms=ms) for number, ms in enumerate(times))
        session.flush()
        oracle = sorted(((ms, f"m{number:02}") for number, ms in enumerate(times)), reverse=not ascending)
        walked, after = [], None
        while True:
            query = page(select(Model), Model.created_ms, Model.id, after, limit + 1, ascending)
            found = session.scalars(query).all()
            shown = page_object(found, limit, lambda row: {"id": row.id})
            walked += [item["id"] for item in shown["data"]]
            assert len(shown["data"]) <= limit
            assert not (shown["has_more"] and not shown["data"]), "has_more on an empty page never ends"
            if not shown["has_more"]:
                break
            last = found[limit - 1]
            assert last.id == shown["last_id"]
            after = Cursor(last.created_ms, last.id)
        assert walked == [key for _, key in oracle]
    engine.dispose()


def test_an_unknown_cursor_is_never_page_one() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        PageArgs(20, "gone", False).known(None)
    assert refused.value.param == "after"


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("x[]=a&x[]=b", ["a", "b"]),
        ("x%5B%5D=a&x=b,c", ["a", "b", "c"]),
        ("x=a,,b&y=c", ["a", "b"]),
        ("", []),
    ],
)
def test_arrays_of_a_query(query: str, values: list[str]) -> None:
    request = Request({"type": "http", "query_string": query.encode(), "headers": []})
    assert array(request, "x") == values
