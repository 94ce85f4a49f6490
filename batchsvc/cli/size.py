"""`batchsvc models size`: what memory a model takes, what it fits on, how fast it is there at most, and at what cost.

The arithmetic is engine/memory's, by which the engine sizes its own pool; sizes are in GB of 1e9 bytes.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import JsonOption
from batchsvc.cli.report import wants_color
from batchsvc.cli.size_split import DEFAULT_MIX, SplitAnswer, split_answer, split_document, split_rows
from batchsvc.money import format_dollars, parse_dollars
from engine.memory.cards import CARDS

if TYPE_CHECKING:
    from engine.memory.cards import Card
    from engine.memory.fit import WayOut
    from engine.memory.formats import WeightFormat
    from engine.memory.shape import ModelShape
    from engine.memory.sizing import Demand, Workload

_MOST_TOKENS = 1 << 30
_MOST_SEQUENCES = 1_000_000
_MOST_CARDS = 100_000
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_GB = 10**9
_PLAIN_COLUMNS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that the command says, before it is text or JSON.

    `split`  cards that split every head evenly, from `cards` on
    `batch`  the most sequences of this context on `cards`; 0: not even one fits
    """

    name: str
    shape: ModelShape
    workload: Workload
    needs: Demand
    card: Card
    cards: int
    is_default_price: bool
    fits: bool
    split: int | None
    batch: int
    ways_out: list[WayOut]
    halves: SplitAnswer | None


