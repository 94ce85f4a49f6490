"""The registry of models: names, aliases, and what a batch that pinned them still sees."""

from __future__ import annotations

import pytest

from batchsvc.batches import models
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError, NotFoundError


def test_names_and_aliases(database_url: str) -> None:
    migrate.upgrade(database_url)
    database = Database(database_url)
    with database.transaction() as session:
        for name in ("small", "/models/My Model.gguf", "hf:owner/name"):
            models.register(session, name, "/p", digest="aa" * 32, context_tokens=100)
        models.register(session, "small", "/q", digest="bb" * 32, context_tokens=200, kv_format="float32")
        small = models.resolve(session, "small")
        assert small is not None and (small.digest, small.path, small.kv_format) == ("bb" * 32, "/q", "float32")
        assert models.resolve(session, "gpt-4o-mini") is None
        models.alias(session, "gpt-4o-mini", "small")
        models.alias(session, "gpt", "gpt-4o-mini")  # an alias of an alias names the model itself
        assert models.alias_table(session) == {"gpt-4o-mini": "small", "gpt": "small"}
        pinned = models.alias_table(session)
        for aliases in (None, pinned):
            found = models.resolve(session, "gpt", aliases)
            assert found is not None and found.id == "small"
        assert [row.id for row in models.list_models(session)][-2:] == ["gpt-4o-mini", "gpt"]
        models.alias(session, "gpt", "hf:owner/name")
        models.unalias(session, "gpt-4o-mini")
        now, then = models.resolve(session, "gpt"), models.resolve(session, "gpt", pinned)
        assert now is not None and now.id == "hf:owner/name"
        assert then is not None and then.id == "small"
        assert models.resolve(session, "gpt-4o-mini", pinned) is not None
        assert models.resolve(session, "gpt", {}) is None, "a name that was no alias then is none now"
        with pytest.raises(NotFoundError):
            models.alias(session, "x", "nope")
        with pytest.raises(NotFoundError):
            models.unalias(session, "small")
        for wrong in (
            lambda: models.alias(session, "small", "small"),
            lambda: models.register(session, "gpt", "/p", digest="cc" * 32, context_tokens=1),
            lambda: models.register(session, " ", "/p", digest="cc" * 32, context_tokens=1),
            lambda: models.alias(session, "x" * 256, "small"),
        ):
            with pytest.raises(InvalidRequestError):
                wrong()
    database.dispose()
