"""Simulates one pool and two on a job: how a number of hosts is best divided between prefill and decode, if at all.

    python -m engine.split.sweep --hosts 8 --prompt 512 --output 128 --plot ratios.svg

prints one JSON line, with tokens a second and the time between tokens for one pool and for each division of the hosts.
Real schedulers plan each step, and a step costs what engine/sched/sim.py's cost model says. A host of each kind may
have a cost model of its own, so hosts that differ can be tried. Blocks cross at `--link` bytes a second, those of a
shared prefix once for each decode host, and no prompt is begun that the decode side has no room for.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.cache.prefix import PrefixIndex
from engine.cache.sequence import Sequence as Running
from engine.errors import ConfigError
from engine.request import FinishReason, Request, SamplingParams
from engine.sched.plan import StepPlan, StepResult
from engine.sched.scheduler import Scheduler
from engine.sched.sim import CostModel, Line, Machine, Piece, planned
from engine.split.sweep_plot import svg

_TOKEN = 7
_COST = "0.004:0.0003:0.0000012"
_SHARE = 4  # as on a real decode side: one block in so many for what doesn't run yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`prefill` and `decode` are what steps cost on hosts of each kind."""

    machine: Machine
    prefill: CostModel
    decode: CostModel
    link_bytes_per_s: float
    token_bytes: int


@dataclass(slots=True)
class Result:
    """What a run came to. `gaps_s` lie between the tokens of a line; `busy_s` is of all hosts of a kind together."""

    prefill_hosts: int
    decode_hosts: int
    seconds: float = 0.0
    output_tokens: int = 0
    sent_blocks: int = 0
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    finished: dict[int, FinishReason | None] = field(default_factory=dict)

    def figures(self, block_bytes: int) -> dict[str, Any]:
        gaps = np.asarray(self.gaps_s or [0.0])
        return {
            "prefill_hosts": self.prefill_hosts,
            "decode_hosts": self.decode_hosts,
            "seconds": round(self.seconds, 3),
            "output_tps": round(self.output_tokens / self.seconds, 1),
            "gap_p50_ms": round(1000 * float(np.percentile(gaps, 50)), 2),
            "gap_p99_ms": round(1000 * float(np.percentile(gaps, 99)), 2),
            "prefill_busy": round(self.prefill_busy_s / (self.seconds * max(self.prefill_hosts, 1)), 3),
            "decode_busy": round(self.decode_busy_s / (self.seconds * self.decode_hosts), 3),
            "sent_bytes": self.sent_blocks * block_bytes,
        }


class _Host:
    """One scheduler and the time until its step ends."""

    def __init__(self, lines: Sequence[Line], setting: Setting, cost: CostModel, num_blocks: int) -> None:
        machine = setting.machine
        self.backlog: deque[int] = deque()
        self.tokens_at: dict[str, float] = {}
        self.coming: set[bytes] = set()  # blocks under way to it
        self.busy_s = 0.0
        self.num_blocks = num_blocks
        self._lines = lines
        self._cost = cost
        self._block_tokens = machine.block_tokens
        self._plan: StepPlan | None = None
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_tokens=machine.block_tokens,
            step_tokens=machine.step_tokens,
            max_running=machine.max_running,
            index=PrefixIndex(block_tokens=machine.block_tokens),
            judge=self._judge,
        )

    @property
    def is_busy(self) -> bool:
        return self._plan is not None

    def begin(self) -> float | None:
        """Starts a step; how long it takes. None: there is nothing to compute."""
        self._plan = self.scheduler.schedule()
        if self._plan is None:
            return None
        seconds = self._cost.seconds(self._plan.num_tokens, self.scheduler.num_used_blocks * self._block_tokens)
        self.busy_s += seconds
        return seconds

    def end(self) -> tuple[list[str], list[Running]]:
        """The step ends: who got a token, and who ended."""
        plan, self._plan = self._plan, None
        assert plan is not None, "no step is under way"
        sampled: dict[str, tuple[int, ...]] = {chunk.seq_id: (_TOKEN,) for chunk in plan.chunks if chunk.logit_rows}
        return list(sampled), self.scheduler.commit(plan, StepResult(sampled, {}))

    def _judge(self, seq: Running, _token_id: int) -> FinishReason | None:
        is_enough = seq.num_known - seq.num_prompt_tokens >= self._lines[int(seq.id)].output_tokens
        return FinishReason.STOP if is_enough else None


