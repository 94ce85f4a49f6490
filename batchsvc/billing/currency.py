"""Which currencies an invoice may be in: those of ISO 4217 that have minor units."""

from __future__ import annotations

from iso4217 import Currency

from batchsvc.errors import InvalidRequestError


def exponent_of(code: str) -> int:
    """Digits of a currency's minor unit: 2 for USD, 0 for JPY. Raises InvalidRequestError for what is no currency."""
    try:
        exponent = Currency(code).exponent
    except ValueError:
        exponent = None
    if exponent is None:
        raise InvalidRequestError(
            f"{code!r} is no currency that can be paid in: it is a code of ISO 4217 such as USD, EUR or JPY.",
            param="currency",
            code="invalid_currency",
        )
    return exponent
