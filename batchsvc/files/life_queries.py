"""How long files of a project live whose calls don't say: SQL of the defaults that an operator may set."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.db.session import database_now_ms
from batchsvc.files.retention import life_s
from batchsvc.files.tables import RetentionDefault


def input_life_s(session: Session, project_id: str, asked_s: int | None, setting_s: int) -> int:
    """Of an input: as its call says, else as the project's default, else as the setting."""
    return life_s(asked_s, _defaults(session, project_id)[0], setting_s)


def output_life_s(session: Session, project_id: str, asked_s: int | None, setting_s: int) -> int:
    """Of results, likewise."""
    return life_s(asked_s, _defaults(session, project_id)[1], setting_s)


def defaults(session: Session, project_id: str) -> RetentionDefault | None:
    """What was set for a project, if anything was."""
    return session.get(RetentionDefault, project_id, populate_existing=True)


def set_defaults(session: Session, project_id: str, **lives_s: int | None) -> RetentionDefault:
    """Set `input_life_s` or `output_life_s` (seconds; None: the setting's again); what isn't named stays."""
    now = database_now_ms(session)
    row = session.get(RetentionDefault, project_id, with_for_update=True, populate_existing=True)
    if row is None:
        row = RetentionDefault(project_id=project_id, updated_ms=now)
        session.add(row)
    for name, seconds in lives_s.items():
        setattr(row, name, seconds)
    row.updated_ms = now
    session.flush()
    return row


def _defaults(session: Session, project_id: str) -> tuple[int | None, int | None]:
    columns = (RetentionDefault.input_life_s, RetentionDefault.output_life_s)
    found = session.execute(select(*columns).where(RetentionDefault.project_id == project_id)).first()
    return (None, None) if found is None else (found.input_life_s, found.output_life_s)
