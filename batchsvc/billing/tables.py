"""Tables of money: the price book, usage rows and the double-entry ledger. Append-only, but for `balances`."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, Integer, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Count, Id, Millis, Nanos

_CORRECTING = "kind IN ('refund', 'credit', 'credit_note')"  # written as the queries write it: so they use the index


class Price(Base):
    """One rate: nano-dollars per million tokens. A version is a whole book; rows are never changed."""

    __tablename__ = "prices"
    __table_args__ = (UniqueConstraint("version", "model", "tier", "kind"),)

    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    version: Mapped[int] = mapped_column(Integer)
    model: Mapped[str] = mapped_column(String(255))  # a model id, or "default"
    tier: Mapped[str] = mapped_column(String(32))
    kind: Mapped[str] = mapped_column(String(16))  # input, cached_input, output
    nanos_per_mtok: Mapped[int] = mapped_column(BigInt)
    effective_ms: Mapped[Millis]


class UsageRow(Base):
    """The usage of one part, or (`void:<part>`, all negative) what takes it back, or of one interactive call, which has
    no batch (""): the usage and costs APIs add up."""

    __tablename__ = "usage"
    __table_args__ = (
        Index("ix_usage_buckets", "project_id", "created_ms"),
        Index("ix_usage_created", "created_ms"),
        CheckConstraint(
            "cached_tokens BETWEEN 0 AND input_tokens OR cached_tokens BETWEEN input_tokens AND 0",
            name="cached_within_input",
        ),
    )

    part_id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(String(64))
    api_key_id: Mapped[str] = mapped_column(String(64))
    batch_id: Mapped[str] = mapped_column(String(64), index=True)
    model: Mapped[str] = mapped_column(String(255))
    tier: Mapped[str] = mapped_column(String(32))
    endpoint: Mapped[str] = mapped_column(String(64), default="/v1/chat/completions")
    price_version: Mapped[int] = mapped_column(Integer, default=0)
    created_ms: Mapped[Millis]
    requests: Mapped[Count]
    input_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    output_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]


class UsageHour(Base):
    """The usage rows of one batch and model in one hour (UTC), added up, so that a month needn't read every part; and
    those of interactive calls, by `call_group`, which says of whose calls they are.

    A trigger of the database (revision 0011) adds every usage row to its hour in the same statement, whoever inserts
    it; nothing else writes here.
    """

    __tablename__ = "usage_hours"
    __table_args__ = (Index("ix_usage_hours_time", "hour_ms"),)

    batch_id: Mapped[Id]
    hour_ms: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=False)
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    call_group: Mapped[str] = mapped_column(String(320), primary_key=True, server_default="")  # "" of a batch
    project_id: Mapped[str] = mapped_column(String(64))
    api_key_id: Mapped[str] = mapped_column(String(64))
    tier: Mapped[str] = mapped_column(String(32))
    endpoint: Mapped[str] = mapped_column(String(64))
    price_version: Mapped[int] = mapped_column(Integer)
    requests: Mapped[Count]
    input_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    output_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]


class LedgerTransaction(Base):
    """A balanced posting. `key` makes it idempotent; billing/ledger.py says how it is made."""

    __tablename__ = "ledger_transactions"
    __table_args__ = (
        Index("ix_ledger_transactions_statement", "project_id", "created_ms"),
        Index(
            "ix_ledger_transactions_corrections",
            "created_ms",
            sqlite_where=text(_CORRECTING),
            postgresql_where=text(_CORRECTING),
        ),
    )

    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(16))
    key: Mapped[str] = mapped_column(String(160), unique=True)
    project_id: Mapped[str] = mapped_column(String(64))
    batch_id: Mapped[str | None] = mapped_column(String(64), index=True)
    part_id: Mapped[str | None] = mapped_column(String(64))
    price_version: Mapped[int] = mapped_column(Integer)  # 0: no prices are behind it
    corrects_month: Mapped[str | None] = mapped_column(String(7))  # of a refund: when it was used what it takes back
    reason: Mapped[str | None] = mapped_column(String(255))
    actor: Mapped[str | None] = mapped_column(String(64))  # the key by which an operator posted it
    created_ms: Mapped[Millis]


class LedgerEntry(Base):
    """One side of a posting; the entries of a transaction sum to 0."""

    __tablename__ = "ledger_entries"

    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    transaction_id: Mapped[int] = mapped_column(ForeignKey("ledger_transactions.id"), index=True)
    account: Mapped[str] = mapped_column(String(96), index=True)  # see billing/ledger.py
    amount_nanos: Mapped[int] = mapped_column(BigInt)


class Balance(Base):
    """What the ledger says of a project at this moment, so that a limit needn't add it up; who decides by it locks it.

    `month_nanos` is what was charged in `month` (UTC, as year * 12 + month - 1), that of the newest posting. A trigger
    of the database (revision 0011) adds every entry in the same statement, whoever inserts it; nobody else writes here.
    """

    __tablename__ = "balances"

    project_id: Mapped[Id]
    available_nanos: Mapped[Nanos]
    reserved_nanos: Mapped[Nanos]
    month: Mapped[int] = mapped_column(Integer, default=0)
    month_nanos: Mapped[Nanos]


class CallHold(Base):
    """What an interactive call that runs may yet cost: it counts against its project's limits until `expires_ms`."""

    __tablename__ = "call_holds"
    __table_args__ = (Index("ix_call_holds_project", "project_id", "expires_ms"),)

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(String(64))
    amount_nanos: Mapped[Nanos]
    expires_ms: Mapped[Millis]
