"""The FOCUS export: columns of the specification, costs that are quantity times price, sums that are the bill."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.billing import focus
from batchsvc.billing.line_items import Usage, items
from batchsvc.money import Rates, line_cost_nanos

RATES = Rates(input=10_000_000, cached_input=2_500_000, output=40_000_001)
DAY_S = 86_400
NOT_NULL = (
    "BilledCost",
    "BillingAccountId",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceName",
)


def bucket(start_s: int, usages: list[Usage], rates: Rates | None = RATES) -> dict[str, Any]:
    results = [
        {
            "project_id": "proj",
            "api_key_id": "key",
            "batch_id": f"batch{number}",
            "model": "m",
            "service_tier": "batch_24h",
            "price_version": 3,
            "line_item": item.name,
            "amount_nanos": item.amount_nanos,
            "quantity": item.tokens,
            "rate_nanos": item.rate_nanos,
            "metadata": {"team": "grün"} if number else None,
        }
        for number, usage in enumerate(usages)
        for item in items("m", "batch_24h", rates, usage)
    ]
    return {"start_time": start_s, "end_time": start_s + DAY_S, "results": results}


def exported(*buckets: dict[str, Any]) -> list[dict[str, str]]:
    return list(focus.charges(buckets, seller="Seller", projects={"proj": "Project"}, keys={"key": "Key"}))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(0, 99)), min_size=1, max_size=9),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1, -1]),
)
def test_charges_add_up_to_the_bill_and_are_quantity_times_price(
    batches: list[list[tuple[int, int, int]]], sign: int
) -> None:
    usages = []
    for lines in batches:
        total = Usage()
        for uncached, cached, output in lines:
            tokens = {"input_tokens": uncached + cached, "cached_tokens": cached, "output_tokens": output}
            cost = line_cost_nanos(RATES, **tokens)
            total += Usage(cost_nanos=sign * cost, **{name: sign * n for name, n in tokens.items()})
        usages.append(total)
    charges = exported(bucket(0, usages))
    for number, usage in enumerate(usages):
        mine = [charge for charge in charges if charge["ResourceId"] == f"batch{number}"]
        assert sum((Decimal(charge["BilledCost"]) for charge in mine), Decimal()) * 10**9 == usage.cost_nanos
    for charge in charges:
        assert tuple(charge) == focus.COLUMNS
        assert all(charge[name] for name in NOT_NULL)
        costs = {charge[name] for name in ("BilledCost", "ListCost", "ContractedCost", "EffectiveCost")}
        assert len(costs) == 1
        if charge["ChargeCategory"] == "Usage":
            quantity, price = Decimal(charge["PricingQuantity"]), Decimal(charge["ListUnitPrice"])
            assert quantity * price == Decimal(charge["ListCost"])
            assert charge["ContractedUnitPrice"] == charge["ListUnitPrice"]
            assert Decimal(charge["ConsumedQuantity"]) == quantity * 10**6
            assert charge["ChargeClass"] == ("Correction" if sign < 0 else "")
        else:
            assert charge["ChargeCategory"] == "Adjustment"
            assert not charge["ListUnitPrice"] and not charge["PricingQuantity"] and not charge["ConsumedQuantity"]


def test_periods_are_months_and_days_of_utc() -> None:
    one = [Usage(input_tokens=1, cost_nanos=10)]
    for start_s, month, next_month, day in (
        (1_798_675_200, "2026-12-01", "2027-01-01", "2026-12-31"),
        (1_835_308_800, "2028-02-01", "2028-03-01", "2028-02-28"),
        (1_774_742_400, "2026-03-01", "2026-04-01", "2026-03-29"),
    ):
        (charge,) = exported(bucket(start_s, one, Rates(input=10_000_000, cached_input=0, output=0)))
        assert charge["BillingPeriodStart"] == f"{month}T00:00:00Z"
        assert charge["BillingPeriodEnd"] == f"{next_month}T00:00:00Z"
        assert charge["ChargePeriodStart"] == f"{day}T00:00:00Z"
        assert charge["BilledCost"] == "0.00000001"


def test_names_tags_and_skus() -> None:
    first, second = exported(bucket(0, [Usage(output_tokens=1), Usage(output_tokens=1)]))[::2]
    assert (first["BillingAccountName"], first["SubAccountName"], first["InvoiceIssuerName"]) == (
        "Project",
        "Key",
        "Seller",
    )
    assert (first["SkuId"], first["SkuPriceId"]) == ("m/output_tokens", "m/batch_24h/output_tokens")
    assert (first["Tags"], json.loads(second["Tags"])) == ("", {"team": "grün"})
    assert (first["ListUnitPrice"], first["PricingQuantity"]) == ("0.040000001", "0.000001")


def test_what_has_no_rates_is_an_adjustment() -> None:
    (charge,) = exported(bucket(0, [Usage(input_tokens=9, cost_nanos=-5)], None))
    assert (charge["ChargeCategory"], charge["BilledCost"]) == ("Adjustment", "-0.000000005")


@pytest.mark.parametrize(
    ("item", "category", "charge_class"),
    [("refund", "Adjustment", "Correction"), ("credit note", "Adjustment", "Correction"), ("goodwill", "Credit", "")],
)
def test_what_is_given_back_is_a_charge_of_its_own(item: str, category: str, charge_class: str) -> None:
    given = dict.fromkeys(focus.GROUPS) | {"project_id": "proj", "line_item": item, "amount_nanos": -7_000_000_001}
    given |= {"quantity": None, "rate_nanos": None}
    (charge,) = exported({"start_time": 0, "end_time": DAY_S, "results": [given]})
    assert (charge["ChargeCategory"], charge["ChargeClass"], charge["BilledCost"]) == (
        category,
        charge_class,
        "-7.000000001",
    )
    assert charge["ChargeDescription"] == item and charge["ChargeFrequency"] == "One-Time"
    assert tuple(charge) == focus.COLUMNS and all(charge[name] for name in NOT_NULL)
    assert not charge["SubAccountId"] and not charge["ResourceId"] and not charge["x_PriceVersion"]
