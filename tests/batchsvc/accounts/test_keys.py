"""Keys: looked up by id, stored as a hash, refused when a character is off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import Session
from starlette._utils import get_route_path

from batchsvc.accounts import keys, queries, service
from batchsvc.accounts.caller import path_of
from batchsvc.accounts.tables import Project
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


@pytest.mark.parametrize(
    ("path", "prefix", "seen"),
    [
        ("/v1/files", "", "/v1/files"),
        ("/batch/v1/files", "/batch", "/v1/files"),
        ("/v1/files", "/batch", "/v1/files"),  # a proxy that cuts its prefix off
        ("/v1/files/a", "/v1/file", "/v1/files/a"),
        ("/v1/files?x#y", "", "/v1/files?x#y"),
    ],
)
def test_scopes_see_the_path_that_a_call_is_routed_by(path: str, prefix: str, seen: str) -> None:
    scope = {"type": "http", "path": path, "root_path": prefix, "headers": [(b"host", b"x/v1/batches?")]}
    assert path_of(scope) == get_route_path(scope) == seen


def test_a_twin_that_another_makes_at_the_same_moment_is_found(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(migrated_url)
    with database.transaction() as session:
        project_id = service.create_project(session, "acme").id
        twin_id, salt = (twin := service.test_twin(session, project_id)).id, twin.salt
        assert (twin.name, twin.weight, twin.is_prepaid) == ("acme (test)", 1, False)
    look, looked = queries.project, []

    def blind(session: Session, wanted: str) -> Project | None:
        looked.append(wanted)
        return None if len(looked) == 1 else look(session, wanted)

    monkeypatch.setattr(queries, "project", blind)
    with database.transaction() as session:
        assert service.test_twin(session, project_id).salt == salt
    assert looked[0] == twin_id
    database.dispose()


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
        assert {key.name for key in service.list_keys(session, project.id)} == {"ci", "boss"}
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
