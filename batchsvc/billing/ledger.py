"""The arithmetic of the ledger: which accounts a posting moves money between. Pure; billing/queries.py stores it.

Double entry, append-only. What a batch costs goes in two phases:
    reserve  available:<project> -> reserved:<project>   what it will probably cost, when it is planned
    extend   available:<project> -> reserved:<project>   more, before it spends more
    part     reserved:<project>  -> revenue              what the delivered lines of a part cost
    void     revenue             -> reserved:<project>   the same back, when the part was found damaged
    release  reserved:<project>  -> available:<project>  what is left, when the batch ends
An interactive call goes in one, when its answer is there:
    call     available:<project> -> revenue              what it cost
What an operator posts:
    topup    cash                -> available:<project>  money that a prepaid project may spend
    payment  cash                -> receivable:<project> money for what was invoiced
    refund   revenue             -> available:<project>  a charge taken back, never more than was charged
    credit   credits             -> available:<project>  goodwill: no charge is behind it; the month's invoice is less

In test mode `revenue` is `test:revenue`: nothing of it is money, and operators post nothing there.

Entries of a posting sum to 0. Its key makes a repeated posting a no-op. After the release a batch holds nothing in
`reserved`, and `revenue` holds the sum of its parts that aren't void, less refunds. `cash` is the world outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchsvc import mode

REVENUE = "revenue"
TEST_REVENUE = "test:revenue"
CASH = "cash"
CREDITS = "credits"

Movement = Literal["topup", "payment", "refund", "credit"]


def revenue(project_id: str) -> str:
    """What was charged; what test mode charges is no money, and stays apart from it."""
    return TEST_REVENUE if mode.is_test(project_id) else REVENUE


def available(project_id: str) -> str:
    return f"available:{project_id}"


def reserved(project_id: str) -> str:
    return f"reserved:{project_id}"


def receivable(project_id: str) -> str:
    return f"receivable:{project_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """A balanced transaction that isn't stored yet: `amount_nanos` leaves `source` and arrives in `target`."""

    kind: str
    key: str
    project_id: str
    source: str
    target: str
    amount_nanos: int
    batch_id: str | None = None
    part_id: str | None = None
    corrects_month: str | None = None
    reason: str | None = None
    actor: str | None = None

    def entries(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """(account, amount) twice; the amounts sum to 0."""
        return (self.source, -self.amount_nanos), (self.target, self.amount_nanos)


def reserve(project_id: str, batch_id: str, amount_nanos: int) -> Posting:
    _refuse_negative("reservation", batch_id, amount_nanos)
    return Posting(
        kind="reserve",
        key=f"reserve:{batch_id}",
        batch_id=batch_id,
        project_id=project_id,
        source=available(project_id),
        target=reserved(project_id),
        amount_nanos=amount_nanos,
    )


def extend(project_id: str, batch_id: str, amount_nanos: int, total_nanos: int) -> Posting:
    """Reserves more. `total_nanos` is all that was reserved for the batch, this included: it only grows, so it names
    the extension."""
    _refuse_negative("extension", batch_id, amount_nanos)
    return Posting(
        kind="extend",
        key=f"extend:{batch_id}:{total_nanos}",
        batch_id=batch_id,
        project_id=project_id,
        source=available(project_id),
        target=reserved(project_id),
        amount_nanos=amount_nanos,
    )


def part(project_id: str, batch_id: str, part_id: str, cost_nanos: int) -> Posting:
    _refuse_negative("cost", part_id, cost_nanos)
    return Posting(
        kind="part",
        key=f"part:{part_id}",
        batch_id=batch_id,
        project_id=project_id,
        source=reserved(project_id),
        target=revenue(project_id),
        amount_nanos=cost_nanos,
        part_id=part_id,
    )


def call(project_id: str, call_id: str, cost_nanos: int) -> Posting:
    """What an interactive call cost. `part_id` names it, as its usage row does."""
    _refuse_negative("cost", call_id, cost_nanos)
    return Posting(
        kind="call",
        key=f"call:{call_id}",
        project_id=project_id,
        source=available(project_id),
        target=revenue(project_id),
        amount_nanos=cost_nanos,
        part_id=call_id,
    )


def void(project_id: str, batch_id: str, part_id: str, cost_nanos: int) -> Posting:
    """Takes a part's posting back, so that its lines can be run and posted again."""
    _refuse_negative("cost", part_id, cost_nanos)
    return Posting(
        kind="void",
        key=f"void:{part_id}",
        batch_id=batch_id,
        project_id=project_id,
        source=revenue(project_id),
        target=reserved(project_id),
        amount_nanos=cost_nanos,
        part_id=part_id,
    )


def release(project_id: str, batch_id: str, fin_epoch: int, held_nanos: int) -> Posting:
    """Gives back `held_nanos`, the batch's balance in `reserved`: a second release finds 0 and moves nothing."""
    return Posting(
        kind="release",
        key=f"release:{batch_id}:{fin_epoch}",
        batch_id=batch_id,
        project_id=project_id,
        source=reserved(project_id),
        target=available(project_id),
        amount_nanos=held_nanos,
    )


def move(
    kind: Movement,
    project_id: str,
    amount_nanos: int,
    *,
    reason: str,
    key: str,
    actor: str | None = None,
    batch_id: str | None = None,
    corrects_month: str | None = None,
) -> Posting:
    """What an operator posts. The same `key` again is the same posting, another one is another, however equal."""
    if amount_nanos <= 0:
        raise ValueError(f"A {kind} must be more than 0, not {amount_nanos} nano-dollars.")
    sources = {"topup": CASH, "payment": CASH, "refund": revenue(project_id), "credit": CREDITS}
    return Posting(
        kind=kind,
        key=f"{kind}:{project_id}:{key}",
        batch_id=batch_id,
        project_id=project_id,
        source=sources[kind],
        target=receivable(project_id) if kind == "payment" else available(project_id),
        amount_nanos=amount_nanos,
        corrects_month=corrects_month,
        reason=reason,
        actor=actor,
    )


def _refuse_negative(what: str, whose: str, amount_nanos: int) -> None:
    if amount_nanos < 0:
        raise ValueError(f"The {what} of {whose} is negative: {amount_nanos} nano-dollars.")
