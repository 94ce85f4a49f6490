"""Costs as charges of FOCUS, the FinOps Open Cost and Usage Specification: pure, no database and no float.

One charge is one kind of token of one batch on one day; its costs are quantity times unit price, exactly, with up to
15 decimals. What rounding the lines to nano-dollars added or took is an Adjustment, so the charges of a batch and a
day add up to what was charged. Our tiers are prices of their own, so list, contracted and effective cost are the same.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

COLUMNS = (
    "AvailabilityZone",
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "ListUnitPrice",
    "PricingCategory",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "RegionId",
    "RegionName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "Tags",
    "x_PriceVersion",
)
# what the costs have to be grouped by
GROUPS = ("project_id", "api_key_id", "batch_id", "model", "service_tier", "price_version", "line_item")

_NANO_DECIMALS, _TOKEN_DECIMALS = 9, 6
_EXACT_DECIMALS = _NANO_DECIMALS + _TOKEN_DECIMALS


def charges(
    buckets: Iterable[Mapping[str, Any]], *, seller: str, projects: Mapping[str, str], keys: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Charges of the buckets of a costs page that was grouped by GROUPS. Names of projects and keys are by id."""
    for bucket in buckets:
        grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
        for result in bucket["results"]:
            grouped[tuple(result[name] for name in GROUPS[:-1])].append(result)
        for results in grouped.values():
            if results[0]["model"] is None:  # what was given back: a charge of its own each
                for result in results:
                    cost = result["amount_nanos"] * 10**_TOKEN_DECIMALS
                    yield _charge(_common(bucket, result, seller, projects, keys), _correction(result, cost))
                continue
            common = _common(bucket, results[0], seller, projects, keys)
            exact = 0
            for result in results:
                if result["rate_nanos"] is not None:
                    cost = result["quantity"] * result["rate_nanos"]
                    exact += cost
                    yield _charge(common, _usage(result, cost))
            rest = sum(result["amount_nanos"] for result in results) * 10**_TOKEN_DECIMALS - exact
            if rest:
                yield _charge(common, _adjustment(results[0], rest))


def _common(
    bucket: Mapping[str, Any],
    result: Mapping[str, Any],
    seller: str,
    projects: Mapping[str, str],
    keys: Mapping[str, str],
) -> dict[str, str]:
    start = datetime.fromtimestamp(bucket["start_time"], UTC)
    month = start.replace(day=1, hour=0, minute=0, second=0)
    next_month = month.replace(year=month.year + month.month // 12, month=month.month % 12 + 1)
    project_id, key_id, metadata = result["project_id"], result["api_key_id"], result.get("metadata")
    return {
        "BillingAccountId": project_id,
        "BillingAccountName": projects.get(project_id, ""),
        "BillingCurrency": "USD",
        "BillingPeriodStart": _time(month),
        "BillingPeriodEnd": _time(next_month),
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _time(start),
        "ChargePeriodEnd": _time(datetime.fromtimestamp(bucket["end_time"], UTC)),
        "InvoiceIssuerName": seller,
        "ProviderName": seller,
        "PublisherName": seller,
        "ResourceId": result["batch_id"] or "",
        "ResourceType": "Batch" if result["batch_id"] else "",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Batch Inference",
        "SubAccountId": key_id or "",
        "SubAccountName": keys.get(key_id, ""),
        "Tags": json.dumps(metadata, ensure_ascii=False) if metadata else "",
        "x_PriceVersion": "" if result["price_version"] is None else str(result["price_version"]),
    }


def _usage(result: Mapping[str, Any], cost: int) -> dict[str, str]:
    model, tier, tokens = result["model"], result["service_tier"], result["quantity"]
    kind = result["line_item"].rsplit(", ", 1)[1]
    price = decimal(result["rate_nanos"], _NANO_DECIMALS)
    return {
        **_costs(cost),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{kind.replace('_', ' ')} of {model}, {tier}",
        "ConsumedQuantity": str(tokens),
        "ConsumedUnit": "Tokens",
        "ContractedUnitPrice": price,
        "ListUnitPrice": price,
        "PricingCategory": "Standard",
        "PricingQuantity": decimal(tokens, _TOKEN_DECIMALS),
        "PricingUnit": "1000000 Tokens",
        "SkuId": f"{model}/{kind}",
        "SkuPriceId": f"{model}/{tier}/{kind}",
    }


def _adjustment(result: Mapping[str, Any], cost: int) -> dict[str, str]:
    description = f"rounding of lines to nano-dollars, {result['model']}, {result['service_tier']}"
    return {**_costs(cost), "ChargeCategory": "Adjustment", "ChargeDescription": description}


def _correction(result: Mapping[str, Any], cost: int) -> dict[str, str]:
    """Goodwill is a credit; a refund or a credit note corrects what was billed before."""
    item = str(result["line_item"])
    own = (
        {"ChargeCategory": "Credit"}
        if item == "goodwill"
        else {"ChargeCategory": "Adjustment", "ChargeClass": "Correction"}
    )
    return {**_costs(cost), **own, "ChargeDescription": item, "ChargeFrequency": "One-Time"}


def _costs(cost: int) -> dict[str, str]:
    text = decimal(cost, _EXACT_DECIMALS)
    return dict.fromkeys(("BilledCost", "ContractedCost", "EffectiveCost", "ListCost"), text)


def _charge(common: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """All columns in order; null is the empty text. Usage that takes back an earlier one is a correction."""
    known = {**common, **own}
    if known["ChargeCategory"] == "Usage" and known["ConsumedQuantity"].startswith("-"):
        known["ChargeClass"] = "Correction"
    return {name: known.get(name, "") for name in COLUMNS}


def decimal(number: int, decimals: int) -> str:
    """`number / 10**decimals` with every digit that counts."""
    whole, rest = divmod(abs(number), 10**decimals)
    digits = f"{rest:0{decimals}d}".rstrip("0") if rest else ""
    return ("-" if number < 0 else "") + str(whole) + (f".{digits}" if digits else "")


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
