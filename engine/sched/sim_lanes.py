"""Simulates interactive requests that arrive over an endless batch: what targets hold, and what they cost the batch.

    python -m engine.sched.sim_lanes --requests 400

prints one JSON line. Scheduler and dial are the real ones; steps take what `StepTimes` says, with noise, on a clock of
the simulation. Arrivals are Poisson, as many as keep the machine busy for `load` of the time if they come one by one;
targets are `slack` times the medians of requests that have the machine to themselves.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.cache.prefix import PrefixIndex
from engine.request import Lane, Request, SamplingParams
from engine.sched.costs import Costs, Work, work_of
from engine.sched.dial import Dial
from engine.sched.plan import StepResult
from engine.sched.scheduler import Scheduler

_TOKEN = 7  # every answer's every token
_COSTS = Costs(step_s=0.011, token_s=0.0005, pair_s=1.5e-7, row_s=0.0012, context_token_s=1.2e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What steps really take. The defaults are near SmolLM2-135M in int8 on 2 cores; the noise is log-normal, and now
    and then something else runs."""

    costs: Costs = _COSTS
    noise: float = 0.05
    hiccup_share: float = 0.002
    hiccup_factor: float = 1.5

    def seconds(self, work: Work, rng: random.Random) -> float:
        factor = math.exp(rng.gauss(0.0, self.noise))
        if rng.random() < self.hiccup_share:
            factor *= self.hiccup_factor
        return (self.costs.step_s + self.costs.of(work)) * factor


class Shape(NamedTuple):
    """Least and most prompt and output tokens of a kind of request."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def request(self, name: str, lane: Lane, rng: random.Random) -> Request:
        prompt_ids = [rng.randrange(1_000_000) for _ in range(rng.randint(*self.prompt))]
        params = SamplingParams(max_tokens=rng.randint(*self.output), temperature=0.0, ignore_eos=True)
        return Request(id=name, prompt_ids=prompt_ids, params=params, lane=lane)


_QUESTIONS = Shape(prompt=(100, 200), output=(16, 48))
_LINES = Shape(prompt=(100, 300), output=(50, 150))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A machine and what comes to it."""

    times: StepTimes = field(default_factory=StepTimes)
    interactive: Shape = _QUESTIONS
    batch: Shape = _LINES
    num_blocks: int = 4_000
    block_tokens: int = 16
    step_tokens: int = 512
    max_running: int = 64
    waiting: int = 16
    load: float = 0.3
    slack: float = 4.0
    seed: int = 0


