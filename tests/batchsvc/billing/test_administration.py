"""Each step of an invoice leaves one audit row in the transaction of the step; one that was made before leaves none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from sqlalchemy import select

from batchsvc.audit.actor import Actor, ActorKind
from batchsvc.audit.tables import AuditRow
from batchsvc.billing import administration
from batchsvc.billing.invoice_api import Action
from batchsvc.billing.invoice_schemas import Change, DraftInvoice
from batchsvc.billing.ledger import Movement
from batchsvc.billing.month import Month
from batchsvc.billing.schemas import PostMovement
from tests.batchsvc.billing.books import Books

JANUARY = Month.parse("2024-01")
OPERATOR = Actor(kind=ActorKind.CLI, id="night@ops")


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


def told_of(books: Books) -> list[tuple[str, str]]:
    """Action and target of each audit row, oldest first."""
    with books.db.reading() as session:
        rows = session.scalars(select(AuditRow).order_by(AuditRow.effective_ms, AuditRow.id))
        return [(row.action, row.target_id) for row in rows]


def test_each_movement_and_each_end_of_an_invoice_is_told_of_once(books: Books) -> None:
    books.use(JANUARY.start_ms, [(50_000_000, 0, 3_000_000)])

    def post(kind: Movement) -> str:
        body = PostMovement(amount="0.001", reason="as agreed", key=kind)
        moved = [
            books.db.run(lambda session: administration.post(session, OPERATOR, kind, books.project, body))
            for _ in range(2)
        ]
        assert [each["is_new"] for each in moved] == [True, False]
        return str(moved[0]["id"])

    moved = [(f"{kind}.posted", post(kind)) for kind in get_args(Movement)]
    assert len(moved) == 4 and told_of(books) == moved

    def act(name: str, action: Action, **body: str) -> None:
        books.db.run(
            lambda session: administration.act(session, OPERATOR, books.settings, name, action, Change(**body))
        )

    def issued() -> str:
        body = DraftInvoice(project=books.project, month="2024-01")
        made = books.db.run(lambda session: administration.draft(session, OPERATOR, books.settings, body))
        act(made["id"], "issue")
        return str(made["id"])

    void = issued()
    act(void, "void", reason="a wrong address")
    paid = issued()
    act(paid, "pay", reason="wire 7")
    act(paid, "pay", reason="wire 7")  # changes nothing
    assert told_of(books)[len(moved) :] == [
        ("invoice.drafted", void),
        ("invoice.issued", void),
        ("invoice.voided", void),
        ("invoice.drafted", paid),
        ("invoice.issued", paid),
        ("invoice.paid", paid),
    ]


def test_steps_of_an_invoice_are_told_of_once(books: Books) -> None:
    books.use(JANUARY.start_ms, [(50_000_000, 0, 3_000_000)])

    def draft() -> dict[str, Any]:
        body = DraftInvoice(project=books.project, month="2024-01")
        return books.db.run(lambda session: administration.draft(session, OPERATOR, books.settings, body))

    def act(name: str, action: Action, **body: str) -> dict[str, Any]:
        return books.db.run(
            lambda session: administration.act(session, OPERATOR, books.settings, name, action, Change(**body))
        )

    made = draft()
    number = act(made["id"], "issue")["number"]
    act(number, "issue")  # changes nothing
    act(number, "dispute", reason="not ours")
    note = act(number, "credit_note", reason="a gift", key="once")
    again = act(number, "credit_note", reason="a gift", key="once")
    assert again["id"] == note["id"]
    with books.db.reading() as session:
        rows = list(session.scalars(select(AuditRow).order_by(AuditRow.effective_ms, AuditRow.id)))
    told = {(row.action, row.target_id) for row in rows}
    assert told == {
        ("invoice.drafted", made["id"]),
        ("invoice.issued", made["id"]),
        ("invoice.disputed", made["id"]),
        ("credit_note.issued", note["id"]),
    }
    assert len(rows) == 4
    assert {(row.actor_id, row.project_id) for row in rows} == {("night@ops", books.project)}
    assert {row.details.get("reason") for row in rows} == {None, "not ours", "a gift"}
