"""Runs plan and scheduler against a cost model, with no weights: what a pool costs a job, before any model runs it.

    python -m engine.sched.sim --lines 2000 --pool-share 0.4

prints one JSON line: the planned order beside plain LRU with arrival order, both on a pool of `--pool-share` times what
the job holds at once when memory is no limit. A step costs seconds in proportion to its tokens, to the KV it reads (a
shared block once) and a constant. The windows and units are real, the feeding is the pump's: units are taken when
fewer than `waiting` requests wait, and each announces what later units need.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.cache.prefix import PrefixIndex
from engine.cache.sequence import Sequence as Running
from engine.request import Expectation, FinishReason, Request, SamplingParams
from engine.sched.budget import Load, predicted_peak_blocks
from engine.sched.counters import Counters as Totals
from engine.sched.order import TOKEN_BYTES, plan_window
from engine.sched.plan import StepPlan, StepResult
from engine.sched.scheduler import Scheduler

_LOOK_EVERY = 16  # steps between two looks at what the pool would allow
_TOKEN = 7  # every answer's every token


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step. The defaults are near SmolLM2-135M in int8 on 2 cores (30 layers of 3 KV heads in bf16)."""

    step_s: float = 0.004
    token_s: float = 0.0003
    kv_token_s: float = 0.0000012

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        return self.step_s + self.token_s * tokens + self.kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a job. `prompt` is big-endian uint32 token bytes; `output_tokens` is what it will answer, of
    which the scheduler is told `max_tokens` alone, unless the answer `is_exact`ly as long."""

    prompt: bytes
    max_tokens: int
    output_tokens: int
    is_exact: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    def request(self, name: str) -> Request:
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=self.is_exact)
        return Request(id=name, prompt_ids=_ids(self.prompt), params=params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the scheduler is given. `num_blocks` None: more than the job can use."""

    num_blocks: int | None = None
    block_tokens: int = 16
    step_tokens: int = 2048
    max_running: int = 256
    waiting: int = 512


@dataclass(slots=True)
class Outcome:
    """What a run came to. `peak_blocks` counts blocks that sequences held, `allowed` what the pool would have let run
    at the steps that were looked at, `ran` what ran at them; the tail, where nothing waits, isn't looked at."""

    counters: Totals
    seconds: float = 0.0
    peak_blocks: int = 0
    allowed: int = 0
    ran: int = 0
    finished: dict[str, FinishReason | None] = field(default_factory=dict)

    @property
    def recomputed_share(self) -> float:
        return self.counters.recomputed_tokens / max(self.counters.computed_tokens, 1)

    @property
    def running_share(self) -> float:
        """Mean running sequences over the mean of what the pool allowed."""
        return self.ran / self.allowed if self.allowed else 1.0


@dataclass(frozen=True, slots=True)
class Piece:
    """What the pump takes at once: a unit of a plan, or the next lines of a file in the order of arrival."""

    name: str
    lines: Sequence[int]
    expectation: Expectation | None = None


def planned(
    lines: Sequence[Line], *, window_lines: int = 50_000, unit_lines: int = 512, unit_tokens: int = 2_000_000
) -> list[Piece]:
    """The job as the service cuts it: windows of consecutive lines, each planned, in units."""
    pieces: list[Piece] = []
    for start in range(0, len(lines), window_lines):
        window = lines[start : start + window_lines]
        plan = plan_window(
            [line.prompt for line in window],
            [None] * len(window),
            [line.max_tokens for line in window],
            unit_lines=unit_lines,
            unit_tokens=unit_tokens,
        )
        for unit, uses in zip(plan.units, plan.prefix_uses, strict=True):
            members = [start + member for row in plan.rows[unit] for member in row.members]
            pairs = tuple((use.depth_tokens, use.later_units) for use in uses)
            expectation = Expectation(prompt_ids=_ids(lines[members[-1]].prompt), uses=pairs) if pairs else None
            pieces.append(Piece(f"unit{len(pieces)}", members, expectation))
    return pieces


def as_they_came(lines: Sequence[Line], *, unit_lines: int = 512) -> list[Piece]:
    """The job in the order of its file."""
    starts = range(0, len(lines), unit_lines)
    return [Piece(f"lines{start}", range(start, min(start + unit_lines, len(lines)))) for start in starts]


