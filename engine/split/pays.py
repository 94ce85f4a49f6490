"""When prefill and decode apart pay: what a request costs on one pool of cards, and on two; pure.

A step takes as long as its arithmetic or its reading, whichever is longer. One pool does both kinds of work in the same
steps, so the arithmetic of prompts hides behind the reading of decodes: max(a + b, c + d). Apart, each kind has steps
of its own: max(a, c) + max(b, d), which is never less. So on equal cards one pool always costs less or the same; two
pools pay where cards differ, and one kind is cheap in arithmetic and the other in bandwidth. That answers may have to
come within some time isn't in this: engine/split/sweep.py simulates it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from engine.errors import ConfigError
from engine.memory.cards import CARDS, Card
from engine.memory.fit import cards_needed, largest_batch
from engine.memory.shape import ModelShape
from engine.memory.sizing import Workload, attended_parts, demand, sequence_parts, weight_parts

_TERA = 10**12
_HOUR_S = 3600
_RATES = {
    "T4": (65, 130),
    "L4": (121, 242),
    "A10G": (70, 140),
    "RTX 4090": (165, 330),
    "L40S": (362, 733),
    "A100": (312, 624),
    "H100": (989, 1979),
    "H200": (989, 1979),
    "B200": (2250, 4500),
    "MI300X": (1307, 2615),
}
"""Dense tera-operations a second in 16 and in 8 bits, as data sheets have them."""

ARITHMETIC_SHARE, READING_SHARE = Fraction(1, 2), Fraction(4, 5)
"""Of a data sheet's rates, what engines reach: published runs of whole models are at 40 % of the arithmetic or more."""
LINK_BYTES_PER_S = 50 * 10**9
"""Out of a host, by the fastest network card that is common: 400 Gbit/s."""
_HOST_CARDS = 8
_MANY = 1_000_000  # requests, so that nano-dollars don't round


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What requests are like: tokens of a prompt, how many of them a cache holds already, and of an answer."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one request on a host of `cards` equal cards: seconds of the whole host, and nano-dollars where cards have a
    price. `batch` sequences decode at once there."""

    card: Card
    cards: int
    batch: int
    prefill_s: float  # in steps of its own
    decode_s: float
    both_s: float  # in the same steps

    def nanos(self, seconds: float) -> int:
        assert self.card.price_nanos is not None, "a card without a price has no costs"
        return round(self.card.price_nanos * self.cards * seconds / _HOUR_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Prefill on one kind of host, decode on the other. A request sends `sent_bytes` across."""

    prefill: Cost
    decode: Cost
    sent_bytes: int

    def nanos(self, requests: int) -> int:
        prefill_s, decode_s = self.prefill.prefill_s, self.decode.decode_s
        return self.prefill.nanos(requests * prefill_s) + self.decode.nanos(requests * decode_s)

    @property
    def decode_cards(self) -> float:
        """That one card for prefill keeps busy."""
        return self.decode.decode_s * self.decode.cards / (self.prefill.prefill_s * self.prefill.cards)

    @property
    def link_bytes_per_s(self) -> float:
        """Out of each prefill host."""
        return self.sent_bytes / self.prefill.prefill_s


def one_pool(card: Card, shape: ModelShape, workload: Workload, mix: Mix) -> Cost | None:
    """Hosts of as many cards as make requests cheapest; None where no number of cards holds the model. `workload` gives
    the formats. Raises ConfigError for a card whose rates nobody knows."""
    return _cheapest(_hosts(card, shape, workload, mix), lambda cost: cost.both_s)


