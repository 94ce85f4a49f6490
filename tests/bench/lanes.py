"""Interactive requests over an endless batch, on one engine: do the targets hold, and what is left for the batch?

    python -m tests.bench.lanes --seconds 120

measures requests that have the engine to themselves, sets the targets to 4 times their medians, and then runs Poisson
arrivals at 30 % of capacity (as many as keep the engine busy for 30 % of the time if they come one by one): alone, over
a batch that never ends without targets, and with them. Prints one JSON line. `batch_ratio` is the batch's tokens a
second over what it has alone in the time that the interactive requests leave, which is what they take without a batch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.load.fetch import locate
from engine.quality.serving import resolve_formats
from engine.request import Lane, Request, SamplingParams
from engine.sched.sim_lanes import Seen, poisson, quantile

QUESTION = ((64, 192), (16, 48))  # least and most tokens of prompts and answers
LINE = ((64, 256), (32, 128))
LOAD = 0.3
SLACK = 4.0
WARM_S = 10.0
WAITING = 16
ALONE_S = 1.5  # between two requests that have the engine to themselves


def make(name: str, lane: Lane, shape: tuple[tuple[int, int], tuple[int, int]], rng: random.Random) -> Request:
    prompt, output = shape
    prompt_ids = [rng.randrange(1_000, 40_000) for _ in range(rng.randint(*prompt))]
    params = SamplingParams(max_tokens=rng.randint(*output), temperature=0.0, ignore_eos=True)
    return Request(id=name, prompt_ids=prompt_ids, params=params, lane=lane)


class Player:
    """Feeds one engine on the thread that steps it."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._added = 0

    def play(self, arrivals: Iterator[float], *, seconds: float, has_batch: bool, most: int | None = None) -> Seen:
        """Arrivals for so long, or so many, behind a while to warm up; then waits for the last answer."""
        engine, seen = self._engine, Seen()
        told_s: dict[str, float] = {}
        answering: set[str] = set()
        began_s, warm_s, batch_tokens, num_asked = time.perf_counter(), WARM_S if has_batch else 0.0, 0, 0
        counted_s = began_s + warm_s
        due_s, is_warm = counted_s + next(arrivals), False
        while True:
            now_s = time.perf_counter()
            if not is_warm and now_s >= counted_s:
                is_warm, counted_s, batch_tokens, seen.busy_s = True, now_s, self._batch_tokens(), 0.0
            is_over = num_asked == most or now_s > counted_s + seconds
            if is_over and not told_s:
                break
            while not is_over and due_s <= now_s:
                request = make(f"i{self._next()}", Lane.INTERACTIVE, QUESTION, self._rng)
                told_s[request.id] = due_s
                engine.add(request)
                due_s, num_asked = counted_s + next(arrivals), num_asked + 1
                is_over = num_asked == most
            if has_batch:
                while engine.scheduler.counters.lanes[Lane.BATCH].waiting + self._unseen(engine) < WAITING:
                    engine.add(make(f"b{self._next()}", Lane.BATCH, LINE, self._rng))
            if not engine.has_work():
                time.sleep(max(min(due_s - time.perf_counter(), 0.05), 0.0))
                continue
            step_s = time.perf_counter()
            output = engine.step()
            now_s = time.perf_counter()
            seen.busy_s += now_s - step_s
            for name in output.new_tokens.keys() & told_s.keys():
                (seen.itl_s if name in answering else seen.ttft_s).append(now_s - told_s[name])
                answering.add(name)
                told_s[name] = now_s
            for completion in output.completions:
                told_s.pop(completion.request_id, None)
        seen.seconds, seen.batch_tokens = time.perf_counter() - counted_s, self._batch_tokens() - batch_tokens
        return seen

    def stop(self) -> None:
        """Ends what is under way."""
        for seq in [*self._engine.scheduler._sequences]:
            self._engine.abort(seq)
        while self._engine.has_work():
            self._engine.step()

    def _unseen(self, engine: Engine) -> int:
        """Requests that the next step takes in."""
        return engine.num_unfinished() - sum(lane.open for lane in engine.scheduler.counters.lanes.values())

    def _batch_tokens(self) -> int:
        return self._engine.scheduler.counters.lanes[Lane.BATCH].output_tokens

    def _next(self) -> int:
        self._added += 1
        return self._added