@dataclass(slots=True)
class Seen:
    """What a run showed: seconds to first tokens and between tokens of interactive requests, and batch tokens."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0

    @property
    def batch_tps(self) -> float:
        return self.batch_tokens / self.seconds

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.seconds


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that `share` of the values don't exceed."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


class Run:
    """One scheduler on a clock of its own."""

    def __init__(self, scene: Scene, *, dial: Dial | None = None, has_batch: bool = True) -> None:
        self._scene = scene
        self._dial = dial
        self._has_batch = has_batch
        self._rng = random.Random(scene.seed)  # noqa: S311  no secret
        self._scheduler = Scheduler(
            num_blocks=scene.num_blocks,
            block_tokens=scene.block_tokens,
            step_tokens=scene.step_tokens,
            max_running=scene.max_running,
            index=PrefixIndex(block_tokens=scene.block_tokens),
            dial=dial,
        )
        self._now_s = 0.0
        self._told_s: dict[str, float] = {}  # when an interactive request came, then when its last token did
        self._answering: set[str] = set()
        self._batch_added = 0

    def play(self, arrivals: Iterator[float], num_requests: int, *, warm_s: float = 0.0) -> Seen:
        """Runs until so many interactive requests ended. What is before `warm_s` isn't counted."""
        rng = random.Random(self._scene.seed + 1)  # noqa: S311
        due_s, added, seen, warm, began_s = next(arrivals), 0, Seen(), 0, 0.0
        while added < num_requests or self._told_s:
            while added < num_requests and due_s <= self._now_s:
                name = f"i{added}"
                self._told_s[name] = due_s
                self._scheduler.add(self._scene.interactive.request(name, Lane.INTERACTIVE, rng))
                added, due_s = added + 1, next(arrivals)
            if self._has_batch:
                self._fill()
            if not self._scheduler.has_work():
                self._now_s = due_s
                continue
            busy_s = self._step(seen)
            if self._now_s < warm_s:
                seen.ttft_s, seen.itl_s, warm, began_s = [], [], self._batch_tokens(), self._now_s
                continue
            seen.busy_s += busy_s
        seen.seconds = self._now_s - began_s
        seen.batch_tokens = self._batch_tokens() - warm
        return seen

    def play_batch(self, seconds: float, *, warm_s: float) -> Seen:
        """The batch alone, for a while."""
        seen, warm, began_s = Seen(), 0, 0.0
        while self._now_s < warm_s + seconds:
            self._fill()
            seen.busy_s += self._step(seen)
            if self._now_s < warm_s:
                seen.busy_s, warm, began_s = 0.0, self._batch_tokens(), self._now_s
        seen.seconds, seen.batch_tokens = self._now_s - began_s, self._batch_tokens() - warm
        return seen

    def _batch_tokens(self) -> int:
        return self._scheduler.counters.lanes[Lane.BATCH].output_tokens

    def _fill(self) -> None:
        """The batch never ends."""
        while self._scheduler.counters.lanes[Lane.BATCH].waiting < self._scene.waiting:
            self._batch_added += 1
            self._scheduler.add(self._scene.batch.request(f"b{self._batch_added}", Lane.BATCH, self._rng))

    def _step(self, seen: Seen) -> float:
        plan = self._scheduler.schedule()
        assert plan is not None, "there is work, but nothing is computed"
        work = work_of(plan)
        took_s = self._scene.times.seconds(work, self._rng)
        self._now_s += took_s
        if self._dial is not None:
            self._dial.observe(work, took_s)
        sampled: dict[str, tuple[int, ...]] = {chunk.seq_id: (_TOKEN,) for chunk in plan.chunks if chunk.logit_rows}
        for name in sampled.keys() & self._told_s.keys():
            (seen.itl_s if name in self._answering else seen.ttft_s).append(self._now_s - self._told_s[name])
            self._answering.add(name)
            self._told_s[name] = self._now_s
        for seq in self._scheduler.commit(plan, StepResult(sampled, {})):
            self._told_s.pop(seq.id, None)
            self._answering.discard(seq.id)
        return took_s


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Times of arrivals, `rate` a second in the mean."""
    rng, now_s = random.Random(seed), 0.0  # noqa: S311
    while True:
        now_s += rng.expovariate(rate)
        yield now_s


def simulate(scene: Scene, *, num_requests: int) -> dict[str, Any]:
    """Unloaded, the batch alone, and both with and without the dial. `batch_ratio` is the batch's tokens over what it
    would have in the time that the interactive requests leave when they run without it."""
    alone = Run(scene, has_batch=False).play(poisson(0.02, scene.seed), 40)
    rate = scene.load / (alone.busy_s / 40)
    ttft_s, itl_s = (scene.slack * quantile(values, 0.5) for values in (alone.ttft_s, alone.itl_s))
    without_batch = Run(scene, has_batch=False).play(poisson(rate, scene.seed), num_requests)
    seconds, warm_s = num_requests / rate, 20.0
    batch_alone = Run(scene).play_batch(seconds, warm_s=warm_s)
    left = batch_alone.batch_tps * (1 - without_batch.busy_share)
    found: dict[str, Any] = {
        "ttft_target_s": ttft_s,
        "itl_target_s": itl_s,
        "arrivals_per_s": rate,
        "interactive_busy_share": without_batch.busy_share,
        "batch_alone_tps": batch_alone.batch_tps,
    }
    for name, dial in (("dial", Dial(ttft_s=ttft_s, itl_s=itl_s)), ("no_dial", None)):
        late = (warm_s + due_s for due_s in poisson(rate, scene.seed))
        seen = Run(scene, dial=dial).play(late, num_requests, warm_s=warm_s)
        found[name] = {
            "ttft_p50_s": quantile(seen.ttft_s, 0.5),
            "ttft_p99_s": quantile(seen.ttft_s, 0.99),
            "itl_p50_s": quantile(seen.itl_s, 0.5),
            "itl_p99_s": quantile(seen.itl_s, 0.99),
            "batch_tps": seen.batch_tps,
            "batch_ratio": seen.batch_tps / left,
            "busy_share": seen.busy_share,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.sched.sim_lanes", description="Simulate interactive requests over an endless batch."
    )
    parser.add_argument("--requests", type=int, default=400, help="interactive requests")
    parser.add_argument("--load", type=float, default=0.3, help="share of capacity that they take")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    found = simulate(Scene(load=options.load, seed=options.seed), num_requests=options.requests)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
