"""A simulated batch on simulated workers: mixed lengths, deaths, pauses and neighbours, and what a client reads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from batchsvc.batches import estimate, progress
from batchsvc.batches.estimate import AnyTime, Habits, Hands, Interval, Neighbour
from batchsvc.batches.progress import Sample, Work

STEP_MS = 200
MARKS = (250_000, 500_000, 750_000)


@dataclass
class Scenario:
    """What happens in one run; times in milliseconds, speeds in tokens a second."""

    seed: int
    lengths: list[int]  # what each line really takes, in plan order
    predicted: list[int]
    unit_lines: int = 64
    workers: int = 2
    slots: int = 32
    engine_speed: float = 2_000.0  # tokens a second of a full worker
    sequence_speed: float = 200.0  # and of one sequence
    is_in_turn: bool = False  # a worker runs line after line instead of all side by side
    drift: float = 0.0
    death_every_ms: float = 0.0
    pause_every_ms: float = 0.0
    saves: bool = True
    habits: Habits = field(default_factory=lambda: Habits(flush_ms=5_000, death_ms=40_000, tick_ms=5_000))
    neighbour: tuple[float, float, float] | None = None  # begins, ends, and the share of the workers that it takes


@dataclass
class _Unit:
    lines: list[int]
    done: set[int] = field(default_factory=set)  # that count
    kept: dict[int, float] = field(default_factory=dict)  # saved tokens of unfinished lines
    free_ms: float = 0.0
    is_leased: bool = False


@dataclass
class _Worker:
    units: list[_Unit] = field(default_factory=list)
    tokens: dict[int, float] = field(default_factory=dict)  # of lines that run
    finished: dict[int, set[int]] = field(default_factory=dict)  # by unit, not yet counted
    flush_ms: dict[int, float] = field(default_factory=dict)
    back_ms: float = 0.0
    paused_ms: float = 0.0


@dataclass
class Reading:
    """What a client was told when it first saw a share."""

    at_ms: float
    ppm: int
    interval: Interval | None


@dataclass
class Outcome:
    end_ms: float
    readings: dict[int, Reading]
    shares: list[int]


class Simulation:
    """One run of a scenario, in steps of `STEP_MS`."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.draw = random.Random(scenario.seed)
        lines = list(range(len(scenario.lengths)))
        self.units = [
            _Unit(lines[start : start + scenario.unit_lines]) for start in range(0, len(lines), scenario.unit_lines)
        ]
        self.workers = [_Worker() for _ in range(scenario.workers)]
        self.samples: list[Sample] = []
        self.ppm = 0
        self.now_ms = 0.0
        self.speed_phase = self.draw.random()

    def run(self) -> Outcome:
        readings: dict[int, Reading] = {}
        shares: list[int] = []
        while not all(len(unit.done) == len(unit.lines) for unit in self.units):
            self.now_ms += STEP_MS
            assert self.now_ms < 48 * 3_600_000, "the simulated batch doesn't end"
            for worker in self.workers:
                self._live(worker)
            if self.now_ms % 1_000 < STEP_MS:  # a client looks
                shares.append(self.ppm)
                for mark in MARKS:
                    if self.ppm >= mark and mark not in readings:
                        readings[mark] = Reading(self.now_ms, self.ppm, self.interval())
        merging = len(self.s.lengths) / 20_000 * 1000 + self.draw.random() * self.s.habits.tick_ms
        return Outcome(self.now_ms + merging, readings, shares)

    def interval(self) -> Interval | None:
        held = [
            sum(self.s.predicted[line] for line in unit.lines if line not in unit.done)
            for worker in self.workers
            for unit in worker.units
        ]
        hands = Hands(sum(bool(worker.units) for worker in self.workers), max(held, default=0.0))
        others = []
        if self.s.neighbour is not None and self.s.neighbour[0] <= self.now_ms < self.s.neighbour[1]:
            _, ends, share = self.s.neighbour
            rate = estimate.rate(self.samples, self.now_ms, self.s.habits, AnyTime()) * share / (1 - share)
            others = [Neighbour(left_tokens=rate * (ends - self.now_ms), rate=rate, is_ahead=True)]
        found = estimate.lines_end(
            self._work(),
            self.samples,
            self.s.habits,
            AnyTime(),
            self.now_ms,
            hands=hands,
            neighbours=others,
        )
        merging = estimate.merge_ms(len(self.s.lengths), 0, self.s.habits)
        return found and found.later(*merging)

    def _work(self) -> Work:
        finished = [line for unit in self.units for line in unit.done]
        return Work(
            est_tokens=sum(self.s.predicted),
            lines=len(self.s.lengths),
            finished_tokens=sum(self.s.predicted[line] for line in finished),
            took_tokens=sum(self.s.lengths[line] for line in finished),
            running_tokens=int(sum(sum(unit.kept.values()) for unit in self.units)),
            running_lines=sum(len(unit.kept) for unit in self.units),
            sure_tokens=sum(self.s.predicted) if self.s.predicted == self.s.lengths else 0,
        )

    def _live(self, worker: _Worker) -> None:
        if self.now_ms < worker.back_ms or self.now_ms < worker.paused_ms:
            return
        if self.s.death_every_ms and self.draw.random() < STEP_MS / self.s.death_every_ms:
            self._die(worker)
            return
        if self.s.pause_every_ms and self.draw.random() < STEP_MS / self.s.pause_every_ms:
            worker.paused_ms = self.now_ms + self.draw.uniform(0.2, 1.5) * self.s.habits.death_ms
            return
        self._claim(worker)
        self._decode(worker)
        self._flush(worker)

    def _die(self, worker: _Worker) -> None:
        seen_ms = self.s.habits.death_ms * self.draw.uniform(0.7, 1.0)
        for unit in worker.units:
            unit.is_leased, unit.free_ms = False, self.now_ms + seen_ms
        worker.back_ms = self.now_ms + self.draw.uniform(0.1, 0.5) * self.s.habits.death_ms
        worker.units, worker.tokens, worker.finished, worker.flush_ms = [], {}, {}, {}

    def _claim(self, worker: _Worker) -> None:
        while len(worker.tokens) < 2 * self.s.slots:
            ready = (
                unit
                for unit in self.units
                if not unit.is_leased and unit.free_ms <= self.now_ms and len(unit.done) < len(unit.lines)
            )
            unit = next(ready, None)
            if unit is None:
                return
            unit.is_leased = True
            worker.units.append(unit)
            worker.tokens.update({line: unit.kept.get(line, 0.0) for line in unit.lines if line not in unit.done})

    def _decode(self, worker: _Worker) -> None:
        running = list(worker.tokens)[: self.s.slots]
        if not running:
            return
        phase = self.now_ms / 120_000 + self.speed_phase
        speed = 1 + self.s.drift * (2 * abs(phase % 2 - 1) - 1)
        if self.s.neighbour is not None and self.s.neighbour[0] <= self.now_ms < self.s.neighbour[1]:
            speed *= 1 - self.s.neighbour[2]
        budget = speed * STEP_MS / 1000 * min(self.s.engine_speed, self.s.sequence_speed * len(running))
        if self.s.is_in_turn:
            budget = speed * STEP_MS / 1000 * self.s.engine_speed
        for line in running:
            share = budget if self.s.is_in_turn else budget / len(running)
            new = min(share, self.s.lengths[line] - worker.tokens[line])
            worker.tokens[line] += new
            if self.s.is_in_turn:
                budget -= new
            if worker.tokens[line] >= self.s.lengths[line] - 1e-6:
                del worker.tokens[line]
                worker.finished.setdefault(line // self.s.unit_lines, set()).add(line)
            if self.s.is_in_turn and budget <= 0:
                return

    def _flush(self, worker: _Worker) -> None:
        changed = False
        for unit in list(worker.units):
            no = unit.lines[0] // self.s.unit_lines
            finished = worker.finished.get(no, set())
            is_over = len(unit.done) + len(finished) == len(unit.lines)
            due = worker.flush_ms.setdefault(no, self.now_ms + 500)
            if is_over or self.now_ms >= due:
                worker.flush_ms[no] = self.now_ms + self.s.habits.flush_ms
                if not finished and not self.s.saves:
                    continue
                changed = True
                unit.done |= finished
                worker.finished.pop(no, None)
                kept = {line: worker.tokens[line] for line in unit.lines if worker.tokens.get(line)}
                unit.kept = kept if self.s.saves else {}
                if is_over:
                    worker.units.remove(unit)
                    unit.is_leased = False
        if changed:
            work = self._work()
            self.samples = progress.with_sample(self.samples, Sample(int(self.now_ms), work.done_tokens))
            self.ppm = max(self.ppm, progress.running_ppm(work))


def mixed(seed: int) -> Scenario:
    """A scenario drawn from everything that happens to a batch."""
    draw = random.Random(1000 + seed)
    num_lines = draw.choice([48, 200, 600, 1500])
    shape = draw.choice(["even", "heavy", "two kinds", "known"])
    if shape == "even":
        lengths = [draw.randint(20, 400) for _ in range(num_lines)]
    elif shape == "heavy":
        lengths = [min(1024, max(4, round(draw.lognormvariate(5, 0.8)))) for _ in range(num_lines)]
    elif shape == "two kinds":
        lengths = [draw.choice([16, 16, 16, 700]) for _ in range(num_lines)]
    else:
        lengths = sorted((draw.randint(16, 1000) for _ in range(num_lines)), reverse=True)
    predicted = list(lengths) if shape == "known" else [256] * num_lines
    is_in_turn = draw.random() < 0.3
    workers = draw.choice([1, 2, 3])
    slots = draw.choice([8, 32, 64])
    speed = draw.uniform(150, 600)
    whole_ms = 1000 * sum(lengths) / (workers * speed)
    quick = whole_ms < 300_000 or draw.random() < 0.5
    habits = (
        Habits(flush_ms=500, death_ms=4_000, tick_ms=500)
        if quick
        else Habits(flush_ms=5_000, death_ms=40_000, tick_ms=5_000)
    )
    return Scenario(
        seed=seed,
        lengths=lengths,
        predicted=predicted,
        unit_lines=draw.choice([16, 64, 256]),
        workers=workers,
        slots=slots,
        engine_speed=speed,
        sequence_speed=speed / draw.choice([1, 4, 16]),
        is_in_turn=is_in_turn,
        drift=draw.choice([0.0, 0.0, 0.3]),
        death_every_ms=draw.choice([0.0, whole_ms / 4, whole_ms / 2]),
        pause_every_ms=draw.choice([0.0, 0.0, whole_ms / 2]),
        habits=habits,
    )