def shown(seen: Seen) -> dict[str, Any]:
    """Quantiles in milliseconds, and rates."""
    found = {"requests": len(seen.ttft_s), "busy_share": round(seen.busy_s / seen.seconds, 4)}
    for name, values in (("ttft", seen.ttft_s), ("itl", seen.itl_s)):
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = round(1000 * quantile(values, share / 100), 2)
    return found | {"batch_tps": round(seen.batch_tps, 2)}


def config_of(options: argparse.Namespace, **targets: float) -> EngineConfig:
    path = str(locate(options.model))
    formats, _ = resolve_formats(path, options.weights, options.kv, lambda _sentence: None, force=True)
    return EngineConfig(
        model=path,
        weight_format=formats.weights,
        kv_format=formats.kv,
        threads=options.threads,
        max_running=options.max_running,
        step_tokens=options.step_tokens,
        **targets,
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = config_of(options)
    player = Player(Engine(config), options.seed)
    player.play(poisson(50.0, options.seed), seconds=5, has_batch=False, most=3)  # caches of the processor, compiling
    alone = player.play(itertools.count(0.0, ALONE_S), seconds=600, has_batch=False, most=options.alone)
    rate = LOAD / (alone.busy_s / options.alone)
    ttft_ms, itl_ms = (1000 * SLACK * quantile(values, 0.5) for values in (alone.ttft_s, alone.itl_s))
    without_batch = player.play(poisson(rate, options.seed), seconds=options.seconds, has_batch=False)
    batch_alone = player.play(poisson(1e-9, options.seed), seconds=options.seconds, has_batch=True)
    no_dial = player.play(poisson(rate, options.seed), seconds=options.seconds, has_batch=True)
    player.stop()
    del player
    gc.collect()
    player = Player(Engine(config_of(options, ttft_target_ms=ttft_ms, itl_target_ms=itl_ms)), options.seed)
    dial = player.play(poisson(rate, options.seed), seconds=options.seconds, has_batch=True)
    player.stop()
    return {
        "model": options.model,
        "formats": [config.weight_format, config.kv_format],
        **table(rate, ttft_ms, itl_ms, alone, without_batch, batch_alone, no_dial, dial),
    }


def table(
    rate: float,
    ttft_ms: float,
    itl_ms: float,
    alone: Seen,
    without_batch: Seen,
    batch_alone: Seen,
    no_dial: Seen,
    dial: Seen,
) -> dict[str, Any]:
    """What was seen, and whether the targets held."""
    left = batch_alone.batch_tps * (1 - without_batch.busy_s / without_batch.seconds)
    return {
        "arrivals_per_s": round(rate, 4),
        "ttft_target_ms": round(ttft_ms, 2),
        "itl_target_ms": round(itl_ms, 2),
        "unloaded": shown(alone),
        "interactive_alone": shown(without_batch),
        "batch_alone_tps": round(batch_alone.batch_tps, 2),
        "no_dial": shown(no_dial) | {"batch_ratio": round(no_dial.batch_tps / left, 4)},
        "dial": shown(dial) | {"batch_ratio": round(dial.batch_tps / left, 4)},
        "holds": quantile(dial.ttft_s, 0.99) * 1000 <= ttft_ms and quantile(dial.itl_s, 0.99) * 1000 <= itl_ms,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lanes", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each of the four measured runs")
    parser.add_argument("--alone", type=int, default=20, help="requests that have the engine to themselves")
    parser.add_argument("--seed", type=int, default=0)
    sys.stdout.write(json.dumps(measure(parser.parse_args(arguments))) + "\n")


if __name__ == "__main__":
    main()
