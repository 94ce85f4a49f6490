"""The registry of models: names, aliases, and what a batch that pinned them still sees."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from batchsvc.accounts import service as accounts
from batchsvc.batches import models, queries, worker_queries
from batchsvc.batches.incident_schemas import Release
from batchsvc.batches.schemas import RegisterModel, model_object
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
        small = models.resolve(session, "small", project_id=None)
        assert small is not None and (small.digest, small.path, small.kv_format) == ("bb" * 32, "/q", "float32")
        assert models.resolve(session, "gpt-4o-mini", project_id=None) is None
        models.alias(session, "gpt-4o-mini", "small")
        models.alias(session, "gpt", "gpt-4o-mini")  # an alias of an alias names the model itself
        assert models.alias_table(session) == {"gpt-4o-mini": "small", "gpt": "small"}
        pinned = models.alias_table(session)
        for aliases in (None, pinned):
            found = models.resolve(session, "gpt", aliases, project_id=None)
            assert found is not None and found.id == "small"
        listed = [row.id for row in models.list_models(session, project_id=None)]
        assert sorted(listed) == ["/models/My Model.gguf", "gpt", "gpt-4o-mini", "hf:owner/name", "small"]
        models.alias(session, "gpt", "hf:owner/name")
        models.unalias(session, "gpt-4o-mini")
        now, then = (
            models.resolve(session, "gpt", project_id=None),
            models.resolve(session, "gpt", pinned, project_id=None),
        )
        assert now is not None and now.id == "hf:owner/name"
        assert then is not None and then.id == "small"
        assert models.resolve(session, "gpt-4o-mini", pinned, project_id=None) is not None
        assert models.resolve(session, "gpt", {}, project_id=None) is None, "a name that was no alias then is none now"
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


def test_what_a_worker_tells_of_formats_and_quality(migrated_url: str) -> None:
    database = Database(migrated_url)
    quality = {"verdict": "within", "weights": {"format": "int8", "kl": 0.005}}
    digest = "aa" * 32
    with database.transaction() as session:
        models.register(session, "small", "/p", digest=digest, context_tokens=100)
        models.alias(session, "gpt", "small")
        worker_queries.note_formats(session, digest, weight_format="int8", kv_format="bf16", quality=quality)
    with database.transaction() as session:
        small, gpt = queries.model(session, "small"), queries.model(session, "gpt")
        assert small is not None
        assert gpt is not None
        shown = [model_object(small, None, {}), model_object(gpt, small, {})]
        assert [(row["weight_format"], row["quality"]) for row in shown] == [("int8", quality)] * 2
        models.register(session, "small", "/q", digest="bb" * 32, context_tokens=100)
        assert small.quality is None, "of other weights nothing is known"
    database.dispose()


def test_a_model_that_learned_from_a_project_is_its_own(migrated_url: str) -> None:
    """Under no name, as no alias, by no look of another project; and its bytes can't be registered for others."""
    database = Database(migrated_url)
    with database.transaction() as session:
        mine, other = (accounts.create_project(session, name).id for name in ("mine", "other"))
        models.register(session, "open", "/o", digest="aa" * 32, context_tokens=1)
        models.register(session, "student", "/s", digest="bb" * 32, context_tokens=1, project_id=mine)
        models.alias(session, "short", "student")
        pinned = models.alias_table(session)
        for name in ("student", "short"):
            for aliases in (None, pinned):
                assert models.resolve(session, name, aliases, project_id=other) is None
                for eyes in (mine, None):
                    found = models.resolve(session, name, aliases, project_id=eyes)
                    assert found is not None and found.id == "student"
        assert [row.id for row in models.list_models(session, project_id=other)] == ["open"]
        for eyes in (mine, None):
            assert [row.id for row in models.list_models(session, project_id=eyes)] == ["open", "student", "short"]
        others = (("copy", None), ("copy", other), ("student", None), ("student", other))
        for name, project in (*others, ("stranger", "proj_elsewhere")):
            with pytest.raises(InvalidRequestError, match="project"):
                models.register(session, name, "/c", digest="bb" * 32, context_tokens=1, project_id=project)
        models.register(session, "copy", "/c", digest="bb" * 32, context_tokens=1, project_id=mine)
    database.dispose()


def test_a_number_that_no_database_holds_is_refused() -> None:
    known = {"name": "m", "path": "/p", "digest": "aa" * 32}
    for tokens in (0, 2**31, 2**63, 2**70):
        with pytest.raises(ValidationError):
            RegisterModel(**known, context_tokens=tokens)
    with pytest.raises(ValidationError):
        Release(lines=[2**63])
