"""Pages as OpenAI's client walks them: `after`, `limit`, `order` in; `data`, `first_id`, `last_id`, `has_more` out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi import Query, Request

from batchsvc.errors import InvalidRequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PageArgs:
    """What a caller asked for. `after` is the id of the last object of the page before."""

    limit: int
    after: str | None
    is_ascending: bool

    def known(self, cursor: T | None) -> T:
        """The cursor, unless it is None because no object has the id `after`: never silently page 1 again."""
        if cursor is None:
            raise InvalidRequestError(f"after: there is no object {self.after}.", code="invalid_value", param="after")
        return cursor


def page_args(*, default: int, most: int) -> Callable[..., PageArgs]:
    """A dependency that reads the page of a listing whose `limit` is 1 to `most`."""

    def read(
        limit: int = Query(default=default, ge=1, le=most),
        after: str | None = Query(default=None, max_length=255),
        order: Literal["asc", "desc"] = "desc",
    ) -> PageArgs:
        return PageArgs(limit, after or None, order == "asc")

    return read


def page_object(found: Sequence[Any], limit: int, show: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """The list object of at most `limit` rows; `found` holds one more if there is another page."""
    data = [show(row) for row in found[:limit]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


def array(request: Request, name: str) -> list[str]:
    """An array of the query: `x[]=a&x[]=b` as the official client writes it, `x=a&x=b`, or `x=a,b`."""
    given = request.query_params.multi_items()
    return [part for key, value in given if key in (name, f"{name}[]") for part in value.split(",") if part]