def size(
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="llama-70b (a textbook shape), a config.json, a GGUF file, hf:owner/name."),
    ],
    context: Annotated[
        str | None, typer.Option(metavar="TOKENS", help="Of each sequence; 128k is 131,072 (default: the model's).")
    ] = None,
    concurrency: Annotated[str, typer.Option(metavar="N", help="Sequences at once.")] = "1",
    weights: Annotated[
        str, typer.Option(metavar="FORMAT", help="32, 16, 8 or 4 bits, fp8, gptq, awq; stored: as the files are.")
    ] = "16",
    group: Annotated[
        str | None, typer.Option(metavar="N", help="Columns that share a scale: 32, 64 or 128 (int4: 128).")
    ] = None,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="A zero point beside each scale.")] = False,
    kv: Annotated[str, typer.Option(metavar="FORMAT", help="Of the KV cache: 32, 16 or 8 bits, fp8.")] = "16",
    draft: Annotated[
        str | None, typer.Option(metavar="D", help="A smaller model, or heads, that propose tokens for it.")
    ] = None,
    card: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(CARDS)}; any other as GB:GB/s, such as 48:864.")
    ] = "h100",
    cards: Annotated[str | None, typer.Option(metavar="N", help="How many (default: as many as it takes).")] = None,
    price: Annotated[str | None, typer.Option(metavar="DOLLARS", help="Of an hour of one card.")] = None,
    split: Annotated[
        bool, typer.Option("--split", help="Also say whether prefill and decode on pools of their own would pay.")
    ] = False,
    mix: Annotated[
        str,
        typer.Option(metavar="P:O", help="With --split: tokens of a prompt and an answer; P:O:50 if half is cached."),
    ] = DEFAULT_MIX,
    prefill_card: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --split: for prefill (default: the one that costs least).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what memory a model takes, what it fits on, and how fast it can decode there at most.

    Exit code 1 where it doesn't fit on --cards; the answer then says what would.
    """
    from engine.errors import ConfigError, ModelError
    from engine.memory.cards import find_card
    from engine.memory.formats import kv_format, weight_format
    from engine.memory.sizing import Workload

    console = Console(as_json=as_json)
    sequences = _whole("--concurrency", concurrency, _MOST_SEQUENCES)
    tokens = None if context is None else _tokens("--context", context)
    count = None if cards is None else _whole("--cards", cards, _MOST_CARDS)
    columns = None if group is None else _whole("--group", group, 1 << 10)
    try:
        weight = weight_format(weights, group=columns, has_zero_points=zero_points)
        chosen = _priced(find_card(card), price)
        cache = kv_format(kv)
    except ConfigError as error:
        raise CommandError(str(error), Exit.USAGE) from error
    try:
        shape = _shape(model, console)
        beside = 0 if draft is None else _draft_bytes(draft, weight, console)
    except ModelError as error:
        raise CommandError(str(error), Exit.REFUSED) from error
    if weight.is_stored and shape.stored_bytes is None:
        raise CommandError(
            f"{model} has no weights in files: --weights takes a format or bits, such as 16.", Exit.USAGE
        )
    workload = Workload(
        context_tokens=tokens or shape.context_tokens,
        concurrency=sequences,
        weights=weight,
        kv=cache,
        draft_bytes=beside,
    )
    if workload.context_tokens > shape.context_tokens:
        console.say(f"{model} was made for contexts of up to {shape.context_tokens:,} tokens.")
    halves = split_answer(shape, workload, chosen, mix=mix, prefill_card=prefill_card) if split else None
    answer = _answer(model, shape, workload, chosen, count, halves, is_default_price=price is None)
    console.result(_document(answer))
    console.out(_text(answer))
    if not answer.fits:
        raise CommandError(_refusal(answer))


def _shape(model: str, console: Console) -> ModelShape:
    from engine.load.fetch import locate_shape
    from engine.memory.sources import TEXTBOOKS, read_shape

    return read_shape(model if model in TEXTBOOKS else locate_shape(model, say=console.say))


def _draft_bytes(draft: str, weights: WeightFormat, console: Console) -> int:
    from engine.load.fetch import locate_shape
    from engine.memory.drafting import draft_bytes

    return draft_bytes(locate_shape(draft, say=console.say), weights)


def _priced(card: Card, price: str | None) -> Card:
    if price is None:
        return card
    nanos = parse_dollars(price)
    if nanos is None or nanos <= 0:
        raise CommandError(f"--price takes dollars an hour above 0, such as 2.50, not {price[:40]!r}.", Exit.USAGE)
    return replace(card, price_nanos=nanos)


def _answer(
    name: str,
    shape: ModelShape,
    workload: Workload,
    card: Card,
    count: int | None,
    halves: SplitAnswer | None,
    *,
    is_default_price: bool,
) -> Answer:
    from engine.memory import fit
    from engine.memory.sizing import demand

    needs = demand(shape, workload)
    cards = count or fit.cards_needed(needs, card) or 1
    is_held = fit.fits(needs, card, cards)
    return Answer(
        name=name,
        shape=shape,
        workload=workload,
        needs=needs,
        card=card,
        cards=cards,
        is_default_price=is_default_price and card.price_nanos is not None,
        fits=is_held,
        split=fit.tensor_parallel(shape, needs, card, at_least=cards),
        batch=fit.largest_batch(shape, workload, card, cards),
        ways_out=[] if is_held else fit.ways_out(shape, workload, card, cards),
        halves=halves,
    )


def _speed(answer: Answer, concurrency: int) -> dict[str, Any]:
    """The most tokens a second that so many sequences get, and what a million of them cost at least."""
    from engine.memory import fit
    from engine.memory.sizing import demand

    workload = replace(answer.workload, concurrency=concurrency)
    rate = fit.decode_ceiling(demand(answer.shape, workload), workload, answer.card, answer.cards)
    price = answer.card.price_nanos
    cost = None if price is None else fit.nanos_per_million_tokens(rate, price, answer.cards)
    return {
        "concurrency": concurrency,
        "decode_tokens_per_s": round(float(rate), 3),
        "cost_nanos_per_million_tokens": cost,
    }


def _document(answer: Answer) -> dict[str, Any]:
    workload, needs, card = answer.workload, answer.needs, answer.card
    return {
        "object": "model.size",
        "model": answer.name,
        "family": answer.shape.family,
        "parameters": answer.shape.num_parameters,
        "context_tokens": workload.context_tokens,
        "concurrency": workload.concurrency,
        "weight_format": str(workload.weights),
        "kv_format": str(workload.kv),
        "stored_bytes": answer.shape.stored_bytes,
        "weight_bytes": needs.weights.values,
        "weight_scale_bytes": needs.weights.scales,
        "draft_bytes": needs.draft_bytes,
        "kv_bytes": needs.kv.values,
        "kv_scale_bytes": needs.kv.scales,
        "total_bytes": needs.total_bytes,
        "workspace_bytes_per_card": needs.workspace_bytes,
        "card": {
            "name": card.name,
            "memory_bytes": card.memory_bytes,
            "read_bytes_per_s": card.read_bytes_per_s,
            "price_nanos_per_hour": card.price_nanos,
            "is_default_price": answer.is_default_price,
        },
        "cards": answer.cards,
        "fits": answer.fits,
        "tensor_parallel": answer.split,
        "largest_batch": answer.batch,
        "at_concurrency": _speed(answer, workload.concurrency) if answer.fits else None,
        "at_largest_batch": _speed(answer, answer.batch) if answer.batch else None,
        "ways_out": [
            {
                "kind": way.kind,
                "sentence": way.sentence,
                "context_tokens": way.workload.context_tokens,
                "concurrency": way.workload.concurrency,
                "weight_format": str(way.workload.weights),
                "kv_format": str(way.workload.kv),
                "cards": way.cards,
                "total_bytes": way.total_bytes,
            }
            for way in answer.ways_out
        ],
        **({} if answer.halves is None else {"split": split_document(answer.halves)}),
    }


def _text(answer: Answer) -> str:
    shape, workload, needs, card = answer.shape, answer.workload, answer.needs, answer.card
    one = needs.kv.total // workload.concurrency
    is_other = shape.stored_bytes is not None and not workload.weights.is_stored
    stored = f", {_gb(shape.stored_bytes or 0)} as its files have them" if is_other else ""
    beside = _head(answer) + stored
    head = (
        f"{answer.name}: {shape.num_parameters / 1e9:,.4g} billion parameters, {shape.num_layers:,} layers, "
        f"{shape.num_kv_heads:,} KV heads of {shape.head_dim:,}\n"
        f"{workload.concurrency:,} sequence{'s' * (workload.concurrency > 1)} of {workload.context_tokens:,} tokens"
    )
    rows = [
        ("weights", _gb(needs.weights.total), f"{workload.weights}{_scales(needs.weights.scales)}{beside}"),
        *([("draft", _gb(needs.draft_bytes), "weights that propose tokens")] if needs.draft_bytes else []),
        ("KV", _gb(needs.kv.total), f"{workload.kv}{_scales(needs.kv.scales)}, {_gb(one)} a sequence"),
        ("total", _gb(needs.total_bytes), ""),
        ("workspace", _gb(needs.workspace_bytes), "at most, on each card beside its share of the total"),
        ("cards", f"{answer.cards:,} x {card}", "" if answer.fits else "too few"),
    ]
    if answer.fits and answer.cards > 1:
        split = f"{answer.split:,} x {card.name}" if answer.split else "-"
        heads = f"{shape.num_heads:,} heads and {shape.num_kv_heads:,} KV heads"
        rows.append(("tensor parallel", split, f"the least number that splits {heads} evenly"))
    if answer.fits:
        rows += _speed_rows(answer, workload.concurrency, "")
    if answer.batch and answer.batch != workload.concurrency:
        rows.append(("largest batch", f"{answer.batch:,}", f"sequences of this context on {answer.cards:,} x {card}"))
        rows += _speed_rows(answer, answer.batch, "  with it")
    if answer.halves is not None:
        rows += split_rows(answer.halves)
    return f"{head}\n\n{_table(rows)}"


def _table(rows: list[tuple[str, str, str]]) -> str:
    """What, how much, and a note; notes wrap on a terminal that is too narrow for them."""
    from rich.console import Console as RichConsole
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True, justify="right")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    color = wants_color()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PLAIN_COLUMNS
    text = io.StringIO()
    RichConsole(file=text, width=width, force_terminal=color, no_color=not color, highlight=False, markup=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _speed_rows(answer: Answer, concurrency: int, label: str) -> list[tuple[str, str, str]]:
    speed = _speed(answer, concurrency)
    card, price = answer.card, answer.card.price_nanos
    bandwidth = f"{answer.cards:,} x {card.read_bytes_per_s / _GB:,.0f} GB/s"
    rate = f"{speed['decode_tokens_per_s']:,.0f} tokens/s"
    rows = [(label or "decode ceiling", rate, f"of all sequences at most: {bandwidth} for weights and full contexts")]
    if price is None:
        return [*rows, (label or "cost", "-", "--price says what an hour of a card costs")]
    whose = "a default (--price)" if answer.is_default_price else "as given"
    asked = f"{answer.cards:,} x {format_dollars(price)} an hour, {whose}"
    cost = format_dollars(round(speed["cost_nanos_per_million_tokens"], -5))
    return [*rows, (label or "cost", cost, f"a million output tokens at least, at {asked}")]


def _refusal(answer: Answer) -> str:
    needs, card = answer.needs, answer.card
    room = f"{answer.cards:,} x {card}"
    taken = f"{_gb(needs.total_bytes)} and {_gb(needs.workspace_bytes)} of workspace on each card"
    if not answer.ways_out:
        return f"{answer.name} takes {taken}, which {card} can't hold; a card with more memory would."
    ways = "; ".join(f"{way.sentence} ({_gb(way.total_bytes)})" for way in answer.ways_out)
    return f"{answer.name} takes {taken}, more than fits on {room}; what would fit: {ways}."


def _scales(scales: int) -> str:
    return f", {_gb(scales)} of it scales" if scales else ""


def _head(answer: Answer) -> str:
    """What a tied head takes, which the kernels pack for themselves."""
    from engine.memory.sizing import head_parts

    shape, weights = answer.shape, answer.workload.weights
    if shape.head is None or not shape.is_tied or weights.is_stored:
        return ""
    return f", {_gb(head_parts(shape.head, weights).total)} of it the head, a second copy of the embedding"


def _gb(size: int) -> str:
    """A size with a digit after the point, small ones with three."""
    return f"{size / _GB:,.1f} GB" if size >= 10 * _GB else f"{size / _GB:,.3f} GB"


def _tokens(option: str, text: str) -> int:
    """Tokens such as 8192, 8,192, 128k (131,072) or 1.5M. Raises CommandError."""
    found = re.fullmatch(r"(\d{1,12}|\d{1,3}(?:[,_]\d{3}){1,3})(\.\d{1,3})?([kmg]?)", text.strip().lower(), re.ASCII)
    if found and not (found[2] and not found[3]):
        thousandths = int(re.sub("[,_]", "", found[1])) * 1000 + int((found[2] or ".0")[1:].ljust(3, "0"))
        tokens = thousandths * _UNITS[found[3]] // 1000
        if 1 <= tokens <= _MOST_TOKENS:
            return tokens
    raise CommandError(
        f"{option} takes tokens from 1 to {_MOST_TOKENS:,}, such as 8192 or 128k, not {text[:40]!r}.", Exit.USAGE
    )


def _whole(option: str, text: str, most: int) -> int:
    """A whole number from 1 to `most`. Raises CommandError."""
    if re.fullmatch(r"\d{1,12}", text.strip(), re.ASCII) and 1 <= int(text) <= most:
        return int(text)
    raise CommandError(f"{option} takes a whole number from 1 to {most:,}, not {text[:40]!r}.", Exit.USAGE)