def two_pools(prefill: Card, decode: Card, shape: ModelShape, workload: Workload, mix: Mix) -> Split | None:
    """Each of hosts of as many cards as make its half cheapest; as `one_pool` otherwise. The blocks that are new cross
    from one to the other, which may take longer than to compute them."""
    new = mix.prompt_tokens - mix.cached_tokens
    sent_bytes = sequence_parts(shape, workload.kv, new, workload.block_tokens).total
    linked = [
        replace(cost, prefill_s=max(cost.prefill_s, sent_bytes / LINK_BYTES_PER_S))
        for cost in _hosts(prefill, shape, workload, mix)
    ]
    first = _cheapest(linked, lambda cost: cost.prefill_s)
    second = _cheapest(_hosts(decode, shape, workload, mix), lambda cost: cost.decode_s)
    if first is None or second is None:
        return None
    return Split(prefill=first, decode=second, sent_bytes=sent_bytes)


def best_two_pools(decode: Card, shape: ModelShape, workload: Workload, mix: Mix) -> Split | None:
    """Decode on that card, prefill on the one that makes it cheapest."""
    splits = (two_pools(card, decode, shape, workload, mix) for card in CARDS.values())
    return min((split for split in splits if split is not None), key=lambda split: split.nanos(_MANY), default=None)


def _cheapest(costs: list[Cost], seconds: Callable[[Cost], float]) -> Cost | None:
    """Of those that cost the same, the one of the fewest cards."""
    return min(costs, key=lambda cost: (float(f"{seconds(cost) * cost.cards:.9g}"), cost.cards), default=None)


def _hosts(card: Card, shape: ModelShape, workload: Workload, mix: Mix) -> list[Cost]:
    """Of any number of cards that holds the model, up to eight unless it takes more."""
    if card.name not in _RATES:
        raise ConfigError(f"Nobody knows how fast {card.name} computes; the split is reckoned for {', '.join(CARDS)}.")
    one = replace(workload, context_tokens=mix.prompt_tokens + mix.output_tokens, concurrency=1)
    least = cards_needed(demand(shape, one), card)
    numbers = range(0) if least is None else range(least, max(least, _HOST_CARDS) + 1)
    return [_cost(card, cards, shape, one, mix) for cards in numbers]


def _cost(card: Card, cards: int, shape: ModelShape, workload: Workload, mix: Mix) -> Cost:
    operations, reading = _rates(card, cards, workload)
    batch = largest_batch(shape, workload, card, cards)
    weights = weight_parts(shape, workload.weights).total
    new = mix.prompt_tokens - mix.cached_tokens
    middle = mix.prompt_tokens + mix.output_tokens // 2
    prefill = new * _operations(shape, (mix.cached_tokens + mix.prompt_tokens) // 2, has_head=False) / operations
    prefill_read = Fraction(new * weights, workload.step_tokens) / reading
    decode = mix.output_tokens * _operations(shape, middle, has_head=True) / operations
    decode_read = mix.output_tokens * attended_parts(shape, workload.kv, middle).total / reading
    shared_read = Fraction(mix.output_tokens * weights, batch) / reading
    return Cost(
        card=card,
        cards=cards,
        batch=batch,
        prefill_s=float(max(prefill, prefill_read)),
        decode_s=float(max(decode, decode_read + shared_read)),
        both_s=float(max(prefill + decode, decode_read + max(shared_read, prefill_read))),
    )


def _rates(card: Card, cards: int, workload: Workload) -> tuple[Fraction, Fraction]:
    """Operations and bytes a second. Only formats of 8 bits and scales a row are multiplied as such."""
    plain, narrow = _RATES[card.name]
    is_narrow = workload.weights.bits == 8 and workload.weights.group is None
    tera = narrow if is_narrow else plain
    return cards * tera * _TERA * ARITHMETIC_SHARE, cards * card.read_bytes_per_s * READING_SHARE


def _operations(shape: ModelShape, context: int, *, has_head: bool) -> int:
    """Of one token: two for each weight, and the products with so many keys and values."""
    head = shape.head.elements if shape.head is not None and has_head else 0
    attended = shape.num_layers * shape.num_heads * shape.head_dim * context
    return 2 * (sum(matrix.elements for matrix in shape.matrices) + head) + 4 * attended
