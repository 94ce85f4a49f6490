"""`.ci/gpu correct`: that the driver takes our kernels, then each kernel against float64, then whole engines.

The exit code is 0 if all is right. On a GPU engines run with and without recorded steps, and with steps launched one
ahead, and have to give what plain torch gives on the CPU; in bf16 and with KV of eight bits, what they give kernel by
kernel. What is wrong, or fails, is told, and the rest is checked all the same (crew.py).
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from engine.ondevice.child import Step
from engine.ondevice.crew import Clock, Crew, Outcome
from engine.ondevice.place import Place, arguments, keep, place_of, say

if TYPE_CHECKING:
    from engine.ondevice.cases import Bench, Case

MAKER = "engine.ondevice.correct:steps"
LANE_BYTES = 14 << 30
"""Memory that one of several processes may take, with what float64 needs."""
_MOST_LANES = 8
_START_S = 15.0


def main() -> int:
    found = arguments("Check every kernel, and whole engines, against plain torch.")
    place, clock = place_of(found.toy), Clock(found.limit_s)
    crew = Crew(MAKER, steps(place), found.toy, clock)
    first, told = next(iter(crew.run([0]))), []
    if first.figures is None:
        say(f"{first.step.name}: {first.error}.")
        keep(found.json, {"is_right": False, "device": None, "error": first.error, "checks": []})
        return 1
    device = first.figures
    say(f"{device['name']} ({device['arch']}), {device['free_bytes'] / 2**30:.0f} GiB free; {first.step.name}.")
    for outcome in crew.run(range(1, len(crew.steps)), lanes_of(device)):
        told.append(_row(outcome))
        say(_line(told[-1]))
        keep(found.json, {"is_right": False, "device": device, "error": "not all was checked", "checks": told})
    failed = sum(not row["is_right"] for row in told)
    keep(found.json, {"is_right": not failed, "device": device, "error": None, "checks": told})
    say(f"{len(told)} checks on {device['name']}, {failed} failed, {clock.spent_s:.0f} s.")
    return int(failed > 0)


def steps(place: Place) -> list[Step]:
    """The first says what device this is."""

    @functools.cache
    def bench() -> Bench:
        from engine.ondevice.cases import Bench
        from engine.ondevice.llama import LLAMA_8B, TOY

        return Bench(place, TOY if place.is_toy else LLAMA_8B)

    def check(make: Callable[[Bench], Case]) -> dict[str, Any]:
        case = make(bench())
        return {"differs": case.error(), "tolerance": case.tolerance}

    if place.is_toy:
        os.environ["TRITON_INTERPRET"] = "1"  # here too, where only names are wanted of what imports kernels
    from engine.ondevice.cases import cases

    found = [Step("one kernel was loaded and ran", lambda: look(place), limit_s=90)]
    found += [
        Step(name, functools.partial(check, make), expected_s=_START_S * (not place.is_toy), limit_s=90)
        for name, make in cases(place.is_toy)
    ]
    return found + _engines(place)


def look(place: Place) -> dict[str, Any]:
    """The device, on which a kernel ran."""
    from engine.device import FIRST, look_at_gpu
    from engine.errors import DeviceError
    from engine.kernels.gpu.common import prove

    common = {"cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__, "cuda": torch.version.cuda}
    if place.is_toy:
        prove(place.device)
        return {"name": place.name, "arch": "toy", "free_bytes": 0, "is_shared": False, **common}
    gpu = look_at_gpu()
    if gpu.capability < FIRST:
        raise DeviceError(f"{gpu.name} ({gpu.arch}) is too old")
    return {"name": gpu.name, "arch": gpu.arch, "free_bytes": gpu.free_bytes, "is_shared": _is_shared(), **common}


def lanes_of(device: dict[str, Any]) -> int:
    """Processes that may use the device at the same time."""
    most: int = min(_MOST_LANES, device["cpus"] // 2, device["free_bytes"] // LANE_BYTES)
    return max(1, most) if device["is_shared"] else 1


def _is_shared() -> bool:
    """Whether the device takes several processes; one whose mode nobody knows is taken not to."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    command = [program, "--query-gpu=compute_mode", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "Default" in done.stdout and "Exclusive" not in done.stdout


