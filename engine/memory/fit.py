"""What fits on which cards: how many it takes, the largest batch, the decode ceiling, and the way out where it doesn't.

Cards share weights and KV evenly, and each needs the workspace of a step beside its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from engine.memory.cards import Card
from engine.memory.formats import KvFormat, WeightFormat, kv_format, weight_format
from engine.memory.shape import ModelShape
from engine.memory.sizing import Demand, Workload, demand, sequence_parts

_MILLION = 1_000_000
_HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A change of the workload, or of the number of cards, that fits. `kind`: format, concurrency, context or cards."""

    kind: str
    sentence: str
    workload: Workload
    cards: int
    total_bytes: int


def fits(needs: Demand, card: Card, cards: int) -> bool:
    return needs.total_bytes + cards * needs.workspace_bytes <= cards * card.memory_bytes


def cards_needed(needs: Demand, card: Card) -> int | None:
    """The least number of cards that hold it; None where one can't even hold the workspace of a step."""
    room = card.memory_bytes - needs.workspace_bytes
    return max(1, -(-needs.total_bytes // room)) if room > 0 else None


def tensor_parallel(shape: ModelShape, needs: Demand, card: Card, *, at_least: int) -> int | None:
    """The least number of cards, from `at_least` on, that split every head evenly; None where no number does.

    Beyond the number of KV heads each card has a copy of one, so that KV is split no further.
    """
    for cards in range(at_least, shape.num_heads + 1):
        if shape.num_heads % cards or (shape.num_kv_heads % cards and cards % shape.num_kv_heads):
            continue
        share = -(-needs.weights.total // cards) + -(-needs.kv.total // min(cards, shape.num_kv_heads))
        if share + needs.draft_bytes + needs.workspace_bytes <= card.memory_bytes:  # each has the whole draft
            return cards
    return None


def largest_batch(shape: ModelShape, workload: Workload, card: Card, cards: int) -> int:
    """The most sequences of that context that the cards hold; 0 where not even one fits."""
    one = sequence_parts(shape, workload.kv, workload.context_tokens, workload.block_tokens).total

    def is_held(concurrency: int) -> bool:
        return fits(demand(shape, replace(workload, concurrency=concurrency)), card, cards)

    return _largest(is_held, cards * card.memory_bytes // one)


def largest_context(shape: ModelShape, workload: Workload, card: Card, cards: int) -> int:
    """The longest context, in whole blocks and no longer than asked for, that fits at that concurrency; 0: none."""

    def is_held(blocks: int) -> bool:
        context = blocks * workload.block_tokens
        return fits(demand(shape, replace(workload, context_tokens=context)), card, cards)

    most = workload.context_tokens // workload.block_tokens
    return _largest(is_held, most) * workload.block_tokens


def decode_ceiling(needs: Demand, workload: Workload, card: Card, cards: int) -> Fraction:
    """Tokens a second that decoding can't exceed: a step gives each sequence one token, and reads the weights once
    and all of the KV, here that of full contexts, at the cards' bandwidth."""
    return Fraction(workload.concurrency * cards * card.read_bytes_per_s, needs.step_bytes)


def nanos_per_million_tokens(tokens_per_s: Fraction, price_nanos: int, cards: int) -> int:
    """What a million output tokens cost at that rate, in nano-dollars; the least, where the rate is the ceiling."""
    return round(Fraction(price_nanos * cards * _MILLION, _HOUR_S) / tokens_per_s)


def ways_out(shape: ModelShape, workload: Workload, card: Card, cards: int) -> list[WayOut]:
    """What would fit where the workload doesn't: another format, fewer sequences, a shorter context, more cards."""
    found = [way for way in (_by_format(shape, workload, card, cards),) if way]
    if batch := largest_batch(shape, workload, card, cards):
        fewer = replace(workload, concurrency=batch)
        found.append(_way("concurrency", shape, fewer, cards, _sequences(fewer)))
    if context := largest_context(shape, workload, card, cards):
        shorter = replace(workload, context_tokens=context)
        found.append(_way("context", shape, shorter, cards, f"contexts of {context:,} tokens"))
    needed = cards_needed(demand(shape, workload), card)
    if needed is not None:
        found.append(_way("cards", shape, workload, needed, f"{needed:,} x {card}"))
    return found


def _by_format(shape: ModelShape, workload: Workload, card: Card, cards: int) -> WayOut | None:
    """The first narrower format that fits; else the first that does with fewer sequences, or with a shorter context."""
    narrower = [replace(workload, weights=weights, kv=kv) for weights, kv in _narrower(shape, workload)]
    for changed in narrower:
        if fits(demand(shape, changed), card, cards):
            return _way("format", shape, changed, cards, _formats(changed))
    for changed in narrower:
        if batch := largest_batch(shape, changed, card, cards):
            fewer = replace(changed, concurrency=batch)
            return _way("format", shape, fewer, cards, f"{_formats(changed)} with {_sequences(fewer)}")
    for changed in narrower:
        if context := largest_context(shape, changed, card, cards):
            shorter = replace(changed, context_tokens=context)
            return _way("format", shape, shorter, cards, f"{_formats(changed)} with contexts of {context:,} tokens")
    return None


def _narrower(shape: ModelShape, workload: Workload) -> Iterator[tuple[WeightFormat, KvFormat]]:
    """Formats that take less, those that cost least quality first."""
    total = demand(shape, workload).total_bytes
    for weight in (workload.weights, *map(weight_format, ("bf16", "int8", "int4"))):
        for kv in (workload.kv, *map(kv_format, ("bf16", "int8"))):
            changed = replace(workload, weights=weight, kv=kv)
            if demand(shape, changed).total_bytes < total:
                yield weight, kv


def _way(kind: str, shape: ModelShape, workload: Workload, cards: int, sentence: str) -> WayOut:
    total = demand(shape, workload).total_bytes
    return WayOut(kind=kind, sentence=sentence, workload=workload, cards=cards, total_bytes=total)


def _formats(workload: Workload) -> str:
    return f"weights in {workload.weights} and KV in {workload.kv}"


def _sequences(workload: Workload) -> str:
    count = workload.concurrency
    return f"{count:,} sequence{'s' * (count > 1)} of {workload.context_tokens:,} tokens"


def _largest(is_held: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that is held, when whatever is held stays so for less; 0: none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_held(middle) else (low, middle - 1)
    return low
