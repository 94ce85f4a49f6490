"""Bodies that a command hands to the database, checked as the API would check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from batchsvc.cli.exits import CommandError, Exit

B = TypeVar("B", bound=BaseModel)


def checked(model: type[B], body: Mapping[str, Any]) -> B:
    """The body. Raises CommandError with the first thing that the API would refuse, without the value."""
    try:
        return model.model_validate(dict(body))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CommandError(f"Invalid '{where}': {first['msg']}.", Exit.USAGE) from None
