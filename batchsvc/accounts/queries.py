"""SQL of projects, keys and stored answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import delete, literal_column, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.accounts.tables import ApiKey, IdempotentAnswer, Project, ServiceAccount
from batchsvc.db.base import BigInt
from batchsvc.db.insert import insert
from batchsvc.db.session import database_now_sql


def project(session: Session, project_id: str) -> Project | None:
    """One project by its id."""
    return session.get(Project, project_id)


def add_project(session: Session, project_id: str, name: str, salt: str, created_ms: int) -> None:
    """Add a project of this id, unless there is one; waits for another who is just about to."""
    row = {"id": project_id, "name": name, "salt": salt, "created_ms": created_ms}
    session.execute(insert(session, Project).values(row).on_conflict_do_nothing(index_elements=("id",)))


def projects(session: Session) -> list[Project]:
    """All projects but those for tests, oldest first."""
    live = Project.id.not_like(mode.LIKE, escape="\\")
    return list(session.scalars(select(Project).where(live).order_by(Project.created_ms, Project.id)))


def has_test_project(session: Session) -> bool:
    """Whether there is a project for tests."""
    found = select(Project.id).where(Project.id.like(mode.LIKE, escape="\\")).limit(1)
    return session.scalar(found) is not None


def locked_project(session: Session, project_id: str) -> Project:
    """One project, locked, though not against rows that refer to it."""
    found = select(Project).where(Project.id == project_id).with_for_update(key_share=True)
    return session.scalars(found.execution_options(populate_existing=True)).one()


def project_named(session: Session, name: str) -> Project | None:
    """The oldest project of this name, one that isn't archived first."""
    found = select(Project).where(Project.name == name)
    return session.scalars(found.order_by(Project.archived_ms.is_not(None), Project.created_ms).limit(1)).first()


def money_limits(session: Session, project_id: str) -> tuple[int | None, bool]:
    """Budget and whether it is prepaid, as they are now."""
    found = session.execute(select(Project.budget_nanos, Project.is_prepaid).where(Project.id == project_id)).first()
    return (None, False) if found is None else (found.budget_nanos, found.is_prepaid)


def limited(session: Session, project_ids: set[str]) -> list[Project]:
    """Those of the projects that have a budget or are prepaid."""
    has_limit = or_(Project.budget_nanos.is_not(None), Project.is_prepaid)
    return list(session.scalars(select(Project).where(Project.id.in_(project_ids), has_limit)))


def alert_percents(session: Session, project_ids: set[str]) -> dict[str, list[int] | None]:
    """The shares of a limit that these projects want to be told of."""
    rows = session.execute(select(Project.id, Project.alert_percents).where(Project.id.in_(project_ids)))
    return {row.id: row.alert_percents for row in rows}


def salts(session: Session, project_ids: set[str]) -> dict[str, str]:
    """Salts of these projects by id."""
    return {
        row.id: row.salt for row in session.execute(select(Project.id, Project.salt).where(Project.id.in_(project_ids)))
    }


def key(session: Session, key_id: str) -> ApiKey | None:
    """One key by its public part."""
    return session.get(ApiKey, key_id)


class KnownKey(NamedTuple):
    """All that a call needs to know of its key, the key's project and its owner, and the database's time."""

    key: ApiKey
    project: Project
    now_ms: int
    is_owner_deleted: bool  # the service account that the key belongs to


def known_key(session: Session, key_id: str) -> KnownKey | None:
    """A key with its project and its owner, in one statement: it runs with every call."""
    found = session.execute(
        select(ApiKey, Project, literal_column(database_now_sql(session), BigInt), ServiceAccount.deleted_ms)
        .join(Project, Project.id == ApiKey.project_id)
        .outerjoin(ServiceAccount, ServiceAccount.id == ApiKey.service_account_id)
        .where(ApiKey.id == key_id)
    ).first()
    return None if found is None else KnownKey(found[0], found[1], int(found[2]), found[3] is not None)


def note_uses(session: Session, used_ms: Mapping[str, int]) -> None:
    """Note when keys were last used; what is noted is never put back."""
    for key_id, at_ms in sorted(used_ms.items()):  # in one order: others note uses of the same keys
        is_older = or_(ApiKey.last_used_ms.is_(None), ApiKey.last_used_ms < at_ms)
        session.execute(update(ApiKey).where(ApiKey.id == key_id, is_older).values(last_used_ms=at_ms))


def keys(session: Session, project_id: str | None) -> list[ApiKey]:
    """Keys of one project, or of all, oldest first."""
    found = select(ApiKey).order_by(ApiKey.created_ms, ApiKey.id)
    return list(session.scalars(found if project_id is None else found.where(ApiKey.project_id == project_id)))


def revoke(session: Session, key_id: str, now_ms: int) -> None:
    """Mark a key as revoked; the first time stays."""
    session.execute(update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_ms.is_(None)).values(revoked_ms=now_ms))


def add_answer(session: Session, project_id: str, key: str, fingerprint: str, now_ms: int) -> bool:
    """Take a name for a call; waits while another transaction has it. False: it is taken."""
    row = IdempotentAnswer(project_id=project_id, key=key, fingerprint=fingerprint, body="", created_ms=now_ms)
    try:
        with session.begin_nested():
            session.add(row)
            session.flush()
    except IntegrityError:
        return False
    return True


def answer(session: Session, project_id: str, key: str) -> IdempotentAnswer | None:
    """What a call of this name was answered."""
    return session.get(IdempotentAnswer, (project_id, key), populate_existing=True)


def locked_answer(session: Session, project_id: str, key: str) -> IdempotentAnswer | None:
    """The same, locked till the transaction ends; waits while another one has it."""
    return session.get(IdempotentAnswer, (project_id, key), populate_existing=True, with_for_update=True)


def fill_answer(session: Session, project_id: str, key: str, body: str, **values: str | int) -> None:
    """Note what a call was answered, and other `values` of its row."""
    named = (IdempotentAnswer.project_id == project_id, IdempotentAnswer.key == key)
    session.execute(update(IdempotentAnswer).where(*named).values(body=body, **values))


def answers_with(session: Session, project_id: str, text: str, from_ms: int, to_ms: int) -> list[IdempotentAnswer]:
    """The answers to a project in this time that hold a text, locked. Served by ix_idempotent_answers_created_ms."""
    mine = (IdempotentAnswer.project_id == project_id, IdempotentAnswer.body.contains(text, autoescape=True))
    in_time = IdempotentAnswer.created_ms.between(from_ms, to_ms)
    found = select(IdempotentAnswer).where(*mine, in_time).order_by(IdempotentAnswer.key).with_for_update()
    return list(session.scalars(found.execution_options(populate_existing=True)))


def delete_answers(session: Session, before_ms: int) -> int:
    """Delete the answers that were given before then. Returns how many. Served by ix_idempotent_answers_created_ms."""
    old = delete(IdempotentAnswer).where(IdempotentAnswer.created_ms < before_ms).returning(IdempotentAnswer.key)
    return len(session.execute(old).all())