class Simulation:
    """One scheduler, one job. `on_step` sees the scheduler after each step (tests audit it)."""

    def __init__(
        self,
        lines: Sequence[Line],
        pieces: Iterable[Piece],
        machine: Machine,
        *,
        cost: CostModel | None = None,
        is_lru: bool = False,
        on_step: Callable[[Scheduler, StepPlan], None] | None = None,
    ) -> None:
        self._lines = lines
        self._pieces = deque(pieces)
        self._machine = machine
        self._cost = cost or CostModel()
        self._on_step = on_step
        self._last_use: dict[bytes, int] | None = {} if is_lru else None
        self._backlog: deque[int] = deque()
        self._open: dict[str, int] = {}  # unfinished lines of each piece the engine or the backlog has
        self._piece_of: dict[int, str] = {}
        self._waiting: dict[str, Running] = {}  # in the order they were added
        size = machine.block_tokens
        most = sum(-(-(line.num_prompt_tokens + line.output_tokens) // size) + 1 for line in lines)
        self._num_blocks = most if machine.num_blocks is None else machine.num_blocks
        last_use = self._last_use
        self.scheduler = Scheduler(
            num_blocks=self._num_blocks,
            block_tokens=size,
            step_tokens=machine.step_tokens,
            max_running=machine.max_running,
            index=PrefixIndex(block_tokens=size),
            judge=self._judge,
            next_use=None if last_use is None else lambda key: -last_use.get(key, 0),
        )
        self._outcome = Outcome(self.scheduler.counters)

    def run(self) -> Outcome:
        """Runs the job to its end."""
        outcome, scheduler = self._outcome, self.scheduler
        self._feed()
        while scheduler.has_work():
            plan = scheduler.schedule()
            if plan is None:
                ended = scheduler.take_finished()
                assert ended, "there is work, but nothing is computed and nothing ended"
            else:
                self._count(plan)
                sampled: dict[str, tuple[int, ...]] = {c.seq_id: (_TOKEN,) for c in plan.chunks if c.logit_rows}
                ended = scheduler.commit(plan, StepResult(sampled, {}))
                if self._on_step is not None:
                    self._on_step(scheduler, plan)
            for seq in ended:
                self._end(seq)
            self._feed()
        return outcome

    def _judge(self, seq: Running, _token_id: int) -> FinishReason | None:
        enough = seq.num_known - seq.num_prompt_tokens >= self._lines[int(seq.id)].output_tokens
        return FinishReason.STOP if enough else None

    def _feed(self) -> None:
        """As the pump does: the waiting set is kept full, and another unit is claimed as soon as there is room."""
        while True:
            room = self._machine.waiting - self.scheduler.num_waiting
            if room > len(self._backlog) and self._pieces:
                piece = self._pieces.popleft()
                self._backlog.extend(piece.lines)
                self._open[piece.name] = len(piece.lines)
                self._piece_of.update(dict.fromkeys(piece.lines, piece.name))
                if self._last_use is None and piece.expectation is not None:
                    self.scheduler.expect(piece.name, piece.expectation)
                continue
            if room <= 0 or not self._backlog:
                return
            number = self._backlog.popleft()
            name = str(number)
            self._waiting[name] = self.scheduler.add(self._lines[number].request(name))

    def _end(self, seq: Running) -> None:
        assert seq.id not in self._outcome.finished, f"{seq.id} ended twice"
        self._outcome.finished[seq.id] = seq.finish_reason
        self._waiting.pop(seq.id, None)
        piece = self._piece_of[int(seq.id)]
        self._open[piece] -= 1
        if not self._open[piece]:
            self.scheduler.expect(piece, None)
        if self._last_use is not None:
            self._last_use.update(dict.fromkeys(seq.block_keys, self.scheduler.counters.steps))

    def _count(self, plan: StepPlan) -> None:
        scheduler, outcome = self.scheduler, self._outcome
        outcome.seconds += self._cost.seconds(plan.num_tokens, scheduler.num_used_blocks * self._machine.block_tokens)
        outcome.peak_blocks = max(outcome.peak_blocks, scheduler.num_used_blocks)
        for chunk in plan.chunks:
            if chunk.seq_id in self._waiting and self._last_use is not None:
                keys = self._waiting[chunk.seq_id].block_keys
                self._last_use.update(dict.fromkeys(keys, scheduler.counters.steps))
            self._waiting.pop(chunk.seq_id, None)
        if plan.step % _LOOK_EVERY == 0 and self._waiting:
            outcome.ran += scheduler.num_running
            outcome.allowed += self._allowed()

    def _allowed(self) -> int:
        """Sequences that a scheduler which knows all answers would have run now: those that run, and the next ones
        in line while the peak that is really to come fits the pool."""
        size, running = self._machine.block_tokens, self.scheduler.running()
        loads: list[Load] = []
        uses = Counter(block for seq in running for block in seq.block_ids)
        shared = sum(1 for count in uses.values() if count > 1)
        keys = {key for seq in running for key in seq.block_keys}
        for seq in running:
            private = len(seq.tokens) - size * sum(1 for block in seq.block_ids if uses[block] > 1)
            loads.append(Load(max(private, 0), self._growth(seq)))
        allowed = len(loads)
        for seq in self._waiting.values():
            if allowed >= self._machine.max_running:
                break
            private = len(seq.tokens) - size * sum(1 for key in seq.block_keys if key in keys)
            loads.append(Load(max(private, 0), self._growth(seq)))
            if shared + predicted_peak_blocks(loads, size) > self._num_blocks:
                break
            keys.update(seq.block_keys)
            allowed += 1
        return allowed

    def _growth(self, seq: Running) -> int:
        return max(self._lines[int(seq.id)].output_tokens - seq.num_outputs - 1, 0)


def _ids(prompt: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(prompt, ">u4").tolist()
    return ids


def make_job(num_lines: int, *, seed: int = 0, line_tokens: int = 256, is_exact: bool = False) -> list[Line]:
    """A job of templates: groups of very different sizes share a prompt, parts of a group share more, each line ends
    on its own, in prompts of about `line_tokens` tokens. Answers take a third of `max_tokens` on average, or all of it
    and the scheduler knows, where they are exact. Lines come in random order, as from a database."""
    random = np.random.default_rng(seed)
    groups = max(1, round(num_lines**0.5))
    weights = random.pareto(1.5, groups) + 0.2
    group_of = random.choice(groups, num_lines, p=weights / weights.sum())
    stems = [_tokens(random, int(random.integers(line_tokens // 4, line_tokens))) for _ in range(groups)]
    parts = [[_tokens(random, int(random.integers(0, line_tokens // 2))) for _ in range(8)] for _ in range(groups)]
    limits = random.choice([32, 128, 512], groups)
    lines = []
    for group in group_of.tolist():
        tail = _tokens(random, int(random.integers(4, line_tokens // 2)))
        prompt = b"".join((stems[group], parts[group][int(random.integers(8))], tail))
        max_tokens = int(limits[group])
        length = max_tokens if is_exact else min(max_tokens, 1 + int(random.exponential(max_tokens / 3)))
        lines.append(Line(prompt, max_tokens, length, is_exact))
    return lines


def _tokens(random: np.random.Generator, count: int) -> bytes:
    return random.integers(0, 49_152, count).astype(">u4").tobytes()


def compare(lines: Sequence[Line], *, pool_share: float, machine: Machine, cost: CostModel) -> dict[str, Any]:
    """The planned order beside arrival order with LRU, on a pool of `pool_share` of what an unlimited one holds."""
    pieces = planned(lines)
    unlimited = Simulation(lines, pieces, machine, cost=cost).run()
    pool = replace(machine, num_blocks=max(2, round(pool_share * unlimited.peak_blocks)))
    runs = {
        "planned": Simulation(lines, pieces, pool, cost=cost).run(),
        "baseline": Simulation(lines, as_they_came(lines), pool, cost=cost, is_lru=True).run(),
    }
    return {
        "lines": len(lines),
        "prompt_tokens": sum(line.num_prompt_tokens for line in lines),
        "output_tokens": sum(line.output_tokens for line in lines),
        "needed_blocks": unlimited.peak_blocks,
        "num_blocks": pool.num_blocks,
        "unlimited_seconds": round(unlimited.seconds, 2),
        **{name: _figures(outcome, unlimited) for name, outcome in runs.items()},
    }


def _figures(outcome: Outcome, unlimited: Outcome) -> dict[str, Any]:
    counters = outcome.counters
    return {
        "recomputed_share": round(outcome.recomputed_share, 4),
        "hit_share": round(counters.hit_tokens / max(unlimited.counters.hit_tokens, 1), 4),
        "running_share": round(outcome.running_share, 4),
        "mean_running": round(counters.chunks / max(counters.steps, 1), 1),
        "preemptions": counters.preemptions,
        "steps": counters.steps,
        "seconds": round(outcome.seconds, 2),
    }


def plan_windows(num_lines: int, window_lines: int, *, seed: int, line_tokens: int) -> dict[str, Any]:
    """Plans a job of any length, a window in memory at a time, and says what that took."""
    tokens = cached = units = 0
    plan_s = 0.0
    for start in range(0, num_lines, window_lines):
        size = min(window_lines, num_lines - start)
        lines = make_job(size, seed=seed + start, line_tokens=line_tokens)
        began = time.perf_counter()
        plan = plan_window(
            [line.prompt for line in lines],
            [None] * size,
            [line.max_tokens for line in lines],
            unit_lines=512,
            unit_tokens=2_000_000,
        )
        plan_s += time.perf_counter() - began
        tokens += sum(line.num_prompt_tokens for line in lines)
        cached += sum(row.planned_cached_tokens for row in plan.rows)
        units += len(plan.units)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "lines": num_lines,
        "units": units,
        "prompt_tokens": tokens,
        "planned_cached_tokens": cached,
        "plan_s": round(plan_s, 2),
        "peak_rss_mib": round(peak_mib, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m engine.sched.sim", description="Simulate a job without weights.")
    parser.add_argument("--lines", type=int, default=2_000, help="lines of the job")
    parser.add_argument("--line-tokens", type=int, default=256, help="about as many tokens has a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool-share", type=float, default=0.4, help="of the KV that the job holds without a limit")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--step-tokens", type=int, default=2_048)
    parser.add_argument("--exact", action="store_true", help="every answer has max_tokens tokens and is known to")
    parser.add_argument("--plan-only", action="store_true", help="only plan, window by window; shows time and memory")
    parser.add_argument("--window-lines", type=int, default=50_000)
    options = parser.parse_args(arguments)
    if options.plan_only:
        found = plan_windows(options.lines, options.window_lines, seed=options.seed, line_tokens=options.line_tokens)
    else:
        job = make_job(options.lines, seed=options.seed, line_tokens=options.line_tokens, is_exact=options.exact)
        machine = Machine(max_running=options.max_running, step_tokens=options.step_tokens)
        found = compare(job, pool_share=options.pool_share, machine=machine, cost=CostModel())
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
