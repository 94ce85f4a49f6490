"""Keys: looked up by id, stored as a hash, refused when a character is off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.accounts import keys, service
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.errors import AuthenticationError, InvalidRequestError, NotFoundError


def test_a_key_carries_its_id_and_never_its_hash() -> None:
    made = keys.make()
    assert made.text.startswith(f"sk_{made.id}_")
    assert keys.id_of(made.text) == made.id
    assert keys.matches(made.text, made.hash)
    assert made.hash not in made.text and made.text not in made.hash


@given(st.integers(0, 60), st.characters(codec="ascii"))
def test_a_changed_character_is_noticed(position: int, other: str) -> None:
    text = keys.make().text
    position %= len(text)
    changed = text[:position] + other + text[position + 1 :]
    assert (keys.id_of(changed) is not None) == (changed == text)


@given(st.text())
def test_any_text_is_taken_apart_without_an_error(text: str) -> None:
    assert keys.id_of(text) is None


def test_life_of_a_key(database_url: str) -> None:
    migrate.upgrade(database_url)
    database = Database(database_url)
    with database.transaction() as session:
        project = service.create_project(session, "acme")
        row, secret = service.create_key(session, project.id, "ci")
        _, admin = service.create_key(session, project.id, "boss", is_admin=True)
        key_id = row.id
        assert secret not in (row.hash, row.id, row.name)
    with database.reading() as session:
        caller = service.caller(session, secret)
        assert (caller.project_id, caller.api_key_id, caller.is_admin) == (project.id, key_id, False)
        assert service.caller(session, admin).is_admin
        assert [key.name for key in service.list_keys(session, project.id)] == ["ci", "boss"]
        found = service.project_named(session, "acme")
        assert found is not None and found.id == project.id
    for wrong in (secret[:-1] + "!", keys.make().text, "", "sk-wrong"):
        with database.reading() as session, pytest.raises(AuthenticationError):
            service.caller(session, wrong)
    with database.transaction() as session:
        first = service.revoke_key(session, key_id).revoked_ms
        assert first is not None and service.revoke_key(session, key_id).revoked_ms == first
        with pytest.raises(AuthenticationError):
            service.caller(session, secret)
        with pytest.raises(NotFoundError):
            service.revoke_key(session, "nope")
        with pytest.raises(NotFoundError):
            service.create_key(session, "proj_nope", "x")
        with pytest.raises(InvalidRequestError):
            service.create_key(session, project.id, " ")
    database.dispose()