def _row(outcome: Outcome) -> dict[str, Any]:
    figures = outcome.figures or {}
    is_right = bool(figures) and figures["differs"] <= figures["tolerance"]
    seconds = round(outcome.seconds, 2)
    return {"check": outcome.step.name, "is_right": is_right, **figures, "error": outcome.error, "seconds": seconds}


def _line(row: dict[str, Any]) -> str:
    verdict = "right" if row["is_right"] else "WRONG"
    told = row["error"] or f"{row['differs']:.1e} of {row['tolerance']:.0e}"
    return f"{verdict}  {row['check']:48} {told}"


def _engines(place: Place) -> list[Step]:
    """Shares of tokens that differ, of which there should be none."""

    @functools.cache
    def tokens(device: str, weights: str, kv: str, *, overlap: bool, records: bool) -> list[int]:
        return _tokens(device, weights, kv, overlap=overlap, records=records)

    def differs(wanted: Sequence[int], found: Sequence[int]) -> dict[str, Any]:
        return {"differs": sum(a != b for a, b in zip(found, wanted, strict=True)) / len(wanted), "tolerance": 0.0}

    def against_cpu(*, overlap: bool, records: bool) -> dict[str, Any]:
        formats = ("float32", "float32")
        wanted = tokens("cpu", *formats, overlap=False, records=False)
        return differs(wanted, tokens("toy" if place.is_toy else "cuda", *formats, overlap=overlap, records=records))

    def against_kernels(weights: str, kv: str) -> dict[str, Any]:
        wanted = tokens("cuda", weights, kv, overlap=False, records=False)
        return differs(wanted, tokens("cuda", weights, kv, overlap=True, records=True))

    if place.is_toy:
        return [Step("engine, steps one ahead", lambda: against_cpu(overlap=True, records=False))]
    found = []
    for overlap in (False, True):
        for records in (False, True):
            name = f"engine{', steps one ahead' if overlap else ''}{', recorded' if records else ''}"
            run = functools.partial(against_cpu, overlap=overlap, records=records)
            found.append(Step(name, run, expected_s=_START_S, limit_s=120))
    for weights, kv in (("bf16", "bf16"), ("bf16", "int8"), ("bf16", "fp8"), ("fp8", "bf16"), ("int8", "int8")):
        name = f"engine, {weights} with KV {kv}, recorded and ahead"
        found.append(Step(name, functools.partial(against_kernels, weights, kv), expected_s=_START_S, limit_s=120))
    return found


def _tokens(device: str, weights: str, kv: str, *, overlap: bool, records: bool) -> list[int]:
    """What a random tiny model answers greedily: to prompts that share a beginning, and to others."""
    from contextlib import nullcontext

    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.kernels import override
    from engine.kernels.gpu.tier import GpuKernels
    from engine.ondevice.llama import TOY, random_model
    from engine.request import Request, SamplingParams
    from engine.runner import ModelRunner

    toy = None
    if device == "toy":
        cpu = torch.device("cpu")
        toy = GpuKernels(TOY, weight_format=weights, kv_format=kv, block_tokens=16, device=cpu)
    config = EngineConfig(
        model="",
        weight_format=weights,
        kv_format=kv,
        num_blocks=64,
        step_tokens=64,
        device="cpu" if toy else device,
        overlap=overlap,
        graphs=records,
        spec="off",
    )
    with override(toy) if toy is not None else nullcontext():
        runner = ModelRunner(config, loaded=random_model(TOY, on_host=True))
    params = SamplingParams(max_tokens=12 if device == "cuda" else 6, temperature=0.0, ignore_eos=True)
    shared = [(7 * i) % 300 + 3 for i in range(66)]
    prompts = [[*shared, 4 + i] for i in range(3)] + [[9, 8, 7], list(range(20, 50))]
    requests = [Request(id=str(i), prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]
    return [token for done in Engine(config, runner=runner).run(requests) for token in done.token_ids[:6]]


if __name__ == "__main__":
    sys.exit(main())
