"""`.ci/gpu correct`: that the driver takes our kernels, then each kernel against float64, then a whole engine.

The exit code is 0 if all is right. On a GPU the engine runs with and without recorded steps, and with steps launched
one ahead, and has to give what plain torch gives on the CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch

from engine.config import EngineConfig
from engine.device import look_at_gpu
from engine.errors import EngineError
from engine.ondevice.place import Place, arguments, place_of, say


def main() -> int:
    began_s = time.monotonic()
    found = arguments("Check every kernel, and a whole engine, against plain torch.")
    place = place_of(found.toy)
    if not place.is_toy:
        try:
            gpu = look_at_gpu()
        except EngineError as error:
            say(str(error))
            return 1
        say(f"{gpu.name} ({gpu.arch}), {gpu.free_bytes / 2**30:.0f} GiB free; one kernel was loaded and ran.")
    failed = checked = 0
    for name, differs, tolerance in _results(place):
        if found.limit_s is not None and time.monotonic() - began_s > found.limit_s:
            say("Not checked any more: the time is up.")
            return 1
        is_right = differs <= tolerance
        failed, checked = failed + (not is_right), checked + 1
        say(f"{'right' if is_right else 'WRONG'}  {name:44} {differs:.1e} of {tolerance:.0e}")
    say(f"{checked} checks on {place.name}, {failed} failed, {time.monotonic() - began_s:.0f} s.")
    return int(failed > 0)


def _results(place: Place) -> Iterator[tuple[str, float, float]]:
    from engine.ondevice.cases import Bench
    from engine.ondevice.llama import LLAMA_8B, TOY

    for case in Bench(place, TOY if place.is_toy else LLAMA_8B).all():
        yield case.name, case.error(), case.tolerance
    yield from _engines(place)


def _engines(place: Place) -> Iterator[tuple[str, float, float]]:
    """A share of tokens that differ, of which there should be none."""
    wanted = _tokens("cpu", overlap=False, records=False)
    if place.is_toy:
        yield "engine, steps one ahead", _differing(_tokens("toy", overlap=True, records=False), wanted), 0.0
        return
    for overlap in (False, True):
        for records in (False, True):
            name = f"engine{', steps one ahead' if overlap else ''}{', recorded' if records else ''}"
            yield name, _differing(_tokens("cuda", overlap=overlap, records=records), wanted), 0.0


def _differing(found: list[int], wanted: list[int]) -> float:
    return sum(a != b for a, b in zip(found, wanted, strict=True)) / len(wanted)


def _tokens(device: str, *, overlap: bool, records: bool) -> list[int]:
    """What a random tiny model answers in float32, greedily: to prompts that share a beginning, and to others."""
    from contextlib import nullcontext

    from engine.engine import Engine
    from engine.kernels import override
    from engine.kernels.gpu.tier import GpuKernels
    from engine.ondevice.llama import TOY, random_model
    from engine.request import Request, SamplingParams
    from engine.runner import ModelRunner

    toy = None
    if device == "toy":
        cpu = torch.device("cpu")
        toy = GpuKernels(TOY, weight_format="float32", kv_format="float32", block_tokens=16, device=cpu)
    config = EngineConfig(
        model="",
        weight_format="float32",
        kv_format="float32",
        num_blocks=64,
        step_tokens=64,
        device="cpu" if toy else device,
        overlap=overlap,
        graphs=records,
    )
    with override(toy) if toy is not None else nullcontext():
        runner = ModelRunner(config, loaded=random_model(TOY, on_host=True))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    shared = [(7 * i) % 300 + 3 for i in range(66)]
    prompts = [[*shared, 4 + i] for i in range(3)] + [[9, 8, 7], list(range(20, 50))]
    requests = [Request(id=str(i), prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]
    return [token for done in Engine(config, runner=runner).run(requests) for token in done.token_ids]


if __name__ == "__main__":
    sys.exit(main())
