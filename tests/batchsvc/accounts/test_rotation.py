"""A rotated key's successor lives as long as the key was given: when it was made, or when its expiry was set later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from batchsvc.accounts import administration, key_administration
from batchsvc.accounts.tables import ApiKey
from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.db.session import Database, database_now_ms

ACTOR = Actor(kind=ActorKind.CLI, id="op@host")
DAY_S = 86_400


@pytest.fixture
def db(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    yield database
    database.dispose()


def age(session: Session, key: ApiKey, days: int) -> None:
    """Have it be made so long ago."""
    back_ms = days * DAY_S * 1000
    key.created_ms -= back_ms
    if key.expires_ms is not None:
        key.expires_ms -= back_ms
    session.flush()


@pytest.mark.parametrize(
    ("given_s", "changes", "life_s"),
    [
        (90 * DAY_S, [], 90 * DAY_S),
        (None, [], None),
        (None, [{"expires_in_seconds": 7 * DAY_S}], 7 * DAY_S),
        (90 * DAY_S, [{"expires_in_seconds": 7 * DAY_S}, {"scopes": ["files"]}], 7 * DAY_S),
        (90 * DAY_S, [{"expires_in_seconds": 7 * DAY_S}, {"expires_in_seconds": None}], None),
    ],
)
def test_a_successor_lives_as_long_as_the_key_was_given(
    db: Database, given_s: int | None, changes: list[dict[str, Any]], life_s: int | None
) -> None:
    with db.transaction() as session:
        project = administration.create_project(session, ACTOR, "acme")
        key = key_administration.create_key(session, ACTOR, project.id, "k", expires_in_s=given_s).row
        age(session, key, 60)
        for change in changes:
            key_administration.change_key(session, ACTOR, key, change)
        made = key_administration.rotate_key(session, ACTOR, key).row
        then_ms = None if made.expires_ms is None else made.expires_ms - database_now_ms(session)
        assert (then_ms is None) == (life_s is None)
        assert then_ms is None or abs(then_ms - (life_s or 0) * 1000) < 60_000
