"""Tables of money: the price book, usage rows and the double-entry ledger. All but prices are append-only."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, Integer, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Count, Id, Millis, Nanos


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
    """The usage of one part, or (`void:<part>`, all negative) what takes it back: the usage and costs APIs add up."""

    __tablename__ = "usage"
    __table_args__ = (Index("ix_usage_buckets", "project_id", "created_ms"),)

    part_id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(String(64))
    api_key_id: Mapped[str] = mapped_column(String(64))
    batch_id: Mapped[str] = mapped_column(String(64), index=True)
    model: Mapped[str] = mapped_column(String(255))
    tier: Mapped[str] = mapped_column(String(32))
    created_ms: Mapped[Millis]
    requests: Mapped[Count]
    input_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    output_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]


class LedgerTransaction(Base):
    """A balanced posting. `key` makes it idempotent: reserve:<batch>, part:<part>, void:<part>,
    release:<batch>:<fin_epoch>."""

    __tablename__ = "ledger_transactions"

    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    kind: Mapped[str] = mapped_column(String(16))
    key: Mapped[str] = mapped_column(String(160), unique=True)
    project_id: Mapped[str] = mapped_column(String(64))
    batch_id: Mapped[str] = mapped_column(String(64), index=True)
    part_id: Mapped[str | None] = mapped_column(String(64))
    price_version: Mapped[int] = mapped_column(Integer)
    created_ms: Mapped[Millis]


class LedgerEntry(Base):
    """One side of a posting; the entries of a transaction sum to 0."""

    __tablename__ = "ledger_entries"

    id: Mapped[int] = mapped_column(BigInt, primary_key=True, autoincrement=True)
    transaction_id: Mapped[int] = mapped_column(ForeignKey("ledger_transactions.id"), index=True)
    account: Mapped[str] = mapped_column(String(96), index=True)  # available:<project>, reserved:<project>, revenue
    amount_nanos: Mapped[int] = mapped_column(BigInt)
