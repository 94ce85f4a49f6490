"""`.ci/gpu speed`: what the device copies and multiplies, what share of that each kernel reaches, and whole engines.

One table after the other, each line once it is known; what doesn't fit into `--limit-s` is named as not measured. A
random model of the shape of Llama 3.1 8B runs all workloads in all formats; beside it transformers' continuous
batching, where that is installed. At toy size the same runs on the CPU, and the figures mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from engine.ondevice.loads import FEW, FORMATS, LOADS, TOY_FEW, TOY_LOADS, Clock, Load
from engine.ondevice.place import Place, arguments, place_of, say

_LATE = "not measured: the time is up"
_LOAD_S = 10.0  # of one more model
_LEAST_RATE = 12_000.0  # output tokens a second that are reckoned with


@dataclass(frozen=True, slots=True)
class Rates:
    """Of this device: bytes copied a second, read and written, and operations of a bf16 matmul a second."""

    copy_bytes: float
    flops: float


def main() -> int:
    found = arguments("Measure every kernel against the device, and whole engines.")
    place, clock = place_of(found.toy), Clock(found.limit_s)
    rates = measure_rates(place)
    say(f"{place.name}: copies {rates.copy_bytes / 1e9:,.1f} GB/s, multiplies {rates.flops / 1e12:,.2f} TFLOP/s.\n")
    say(f"{'kernel':44} {'us':>9} {'GB/s':>8} {'of copy':>8} {'TFLOP/s':>8} {'of matmul':>9}")
    for name, seconds, size, flops in kernel_times(place):
        read, computed = size / seconds, flops / seconds
        say(
            f"{name:44} {seconds * 1e6:9.1f} {read / 1e9:8.1f} {read / rates.copy_bytes:8.2f} "
            f"{computed / 1e12:8.2f} {computed / rates.flops:9.2f}"
        )
        if not clock.has(0):
            break
    say(f"\n{'format':9} {'workload':52} {'s':>7} {'out tok/s':>10}")
    for line in engine_lines(place, clock):
        say(line)
    return 0


def measure_rates(place: Place) -> Rates:
    """The best that torch reaches: copying large tensors, multiplying square ones."""
    size = 1 << (16 if place.is_toy else 28)
    source = torch.ones(size, device=place.device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / place.seconds(lambda: target.copy_(source))
    side = 128 if place.is_toy else 8192
    a, b = (torch.randn(side, side, device=place.device).to(place.dtype) for _ in "ab")
    return Rates(copied, 2 * side**3 / place.seconds(lambda: a @ b))


def kernel_times(place: Place) -> Iterator[tuple[str, float, int, int]]:
    """Name, seconds, bytes and operations of each kernel at sizes of a busy engine."""
    from engine.ondevice.cases import Bench, Case
    from engine.ondevice.llama import LLAMA_8B, TOY

    bench = Bench(place, TOY if place.is_toy else LLAMA_8B)
    sequences, context = (3, 40) if place.is_toy else (256, 2048)
    counts = (1, 3) if place.is_toy else (1, 16, 64, 256, 2048)

    def timed(case: Case) -> tuple[str, float, int, int]:
        return case.name, place.seconds(case.run), case.least_bytes, case.flops

    for kv in ("bf16", "int8", "fp8"):
        yield timed(bench.attention(kv, [(context - 1, 1)] * sequences))
    yield timed(bench.attention("bf16", [(context - 1, 1)] * sequences, shared_blocks=context // 16 - 1))
    yield timed(bench.attention("bf16", [(0, context)]))
    for weights in ("bf16", "int8", "fp8", "w4a16"):
        for count in counts:
            yield timed(bench.linear(weights, count))
        yield timed(bench.gated(weights, counts[-1]))
    yield timed(bench.norm("bf16", counts[-1]))
    yield timed(bench.best(counts[1]))
    yield timed(bench.drawn(counts[1]))
    yield from _crossover(bench, place)


def _crossover(bench: object, place: Place) -> Iterator[tuple[str, float, int, int]]:
    """Codes of 4 bits multiplied as they are, and made floating-point first, where the engine changes from one to the
    other."""
    from engine.kernels.gpu import tier
    from engine.ondevice.cases import Bench

    assert isinstance(bench, Bench), "a bench"
    chosen = tier.FEW_ROWS
    for count in (2,) if place.is_toy else (32, 64, 128):
        for few, says in ((1 << 30, "as codes"), (0, "as floats")):
            tier.FEW_ROWS = few
            try:
                case = bench.linear("w4a16", count)
                yield f"w4a16 {count} rows {says}", place.seconds(case.run), case.least_bytes, case.flops
            finally:
                tier.FEW_ROWS = chosen


def engine_lines(place: Place, clock: Clock) -> Iterator[str]:
    """End to end: all formats on all workloads, then transformers."""
    ours_s = 0.0
    for label in FORMATS:
        if not clock.has(_LOAD_S):
            yield f"{label:9} {_LATE}"
        elif label != "bf16":
            yield from _of_format(place, clock, label)
        else:
            ours_s = yield from _of_format(place, clock, label)
    yield _peer_line(place, ours_s, clock)


def _of_format(place: Place, clock: Clock, label: str) -> Generator[str, None, float]:
    """The workloads in one format. In the end the seconds of the one that transformers has too."""
    from engine.ondevice.whole import Whole

    whole = Whole(place, *FORMATS[label])
    loads, few = (TOY_LOADS, TOY_FEW) if place.is_toy else (LOADS, FEW)
    planned_s = 0.0
    for load in loads:
        if not clock.has(load.tokens / _LEAST_RATE):
            yield f"{label:9} {load.name:52} {_LATE}"
            continue
        planned_s = whole.run(load)
        yield _line(label, load.name, load, planned_s)
    if label != "bf16":
        return 0.0
    shared = loads[-1]
    if clock.has(5 * planned_s):
        seconds = whole.run(shared, plans=False)
        yield _line(label, f"the same, unplanned (planned: {seconds / planned_s:.1f} times)", shared, seconds)
    seconds = whole.run(few)
    yield _line(label, few.name, few, seconds)
    return seconds


def _line(label: str, name: str, load: Load, seconds: float) -> str:
    return f"{label:9} {name:52} {seconds:7.2f} {load.tokens / seconds:10,.0f}"


def _peer_line(place: Place, ours_s: float, clock: Clock) -> str:
    from engine.ondevice.peer import PeerError, run_transformers

    name, load = "transformers' continuous batching", TOY_FEW if place.is_toy else FEW
    if not clock.has(2 * _LOAD_S) or not ours_s:
        return f"{name}: {_LATE}"
    try:
        seconds = run_transformers(place, load)
    except PeerError as error:
        return f"{name}: not measured, {error}"
    return f"{_line('bf16', f'{name}, the same', load, seconds)}  (ours: {seconds / ours_s:.1f} times as fast)"


if __name__ == "__main__":
    sys.exit(main())