class Pools:
    """A job on hosts of both kinds; without prefill hosts, on one pool."""

    def __init__(
        self, lines: Sequence[Line], pieces: Sequence[Piece], setting: Setting, *, prefill_hosts: int, decode_hosts: int
    ) -> None:
        self._lines = lines
        self._pieces = deque(pieces)
        self._setting = setting
        size = setting.machine.block_tokens
        needed = sum(-(-(line.num_prompt_tokens + line.output_tokens) // size) + 1 for line in lines)
        num_blocks = setting.machine.num_blocks or needed
        self.prefills = [_Host(lines, setting, setting.prefill, num_blocks) for _ in range(prefill_hosts)]
        self.decodes = [_Host(lines, setting, setting.decode, num_blocks) for _ in range(decode_hosts)]
        self._events: list[tuple[float, int, _Host, int | None]] = []  # time, order, host, line that arrives there
        self._order = itertools.count()
        self._coming: dict[int, tuple[_Host, int]] = {}  # lines that don't run yet: where they will, their blocks
        self._open_blocks: dict[int, int] = dict.fromkeys(map(id, self.decodes), 0)
        self._result = Result(prefill_hosts, decode_hosts)

    def run(self) -> Result:
        """Runs the job to its end."""
        result = self._result
        self._start_all(0.0)
        while self._events:
            now, _, host, arrived = heapq.heappop(self._events)
            if arrived is None:
                self._end_step(host, now)
            else:
                self._arrive(host, arrived)
            self._start_all(now)
            result.seconds = now
        assert len(result.finished) == len(self._lines), "a line was never answered"
        result.prefill_busy_s = sum(host.busy_s for host in self.prefills)
        result.decode_busy_s = sum(host.busy_s for host in self.decodes)
        return result

    def _start_all(self, now: float) -> None:
        for host in (*self.prefills, *self.decodes):
            if host.is_busy:
                continue
            if host in self.prefills or not self.prefills:
                self._feed(host)
            seconds = host.begin()
            if seconds is not None:
                self._push(now + seconds, host, None)
            else:
                for seq in host.scheduler.take_finished():  # what can never fit
                    self._result.finished[int(seq.id)] = seq.finish_reason

    def _push(self, time: float, host: _Host, line: int | None) -> None:
        heapq.heappush(self._events, (time, next(self._order), host, line))

    def _feed(self, host: _Host) -> None:
        """A unit is taken when nothing waits; on a prefill host prompts begin where a decode host has room."""
        while True:
            if not host.backlog:
                if host.scheduler.num_waiting or not self._pieces:
                    return
                host.backlog.extend(self._pieces.popleft().lines)
            number = host.backlog[0]
            line = self._lines[number]
            if self.prefills:
                blocks = line.num_prompt_tokens // self._setting.machine.block_tokens
                target = min(self.decodes, key=lambda other: self._open_blocks[id(other)] + other.scheduler.num_running)
                is_open = self._open_blocks[id(target)]
                if is_open and is_open + blocks > target.num_blocks // _SHARE:
                    return
                self._open_blocks[id(target)] += blocks
                self._coming[number] = (target, blocks)
                if not blocks:
                    target.scheduler.add(line.request(str(number)))
                    host.backlog.popleft()
                    continue
            host.backlog.popleft()
            host.scheduler.add(self._prompt_of(number) if self.prefills else line.request(str(number)))

    def _prompt_of(self, number: int) -> Request:
        request = self._lines[number].request(str(number))
        whole = len(request.prompt_ids) // self._setting.machine.block_tokens * self._setting.machine.block_tokens
        return Request(
            id=request.id,
            prompt_ids=request.prompt_ids[:whole],
            params=SamplingParams(max_tokens=1, temperature=0.0),
        )

    def _end_step(self, host: _Host, now: float) -> None:
        sampled, ended = host.end()
        if host in self.prefills:
            for seq in ended:
                self._send(int(seq.id), now)
            return
        for name in sampled:
            last = host.tokens_at.get(name)
            if last is not None:
                self._result.gaps_s.append(now - last)
            else:
                self._runs(int(name))
            host.tokens_at[name] = now
        self._result.output_tokens += len(sampled)
        for seq in ended:
            assert int(seq.id) not in self._result.finished, f"{seq.id} ended twice"
            self._result.finished[int(seq.id)] = seq.finish_reason
            self._runs(int(seq.id))

    def _send(self, number: int, now: float) -> None:
        """A prompt is computed: the blocks that its decode host lacks go there."""
        host, _ = self._coming[number]
        request = self._prompt_of(number)
        tables = host.scheduler.tables
        keys = tables.prefix_keys(request.prompt_ids, salt="", adapter="")
        cached = len(tables.cached(request.prompt_ids, salt="", adapter=""))
        missing = [key for key in keys[cached:] if key not in host.coming]
        host.coming.update(missing)
        self._result.sent_blocks += len(missing)
        sent_bytes = len(missing) * self._setting.machine.block_tokens * self._setting.token_bytes
        self._push(now + sent_bytes / self._setting.link_bytes_per_s, host, number)

    def _arrive(self, host: _Host, number: int) -> None:
        line = self._lines[number]
        request = self._prompt_of(number)
        tables = host.scheduler.tables
        keys = tables.prefix_keys(request.prompt_ids, salt="", adapter="")
        tables.adopt(request.prompt_ids, range(len(keys)), salt="", adapter="", fill=lambda blocks: None)
        host.coming.difference_update(keys)
        host.scheduler.add(line.request(str(number)))

    def _runs(self, number: int) -> None:
        target, blocks = self._coming.pop(number, (None, 0))
        if target is not None:
            self._open_blocks[id(target)] -= blocks


def make_mix(
    num_lines: int, *, prompt_tokens: int, output_tokens: int, shared_tokens: int, seed: int = 0
) -> list[Line]:
    """Lines of about that many tokens, give or take a half; the first `shared_tokens` of each prompt are the same in
    groups of sixteen."""
    random = np.random.default_rng(seed)
    stems: list[bytes] = []
    lines = []
    for number in range(num_lines):
        if number % 16 == 0:
            stems.append(_ids(random, shared_tokens))
        own = max(1, round((prompt_tokens - shared_tokens) * random.uniform(0.5, 1.5)))
        outputs = max(1, round(output_tokens * random.uniform(0.5, 1.5)))
        lines.append(Line(stems[-1] + _ids(random, own), 2 * output_tokens, outputs))
    return lines


def _ids(random: np.random.Generator, count: int) -> bytes:
    return random.integers(0, 49_152, count).astype(">u4").tobytes()


def sweep(lines: Sequence[Line], hosts: int, setting: Setting) -> dict[str, Any]:
    """One pool of all hosts, of the kind that does better alone, and every way to divide them."""
    pieces = planned(lines, unit_lines=max(1, min(512, len(lines) // (4 * hosts))))
    block_bytes = setting.machine.block_tokens * setting.token_bytes

    def figures(prefill_hosts: int, setting: Setting) -> dict[str, Any]:
        pools = Pools(lines, pieces, setting, prefill_hosts=prefill_hosts, decode_hosts=hosts - prefill_hosts)
        return pools.run().figures(block_bytes)

    kinds = {"decode": setting.decode, "prefill": setting.prefill}  # one pool is of either kind of host
    pools = [{"of": kind, **figures(0, replace(setting, decode=cost))} for kind, cost in kinds.items()]
    one, divided = max(pools, key=lambda found: found["output_tps"]), [figures(n, setting) for n in range(1, hosts)]
    best = max(divided, key=lambda found: found["output_tps"])
    return {
        "lines": len(lines),
        "prompt_tokens": sum(line.num_prompt_tokens for line in lines),
        "output_tokens": sum(line.output_tokens for line in lines),
        "hosts": hosts,
        "one_pool": one,
        "two_pools": divided,
        "best_prefill_hosts": best["prefill_hosts"],
        "best_over_one_pool": round(best["output_tps"] / one["output_tps"], 4),
    }


def _cost(text: str) -> CostModel:
    try:
        step_s, token_s, kv_token_s = (float(part) for part in text.split(":"))
    except ValueError:
        step_s = token_s = kv_token_s = -1.0
    if min(step_s, token_s, kv_token_s) < 0 or step_s + token_s <= 0:
        raise ConfigError(f"A cost is seconds of a step, of a token and of a KV token, such as {_COST}, not {text!r}.")
    return CostModel(step_s=step_s, token_s=token_s, kv_token_s=kv_token_s)


def _setting(options: argparse.Namespace) -> Setting:
    if options.hosts < 2 or not 0 <= options.shared < options.prompt or options.lines < 1 or options.output < 1:
        raise ConfigError("A sweep takes 2 hosts or more, a line or more, and prompts longer than what they share.")
    return Setting(
        machine=Machine(
            num_blocks=options.num_blocks, step_tokens=options.step_tokens, max_running=options.max_running
        ),
        prefill=_cost(options.prefill_cost or options.cost),
        decode=_cost(options.cost),
        link_bytes_per_s=options.link,
        token_bytes=options.token_bytes,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m engine.split.sweep", description="Simulate one pool and two.")
    parser.add_argument("--hosts", type=int, default=8, help="hosts in all, at least 2")
    parser.add_argument("--lines", type=int, default=400, help="lines of the job")
    parser.add_argument("--prompt", type=int, default=512, help="about as many tokens has a prompt")
    parser.add_argument("--output", type=int, default=128, help="and an answer")
    parser.add_argument("--shared", type=int, default=0, help="tokens that sixteen prompts in a row begin with")
    parser.add_argument("--num-blocks", type=int, help="KV blocks of each host (default: as many as the job takes)")
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--cost", default=_COST, help="step:token:kv in seconds, of a decode host")
    parser.add_argument("--prefill-cost", help="of a prefill host (default: the same)")
    parser.add_argument("--link", type=float, default=1e9, help="bytes a second from a prefill host to a decode host")
    parser.add_argument("--token-bytes", type=int, default=23_040, help="of the KV of a token (SmolLM2-135M in bf16)")
    parser.add_argument("--plot", type=Path, help="also draw it, as an SVG")
    options = parser.parse_args(arguments)
    try:
        setting = _setting(options)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    lines = make_mix(
        options.lines, prompt_tokens=options.prompt, output_tokens=options.output, shared_tokens=options.shared
    )
    found = sweep(lines, options.hosts, setting)
    if options.plot is not None:
        options.plot.write_text(svg(found), encoding="utf-8")
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
