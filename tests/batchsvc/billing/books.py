"""A migrated database with projects, prices and a seller, for tests of invoices: real rows, real triggers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sqlalchemy import func, select

from batchsvc.accounts import service as accounts
from batchsvc.billing import invoice_api, invoice_draft, invoice_service, service
from batchsvc.billing.invoice_schemas import Change, ChangeParty
from batchsvc.billing.invoice_tables import Invoice
from batchsvc.billing.ledger import REVENUE
from batchsvc.billing.month import Month
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, UsageRow
from batchsvc.db.session import Database
from batchsvc.money import line_cost_nanos
from batchsvc.settings import Settings

SELLER = {
    "BATCHSVC_SELLER_NAME": "Batch & Søn ApS",
    "BATCHSVC_SELLER_ADDRESS": "Nygade 1; 1164 København",
    "BATCHSVC_SELLER_COUNTRY": "DK",
    "BATCHSVC_SELLER_TAX_ID": "DK12345678",
    "BATCHSVC_SELLER_TAX_RATE": "25",
}


class Books:
    """What a month is made of, and what is said about it."""

    def __init__(self, database_url: str, **more: str) -> None:
        self.db = Database(database_url)
        self.settings = Settings.from_env(
            {"DATABASE_URL": database_url, "REDIS_URL": "redis://127.0.0.1:1", **SELLER, **more}
        )
        self._parts = 0
        with self.db.transaction() as session:
            service.seed_prices(session)
        self.project = self.add_project("acme")

    def add_project(self, name: str, *, has_address: bool = True) -> str:
        with self.db.transaction() as session:
            project_id = accounts.create_project(session, name).id
            if has_address:
                body = ChangeParty(name=name.upper(), address="Rue 1", country="FR", tax_id="FR1")
                invoice_api.change_party(session, project_id, body)
        return project_id

    def use(
        self,
        ms: int,
        lines: list[tuple[int, int, int]] | None = None,
        *,
        project: str | None = None,
        batch: str = "b1",
        model: str = "smollm2-135m",
    ) -> Any:
        """Commits a part of lines of (input, cached, output) tokens at a moment; gives it and its batch."""
        lines = lines or [(100, 16, 7)]
        self._parts += 1
        owner = SimpleNamespace(
            id=batch,
            project_id=project or self.project,
            api_key_id="k",
            model_id=model,
            tier="batch_24h",
            endpoint="/v1/chat/completions",
            price_version=1,
            reserved_nanos=10**12,
            fin_epoch=1,
        )
        with self.db.transaction() as session:
            rates = service.rates_for(session, model, owner.tier, 1)
            part = SimpleNamespace(
                id=f"part_{self._parts}",
                lines_ok=len(lines),
                input_tokens=sum(line[0] for line in lines),
                cached_tokens=sum(line[1] for line in lines),
                output_tokens=sum(line[2] for line in lines),
                cost_nanos=sum(
                    line_cost_nanos(rates, input_tokens=a, cached_tokens=b, output_tokens=c) for a, b, c in lines
                ),
                created_ms=ms,
            )
            service.post_reserve(session, owner)
            service.post_part(session, owner, part)
        return owner, part

    def void_part(self, owner: Any, part: Any) -> int:
        """Takes a part back, now; gives the moment."""
        with self.db.transaction() as session:
            service.post_void(session, owner, part)
            return int(
                session.execute(select(UsageRow.created_ms).where(UsageRow.part_id == f"void:{part.id}")).scalar_one()
            )

    def draft(self, month: str, *, project: str | None = None, exchange_rate: str | None = None) -> Invoice:
        with self.db.transaction() as session:
            return invoice_draft.draft(
                session, self.settings, project or self.project, Month.parse(month), exchange_rate=exchange_rate
            )

    def issue(self, month: str, **more: Any) -> Invoice:
        """Drafts and issues a month."""
        name = self.draft(month, **more).id
        return self.db.run(lambda session: invoice_service.issue(session, name))

    def act(self, name: str, action: Any, **body: Any) -> dict[str, Any]:
        return self.db.run(lambda session: invoice_api.act(session, self.settings, name, action, Change(**body)))

    def show(self, name: str) -> dict[str, Any]:
        with self.db.reading() as session:
            return invoice_api.show(session, name)

    def file(self, name: str, form: str) -> bytes:
        with self.db.reading() as session:
            return b"".join(invoice_api.content(session, name, form))

    def statement(self, month: str, project: str | None = None) -> dict[str, Any]:
        with self.db.snapshot() as session:
            return invoice_api.show_statement(session, project or self.project, month)

    def used_nanos(self, month: Month, project: str | None = None) -> int:
        """The month's usage, re-added."""
        query = select(func.coalesce(func.sum(UsageRow.cost_nanos), 0)).where(
            UsageRow.project_id == (project or self.project),
            UsageRow.created_ms.between(month.start_ms, month.end_ms - 1),
        )
        with self.db.reading() as session:
            return int(session.execute(query).scalar_one())

    def revenue_nanos(self, month: Month, project: str | None = None) -> int:
        """The month's revenue in the ledger."""
        query = (
            select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
            .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
            .where(
                LedgerEntry.account == REVENUE,
                LedgerTransaction.project_id == (project or self.project),
                LedgerTransaction.created_ms.between(month.start_ms, month.end_ms - 1),
            )
        )
        with self.db.reading() as session:
            return int(session.execute(query).scalar_one())

    def balance(self, account: str) -> int:
        query = select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0)).where(LedgerEntry.account == account)
        with self.db.reading() as session:
            return int(session.execute(query).scalar_one())
