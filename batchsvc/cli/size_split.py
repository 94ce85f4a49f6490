"""`batchsvc models size --split`: whether prefill and decode on pools of their own would cost less than one pool.

The arithmetic is engine/split/pays.py's; prices are those that `models size` reckons with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.money import format_dollars

if TYPE_CHECKING:
    from engine.memory.cards import Card
    from engine.memory.shape import ModelShape
    from engine.memory.sizing import Workload
    from engine.split.pays import Cost, Mix, Split

DEFAULT_MIX = "1024:256"
_REQUESTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAnswer:
    """`pools` are single pools of each card that takes part, `same` both halves on the card asked for, `apart` prefill
    on another one."""

    mix: Mix
    pools: list[Cost]
    same: Split
    apart: Split

    @property
    def pool(self) -> Cost:
        """The cheapest single one."""
        return min(self.pools, key=lambda pool: pool.nanos(pool.both_s))

    @property
    def best(self) -> Split:
        return min(self.same, self.apart, key=lambda split: split.nanos(_REQUESTS))

    @property
    def pays(self) -> bool:
        return self.best.nanos(_REQUESTS) < self.pool.nanos(_REQUESTS * self.pool.both_s)


def split_answer(
    shape: ModelShape, workload: Workload, card: Card, *, mix: str, prefill_card: str | None
) -> SplitAnswer:
    """Raises CommandError for what can't be reckoned."""
    from engine.errors import ConfigError
    from engine.memory.cards import find_card
    from engine.split.pays import best_two_pools, one_pool, two_pools

    found = _mix(mix)
    if found.prompt_tokens + found.output_tokens > shape.context_tokens:
        raise CommandError(
            f"--mix asks for {found.prompt_tokens + found.output_tokens:,} tokens a request; this model's context "
            f"holds {shape.context_tokens:,}.",
            Exit.USAGE,
        )
    try:
        other = None if prefill_card is None else find_card(prefill_card)
        same = two_pools(card, card, shape, workload, found)
        if other is None:
            apart = best_two_pools(card, shape, workload, found)
        else:
            apart = two_pools(other, card, shape, workload, found)
        cards = [card] if apart is None or apart.prefill.card.name == card.name else [card, apart.prefill.card]
        pools = [pool for pool in (one_pool(each, shape, workload, found) for each in cards) if pool is not None]
    except ConfigError as error:
        raise CommandError(str(error), Exit.USAGE) from error
    if same is None or apart is None:
        unable = card if same is None else other
        raise CommandError(f"No number of {unable} holds this model and a request of that length.")
    return SplitAnswer(mix=found, pools=pools, same=same, apart=apart)


def split_document(answer: SplitAnswer) -> dict[str, Any]:
    def pool(cost: Cost) -> dict[str, Any]:
        return {
            "card": cost.card.name,
            "cards_per_host": cost.cards,
            "batch": cost.batch,
            "requests_per_s": round(1 / cost.both_s, 4),
            "cost_nanos_per_1000_requests": cost.nanos(_REQUESTS * cost.both_s),
        }

    def split(found: Split) -> dict[str, Any]:
        return {
            "prefill_card": found.prefill.card.name,
            "decode_card": found.decode.card.name,
            "decode_cards_per_prefill_card": round(found.decode_cards, 4),
            "link_bytes_per_s": round(found.link_bytes_per_s),
            "cost_nanos_per_1000_requests": found.nanos(_REQUESTS),
        }

    return {
        "prompt_tokens": answer.mix.prompt_tokens,
        "cached_tokens": answer.mix.cached_tokens,
        "output_tokens": answer.mix.output_tokens,
        "pools": [pool(cost) for cost in answer.pools],
        "splits": [split(found) for found in _splits(answer)],
        "pays": answer.pays,
        "sentence": verdict(answer),
    }


def split_rows(answer: SplitAnswer) -> list[tuple[str, str, str]]:
    """Rows of the table: what, the cost of a thousand requests, and a note."""
    rates = "at half of the cards' arithmetic and 80 % of their bandwidth"
    rows = [("1,000 requests", "", f"{_tokens(answer.mix)}, {rates}")]
    for cost in answer.pools:
        note = f"{cost.cards:,} a host, which answers {1 / cost.both_s:,.3g} requests a second"
        rows.append((f"  one pool, {cost.card.name}", _dollars(cost.nanos(_REQUESTS * cost.both_s)), note))
    for found in _splits(answer):
        name = f"  {found.prefill.card.name} + {found.decode.card.name}"
        ratio = found.decode_cards
        cards = f"1 card for prefill to {ratio:,.2g}" if ratio >= 1 else f"{1 / ratio:,.2g} cards for prefill to 1"
        link = f"{found.link_bytes_per_s / 1e9:,.3g} GB/s out of each prefill host of {found.prefill.cards:,}"
        note = f"{cards} for decode; {link}"
        rows.append((name, _dollars(found.nanos(_REQUESTS)), note))
    return [*rows, ("  so", "", verdict(answer))]


def verdict(answer: SplitAnswer) -> str:
    """Whether to split, in a sentence."""
    one, two = answer.pool.nanos(_REQUESTS * answer.pool.both_s), answer.best.nanos(_REQUESTS)
    pool = f"one pool of {answer.pool.card.name}"
    if not answer.pays:
        return (
            f"{pool[0].upper()}{pool[1:]} wins: apart, the arithmetic of prompts can't hide behind the reading of "
            f"decodes, and the same requests cost {100 * (two - one) / one:.0f} % more."
        )
    cards = f"prefill on {answer.best.prefill.card.name} and decode on {answer.best.decode.card.name}"
    return f"A split pays: {cards} costs {100 * (one - two) / one:.0f} % less than {pool}."


def _splits(answer: SplitAnswer) -> list[Split]:
    return (
        [answer.same]
        if answer.apart.prefill.card.name == answer.same.prefill.card.name
        else [answer.same, answer.apart]
    )


def _dollars(nanos: int) -> str:
    return format_dollars(round(nanos, -5) or nanos)


def _tokens(mix: Mix) -> str:
    cached = f" ({mix.cached_tokens:,} of them cached)" if mix.cached_tokens else ""
    return f"prompts of {mix.prompt_tokens:,} tokens{cached}, answers of {mix.output_tokens:,}"


def _mix(text: str) -> Mix:
    """PROMPT:OUTPUT tokens, or PROMPT:OUTPUT:CACHED, the last in percent of the prompt."""
    from engine.split.pays import Mix

    found = re.fullmatch(r"(\d{1,7}):(\d{1,7})(?::(\d{1,2})%?)?", text.strip(), re.ASCII)
    if not found or not int(found[1]) or not int(found[2]):
        raise CommandError(
            f"--mix takes tokens of a prompt and of an answer, such as {DEFAULT_MIX}, or 1024:256:50 where half of "
            f"each prompt is cached, not {text[:40]!r}.",
            Exit.USAGE,
        )
    prompt, output = int(found[1]), int(found[2])
    return Mix(prompt_tokens=prompt, cached_tokens=prompt * int(found[3] or 0) // 100, output_tokens=output)
