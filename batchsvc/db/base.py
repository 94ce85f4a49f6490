"""The declarative base, portable column types and the naming of constraints."""

from __future__ import annotations

from typing import Annotated, Any

from sqlalchemy import JSON, BigInteger, Dialect, Integer, MetaData, String, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, mapped_column

BigInt = BigInteger().with_variant(Integer, "sqlite")
Json = JSON().with_variant(JSONB, "postgresql")


class Digits(TypeDecorator[int]):
    """An integer that may be too large for 64 bits, as text; nothing is computed with it in SQL."""

    impl = String(40)
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> int | None:
        return None if value is None else int(value)


Id = Annotated[str, mapped_column(String(64), primary_key=True)]
Name = Annotated[str, mapped_column(String(64))]
Millis = Annotated[int, mapped_column(BigInt)]
Nanos = Annotated[int, mapped_column(BigInt, default=0)]
Count = Annotated[int, mapped_column(BigInt, default=0)]


class Base(DeclarativeBase):
    """Base of all tables. Times are integer milliseconds since the epoch, money is integer nano-dollars."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: Json, list[Any]: Json}  # noqa: RUF012  read by SQLAlchemy as is
