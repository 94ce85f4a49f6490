"""`.ci/gpu speed`: what the device copies and multiplies, what share of that each kernel reaches, and whole engines.

First all kernels are compiled, side by side. Then comes one table after the other, each line once it is known; what
fails is told, what doesn't fit into `--limit-s` is named as not measured. A random model of the shape of Llama 3.1 8B
runs all workloads in all formats, each format in a process of its own; beside it transformers' continuous batching,
where that is installed. At toy size the same runs on the CPU, and the figures mean nothing.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine.ondevice.child import Step
from engine.ondevice.correct import lanes_of, look
from engine.ondevice.crew import Clock, Crew
from engine.ondevice.loads import FEW, FORMATS, LOADS, SHARED, TOY_FEW, TOY_LOADS, TOY_SHARED
from engine.ondevice.place import Place, arguments, keep, place_of, say
from engine.ondevice.report import Report

if TYPE_CHECKING:
    from engine.ondevice.cases import Bench, Case
    from engine.ondevice.whole import Whole

MAKER = "engine.ondevice.speed:steps"
_LOAD_S = 12.0  # of a process with one more model


def main() -> int:
    found = arguments("Measure every kernel against the device, and whole engines.")
    place = place_of(found.toy)
    crew = Crew(MAKER, steps(place), found.toy, Clock(found.limit_s))
    report, groups = Report(), list(dict.fromkeys(step.group for step in crew.steps))
    for group in groups:
        lanes = lanes_of(report.device) if group == "compile" else 1
        for outcome in crew.run([i for i, step in enumerate(crew.steps) if step.group == group], lanes):
            for line in report.lines(outcome):
                say(line)
            keep(found.json, report.figures())
        if not report.device:
            return 1
    for line in report.ending():
        say(line)
    say(f"{report.num_measured} measured, {report.num_failed} failed, {report.num_late} for want of time not measured.")
    return int(report.num_failed > 0)


def steps(place: Place) -> list[Step]:
    if place.is_toy:
        os.environ["TRITON_INTERPRET"] = "1"  # here too, where only names are wanted of what imports kernels
    bench = functools.cache(partial(_bench, place))
    named = list(_kernels(place.is_toy))
    found = [Step("device", partial(look, place), "device", limit_s=90)]
    if not place.is_toy:
        found += [Step(name, partial(_compiled, make, bench), "compile", limit_s=90) for name, make in named]
        found += [Step(f"engine, {label}", partial(_small, place, label), "compile", limit_s=90) for label in FORMATS]
    found.append(Step("rates", partial(measure_rates, place), "kernels"))
    found += [Step(name, partial(_kernel, place, make, bench), "kernels", expected_s=2.0) for name, make in named]
    for label in FORMATS:
        found += _engines(place, label)
        if label == "bf16":
            load = TOY_FEW if place.is_toy else FEW
            found.append(Step(load.name, partial(_peer, place), "transformers", _expected(place, 2 * _LOAD_S), 90.0))
    return found


def measure_rates(place: Place) -> dict[str, Any]:
    """The best that torch reaches: copying large tensors, multiplying square ones of bf16. A second."""
    size = 1 << (16 if place.is_toy else 28)
    source = torch.ones(size, device=place.device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / place.seconds(lambda: target.copy_(source))
    side = 128 if place.is_toy else 8192
    a, b = (torch.randn(side, side, device=place.device).to(place.dtype) for _ in "ab")
    return {"copy_bytes": copied, "flops": 2 * side**3 / place.seconds(lambda: a @ b)}


def _kernels(is_toy: bool) -> Iterator[tuple[str, Callable[[Bench], Case]]]:
    """Each kernel at sizes of a busy engine, by name."""
    from engine.kernels.gpu import tier
    from engine.ondevice.cases import KV, WEIGHTS, Bench

    count, context = (3, 40) if is_toy else (256, 2048)
    counts = (1, 3) if is_toy else (1, 16, 64, 256, 2048)
    sizes = [(context - 1, 1)] * count
    for kv in KV:
        yield f"attend, KV {kv}, decodes", partial(Bench.attention, kv=kv, sizes=sizes)
    shared = context // 16 - 1
    yield "attend, KV bf16, shared prefix", partial(Bench.attention, kv="bf16", sizes=sizes, shared_blocks=shared)
    yield "attend, KV bf16, prefill", partial(Bench.attention, kv="bf16", sizes=[(0, context)])
    for weights in WEIGHTS:
        for rows in counts:
            yield f"matmul, {weights}, {rows} rows", partial(Bench.linear, weights=weights, count=rows)
        yield f"gate and up, {weights}, {counts[-1]} rows", partial(Bench.gated, weights=weights, count=counts[-1])
    yield f"norm_rows, bf16, {counts[-1]} rows", partial(Bench.norm, weights="bf16", count=counts[-1])
    yield "best_rows", partial(Bench.best, count=counts[1])
    yield "sample_rows", partial(Bench.drawn, count=counts[1])
    # where the engine changes from the one to the other
    for rows in (2,) if is_toy else (32, 64, 128):
        for most, says in ((1 << 30, "as codes"), (0, "as floats")):

            def crossing(bench: Bench, rows: int = rows, most: int = most) -> Case:
                tier.FEW_ROWS = most
                return bench.linear("w4a16", rows)

            yield f"matmul, w4a16, {rows} rows {says}", crossing


def _bench(place: Place) -> Bench:
    from engine.ondevice.cases import Bench
    from engine.ondevice.llama import LLAMA_8B, TOY

    return Bench(place, TOY if place.is_toy else LLAMA_8B)


def _made(make: Callable[[Bench], Case], bench: Callable[[], Bench], use: Callable[[Case], Any]) -> Any:
    """What `use` gives for a case, which may change where the tier crosses over for as long."""
    from engine.kernels.gpu import tier

    chosen = tier.FEW_ROWS
    try:
        return use(make(bench()))
    finally:
        tier.FEW_ROWS = chosen


def _compiled(make: Callable[[Bench], Case], bench: Callable[[], Bench]) -> dict[str, Any]:
    _made(make, bench, lambda case: case.run())
    return {}


def _kernel(place: Place, make: Callable[[Bench], Case], bench: Callable[[], Bench]) -> dict[str, Any]:
    def timed(case: Case) -> dict[str, Any]:
        return {"seconds": place.seconds(case.work or case.run), "bytes": case.least_bytes, "flops": case.flops}

    figures: dict[str, Any] = _made(make, bench, timed)
    return figures


def _small(place: Place, label: str) -> dict[str, Any]:
    """Two layers of the model, and little KV: they need the kernels of all."""
    from engine.ondevice.whole import Whole

    whole = Whole(place, *FORMATS[label], num_layers=2, num_blocks=16_384)
    for load in (*LOADS, FEW):
        whole.warm(load)
    return {}


def _engines(place: Place, label: str) -> list[Step]:
    """All loads in one format, in one process."""

    @functools.cache
    def whole() -> Whole:
        from engine.ondevice.whole import Whole

        return Whole(place, *FORMATS[label])

    def run(load: Any, *, plans: bool = True) -> dict[str, Any]:
        seconds = whole().run(load, plans=plans)
        return {"seconds": seconds, "tokens": load.tokens}

    loads, few, shared = (TOY_LOADS, TOY_FEW, TOY_SHARED) if place.is_toy else (LOADS, FEW, SHARED)
    asked: list[tuple[Any, bool]] = [(load, True) for load in loads]
    if label == "bf16":
        asked = [*reversed(asked), (shared, False), (few, True)]  # those with an aim first
    found: list[Step] = []
    for load, plans in asked:
        expected_s = _expected(place, load.expected_s(plans=plans) + (_LOAD_S if not found else 0.0))
        name = load.name if plans else f"{load.name}, unplanned"
        limit_s = 600.0 if place.is_toy else 60.0 + 2 * expected_s
        found.append(Step(name, partial(run, load, plans=plans), label, expected_s, limit_s))
    return found


def _expected(place: Place, seconds: float) -> float:
    return 0.0 if place.is_toy else seconds


def _peer(place: Place) -> dict[str, Any]:
    from engine.ondevice.peer import run_transformers

    load = TOY_FEW if place.is_toy else FEW
    return {"seconds": run_transformers(place, load), "tokens": load.tokens}


if __name__ == "__main__":
    sys.exit(main())
