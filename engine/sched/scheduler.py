"""Decides what each step computes: continuous batching by token step, over paged blocks with a prefix cache.

    while there is work:
        plan = schedule()             of each lane decodes first, then unfinished prefills, then admissions
        result = execute(plan)        the runner
        finished = commit(plan, result)

Interactive work comes first: 1 to 3 are done for it, then for batch work with what is left of the step.

1. Decodes, in order of rank, take one token each, and perhaps a draft (engine/spec) behind it, as far as tokens and
   blocks are left over. One that gets no block preempts the last in rank.
2. Unfinished prefills take what is left of the token budget, as far as blocks reach.
3. Requests are admitted while tokens are left and the predicted KV peak fits the pool (sched/budget.py); none in a
   round that preempted. A follower of a prefix that is being computed waits for its leader. One that doesn't fit may be
   overtaken by a few smaller ones of its lane, a bounded number of times. `max_running` bounds those that decode: one
   that ends with its first token needs no KV beyond its prompt and no place among them.
   Batch work gives blocks and places to an interactive request, the last in rank first, so only the interactive ones
   count against its peak.
4. Preempted requests give their blocks back and are admitted again like new ones: what is still cached is a hit.
5. What can never fit ends with an error: at once where the prompt tells, else when it is alone and gets no block.

`schedule` may run before earlier plans are committed; commits come in the order of plans. The scheduler knows no
tensors, no text and no clock: the same calls give the same plans. A dial says how long a step may take (sched/dial.py).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping

from engine.cache.prefix import PrefixIndex
from engine.cache.sequence import Sequence, SequenceState
from engine.cache.tables import BlockTables
from engine.pooling import uses_cache
from engine.request import Expectation, FinishReason, Lane, Request
from engine.sched.audit import check_lines
from engine.sched.budget import StepBudget, least_outputs, too_large
from engine.sched.counters import Counters, LaneCounters
from engine.sched.dial import Dial
from engine.sched.expected import ExpectedUses
from engine.sched.forecast import Forecast
from engine.sched.forks import Forks, are_siblings, has_prompt
from engine.sched.limits import StepLimits
from engine.sched.peak import Neighbours, Peak
from engine.sched.plan import StepPlan, StepResult
from engine.sched.step import Share, Step
from engine.sched.waiting import PrefixLeaders, WaitingQueue
from engine.spec.speculation import Speculation

Judge = Callable[[Sequence, int], FinishReason | None]
"""Is told each token a sequence has read; says whether the answer ends with it."""

_LOOK_AHEAD = 8  # waiting requests that may be passed over in one round
_PATIENCE = 256  # requests that may overtake one that doesn't fit
_LANE_STRIDE = 1 << 40  # ranks of one lane; more arrivals than an engine lives to see


class Scheduler:
    """One engine's waiting and running sequences. Not thread-safe.

    `index` None turns the prefix cache off. `next_use(key)` tells how far ahead a cached block is needed; by default
    the waiting requests decide, and beyond them what was announced by `expect`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_tokens: int,
        step_tokens: int,
        max_running: int,
        index: PrefixIndex | None = None,
        judge: Judge = lambda _seq, _token_id: None,
        next_use: Callable[[bytes], float] | None = None,
        speculation: Speculation | None = None,
        dial: Dial | None = None,
    ) -> None:
        self.counters = Counters()
        self._block_tokens = block_tokens
        self._limits = StepLimits(step_tokens=step_tokens, max_running=max_running)
        self._judge = judge
        self._speculation = speculation
        self._dial = dial or Dial()
        self._waiting = WaitingQueue()
        self._expected = ExpectedUses()
        self._leaders = PrefixLeaders()
        self._forks = Forks()
        self._forecast = Forecast()
        self._tables = BlockTables(num_blocks, block_tokens, index, next_use=next_use or self._next_use)
        self._pool = self._tables.pool
        if speculation is not None:
            speculation.borrow(self._tables.loans)
        self._peak = Peak(self._tables, self._forecast)
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []  # by rank
        self._in_flight: deque[tuple[int, list[Share]]] = deque()
        self._finished: list[Sequence] = []
        self._next_step = 0
        self._arrivals = 0
        self._refused: set[bool] = set()  # lanes whose waiting ones were found not to fit since anything changed

    @property
    def tables(self) -> BlockTables:
        """Who has which block."""
        return self._tables

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self) -> tuple[Sequence, ...]:
        """Those that run, by rank."""
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._sequences) - len(self._running)

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_used

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def has_work(self) -> bool:
        """Whether there are sequences, or ended ones that nobody took."""
        return bool(self._sequences or self._finished)

    def add(self, request: Request, max_outputs: int | None = None) -> Sequence:
        """Queues a request with a non-empty prompt. `max_outputs` is the most its context allows."""
        seq = self._new_sequence(request, max_outputs)
        if seq.state is SequenceState.WAITING:
            self._enqueue(seq)
        return seq

    def fork(self, parent_id: str, request: Request, max_outputs: int | None = None) -> Sequence:
        """Queues another answer to the prompt of `parent_id`. As soon as that one's blocks hold the prompt, if there is
        room, the child starts from them, the last one shared until one of them writes (copy-on-write)."""
        seq = self._new_sequence(request, max_outputs)
        parent = self._sequences.get(parent_id)
        if seq.state is SequenceState.WAITING and (parent is None or not self._forks.hold(parent, seq)):
            self._begin(seq, parent)
        return seq

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a request wherever it is; it comes with the next finished ones. None: there is no such request."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._end(seq, FinishReason.ABORT)
        return seq

    def preempt(self, request_id: str) -> bool:
        """Sends a running request back to wait. False: it isn't running."""
        if running := [seq for seq in self._running if seq.id == request_id]:
            self._preempt(running[0])
        return bool(running)

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """Keeps cached prefixes for requests to come. Takes the place of what `name` announced before; None takes it
        back."""
        if self._expected.announce(name, expectation, self._tables):
            self._pool.reorder()

    def schedule(self) -> StepPlan | None:
        """Plans the next step. None: nothing to compute before a commit or an add."""
        step = Step(self._next_step, self._budget())
        drafts: Mapping[str, tuple[int, ...]] = {}
        if self._speculation is not None:  # trials are no ballast
            is_bounded = step.budget.is_bounded
            drafts = self._speculation.drafts(self._running, step.budget.tokens, only_interactive=is_bounded)
        preemptions = self.counters.preemptions
        for is_interactive in (True, False):
            lane = [seq for seq in self._running if seq.is_interactive == is_interactive]
            self._go_on(lane, step, drafts)
            was_short = preemptions < self.counters.preemptions
            was_short &= not is_interactive or any(seq.state is SequenceState.WAITING for seq in lane)
            if not was_short and is_interactive not in self._refused and len(self._waiting):
                self._admit(step, is_interactive=is_interactive)
        if not step.chunks:
            return None
        plan = step.plan(self._tables.take_copies(), self._pool.drain_freed(), written=self._tables.loans.blocks)
        self._in_flight.append((plan.step, step.shares))
        self._next_step += 1
        self.counters.steps += 1
        self.counters.chunks += len(step.chunks)
        self.counters.read_blocks += self._pool.num_used
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Takes in what a step brought. Returns the sequences that ended since the last call."""
        step, shares = self._in_flight.popleft()
        assert step == plan.step, f"step {plan.step} is committed while step {step} is the oldest in flight"
        if self._limits.observe_step():
            self._refused.clear()
        for share in shares:
            seq = share.seq
            if seq.state is SequenceState.FINISHED:
                continue
            if seq.id in result.failed and seq.id not in result.sampled:
                self._fail(seq, result)
                continue
            if share.is_current:
                self._commit_blocks(seq, share.end_tokens)
                if has_prompt(seq):  # before its token is read, which may end it
                    self._begin_forks(seq)
            if seq.request.pooling is not None:
                self._pool_states(seq, share, result.pooled.get(seq.id))
            elif share.samples:
                self._read(seq, result.sampled[seq.id], is_current=share.is_current)
            if seq.id in result.failed and seq.id in self._sequences:  # it didn't end before what failed
                self._fail(seq, result)
        return self.take_finished()

    def undo(self, plan: StepPlan) -> bool:
        """Takes back a step for which memory didn't suffice: all that run wait again, nothing is lost, and the next
        steps are smaller. False: there is no smaller step."""
        step, shares = self._in_flight.popleft()
        assert step == plan.step, f"step {plan.step} is undone while step {step} is the oldest in flight"
        assert not self._in_flight, "a step is undone while a later one is in flight"
        for share in shares:
            if share.samples and share.seq.state is not SequenceState.FINISHED:
                share.seq.unsample()
                if share.seq.state is SequenceState.WAITING and not share.seq.num_unread:  # preempted since
                    self._enqueue(share.seq)
        for seq in reversed(self.running()):
            self._preempt(seq)
        self.counters.shortages += 1
        return self._limits.lower(plan.num_tokens, len(plan.chunks))

    def take_finished(self) -> list[Sequence]:
        """Sequences that ended since the last call, by whatever reason."""
        finished, self._finished = self._finished, []
        return finished

    def check_integrity(self) -> None:
        """Raises AssertionError where the books disagree. Costs time in proportion to the pool."""
        assert self._free_slots() >= 0, f"{len(self._running)} sequences run"
        self._tables.check_integrity(self._sequences.values())
        check_lines(self._sequences.values(), self._running, self._waiting, self._forks, self._leaders)
        for lane, counters in self.counters.lanes.items():
            assert counters.open == sum(seq.lane == lane for seq in self._sequences.values()), f"{lane} is miscounted"
            assert counters.running == sum(seq.lane == lane for seq in self._running), f"{lane} is miscounted"

    def _next_use(self, key: bytes) -> float:
        return min(self._waiting.next_use(key), self._expected.next_use(key))

    def _new_sequence(self, request: Request, max_outputs: int | None) -> Sequence:
        assert request.id not in self._sequences, f"{request.id} is there already"
        assert request.prompt_ids, f"{request.id} has an empty prompt"
        allowed = request.params.max_tokens if max_outputs is None else min(request.params.max_tokens, max_outputs)
        self._arrivals += 1
        seq = Sequence(request, request.lane * _LANE_STRIDE + self._arrivals, allowed)
        self._sequences[seq.id] = seq
        lane = self._lane(seq)
        lane.open, lane.prompt_tokens = lane.open + 1, lane.prompt_tokens + seq.num_prompt_tokens
        for num_outputs in range(1, seq.num_outputs + 1):  # of an answer that is resumed
            self._forecast.observe_token(request, num_outputs)
        needed = self._tables.num_blocks_for(seq.num_prompt_tokens + least_outputs(request.params, allowed) - 1)
        if needed > self.num_blocks:
            self._end_too_large(seq)
        return seq

    def _enqueue(self, seq: Sequence) -> None:
        if uses_cache(seq.request):
            self._tables.extend_keys(seq)
        self._waiting.add(seq)
        self._refused.clear()

    def _begin(self, seq: Sequence, parent: Sequence | None) -> None:
        if parent is None or not self._can_fork(parent, seq):
            self._enqueue(seq)
            return
        self._tables.extend_keys(seq)
        self._tables.fork(parent, seq, len(seq.tokens) - 1)
        self._start(seq, is_first=True)

    def _begin_forks(self, parent: Sequence) -> None:
        for child in self._forks.take(parent.id):
            self._begin(child, parent)

    def _can_fork(self, parent: Sequence, child: Sequence) -> bool:
        is_possible = has_prompt(parent) and are_siblings(parent, child) and self._free_slots() >= child.decodes
        shared = parent.entries[: (parent.num_prompt_tokens - 1) // self._block_tokens]
        neighbours = self._peak.beside(self._running, is_interactive=child.is_interactive)
        return is_possible and self._peak.fits(neighbours, self._peak.new_load(child, shared))

    def _lane(self, seq: Sequence) -> LaneCounters:
        return self.counters.lanes[seq.lane]

    def _budget(self) -> StepBudget:
        return self._dial.budget(
            self._limits.step_tokens,
            is_interactive=self.counters.lanes[Lane.INTERACTIVE].open > 0,
            is_answering=any(seq.is_interactive and seq.num_pending == 1 for seq in self._running),
        )

    def _go_on(self, lane: list[Sequence], step: Step, drafts: Mapping[str, tuple[int, ...]]) -> None:
        """Decodes of the running sequences of a lane, then their prefills."""
        budget = step.budget
        for seq in lane:
            may_decode = budget.takes_decode(seq.computed_tokens, is_interactive=seq.is_interactive)
            if may_decode and seq.num_pending == 1 and seq.is_ready(self._next_step) and self._make_room(seq):
                self._compute(seq, 1, step, drafts.get(seq.id, ()))
        for seq in lane:
            is_prefill = seq.num_pending > 1 and seq.is_ready(self._next_step)
            if budget.tokens and is_prefill and (step.chunks or self._make_room(seq)):
                self._compute(seq, self._chunk_tokens(seq, budget), step)

    def _free_slots(self, *, is_interactive: bool = False) -> int:
        """How many more sequences may decode. Batch work gives its places to interactive ones."""
        counted = (seq for seq in self._running if seq.is_interactive or not is_interactive)
        return self._limits.max_running - sum(seq.decodes for seq in counted)

    def _chunk_tokens(self, seq: Sequence, budget: StepBudget) -> int:
        wanted = budget.chunk_tokens(seq.computed_tokens, seq.num_pending, is_interactive=seq.is_interactive)
        self._give_way(seq, wanted)
        return min(wanted, self._tables.room(seq))

    def _give_way(self, seq: Sequence, num_tokens: int) -> None:
        """Batch work makes room for the next tokens of an interactive sequence, the last in rank first. None of it has
        a chunk in this round yet."""
        while seq.is_interactive and self._tables.room(seq) < num_tokens:
            if self._speculation is not None and self._speculation.give_back():
                continue
            if self._running[-1].is_interactive:
                return
            self._preempt(self._running[-1])

    def _make_room(self, seq: Sequence) -> bool:
        """Room for one token of `seq`. The last in rank pays, which has no chunk in this round yet: those with a
        chunk rank before `seq`. If `seq` itself is the last, it goes; if it is alone, it can never fit, unless a
        token that wasn't read yet ends it."""
        self._give_way(seq, 1)
        while not self._tables.room(seq):
            if self._speculation is not None and self._speculation.give_back():
                continue
            victim = self._running[-1]
            if len(self._running) == 1:
                if seq.num_unread:
                    return False
                self._end_too_large(seq)
            else:
                self._forecast.observe_preemption()
                self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _compute(self, seq: Sequence, num_tokens: int, step: Step, draft: tuple[int, ...] = ()) -> None:
        """Adds the next `num_tokens` of the sequence to the step, and of `draft` what leaves a block for each other."""
        if num_tokens <= 0:
            return
        if draft:
            room = self._tables.room(seq) - num_tokens - len(self._running) * self._block_tokens
            draft = draft[: max(min(room, step.budget.tokens - num_tokens), 0)]
            self.counters.verifications += bool(draft)
            self.counters.drafted_tokens += len(draft)
        self._lane(seq).computed_tokens += num_tokens + len(draft)
        self._tables.grow(seq, num_tokens + len(draft))
        step.add(seq, num_tokens, draft)

    def _admit(self, step: Step, *, is_interactive: bool) -> None:
        passed: list[Sequence] = []
        slots, is_spent = self._free_slots(is_interactive=is_interactive), False
        neighbours, num_shared = Neighbours([], 0), -1
        while step.budget.tokens and len(passed) <= _LOOK_AHEAD:
            seq = self._waiting.pop(is_interactive=is_interactive)
            if seq is None:
                break
            if slots < seq.decodes:
                self._waiting.put_back(seq)
                break
            chain = self._tables.match(seq)
            key = self._leaders.deepest_in_progress(seq, seq.block_keys[len(chain) :])
            if key is not None:
                self._waiting.park(seq, key)
                continue
            other_lane = bool(passed) and seq.request.lane != passed[0].request.lane
            if num_shared != self._pool.num_shared:  # at first, and when somebody's private blocks are shared now
                neighbours = self._peak.beside(self._running, is_interactive=is_interactive)
                num_shared = self._pool.num_shared
            load = self._peak.new_load(seq, chain)
            if other_lane or not self._peak.fits(neighbours, load):
                passed.append(seq)
                if other_lane or seq.num_overtaken >= _PATIENCE:
                    break
                continue
            if not step.budget.chunk_tokens(len(chain) * self._block_tokens, 1, is_interactive=is_interactive):
                self._waiting.put_back(seq)
                is_spent = True
                break
            self._waiting.remove(seq)
            while self._free_slots() < seq.decodes:
                self._preempt(next(other for other in reversed(self._running) if other.decodes))
            is_first = seq.hit_tokens is None
            self._tables.admit(seq, chain)
            self._start(seq, is_first=is_first)
            self._compute(seq, self._chunk_tokens(seq, step.budget), step)
            neighbours.loads.append(load)
            slots -= seq.decodes
            for other in passed:
                other.num_overtaken += 1
        for seq in passed:
            self._waiting.put_back(seq)
        self._refused.discard(is_interactive)
        if passed and step.budget.tokens and not is_spent:
            self._refused.add(is_interactive)

    def _start(self, seq: Sequence, *, is_first: bool) -> None:
        insort(self._running, seq, key=lambda running: running.rank)
        self._lane(seq).running += 1
        self._leaders.claim(seq, seq.block_keys[len(seq.entries) :])
        if is_first:
            self._lane(seq).hit_tokens += seq.computed_tokens
        else:
            self.counters.recomputed_tokens -= seq.computed_tokens

    def _commit_blocks(self, seq: Sequence, end_tokens: int) -> None:
        before = len(seq.entries)
        self._tables.commit(seq, end_tokens)
        self._give_up(seq, seq.block_keys[before : len(seq.entries)])

    def _read(self, seq: Sequence, token_ids: tuple[int, ...], *, is_current: bool) -> None:
        """Takes in a sampled token, and those that a right draft let the step sample after it."""
        num_drafted, seq.num_drafted = seq.num_drafted, 0
        for index, token_id in enumerate(token_ids):
            if index:
                seq.accept(is_held=is_current)
                self.counters.accepted_tokens += 1
                if is_current:
                    self._commit_blocks(seq, seq.computed_tokens)
            seq.read(token_id)
            self._lane(seq).output_tokens += 1
            self._forecast.observe_token(seq.request, seq.num_known - seq.num_prompt_tokens)
            reason = self._judge(seq, token_id)
            if reason is None and seq.num_known - seq.num_prompt_tokens >= seq.max_outputs:
                reason = FinishReason.LENGTH
            if reason is not None:
                self._forecast.observe_end(seq.request, seq.num_known - seq.num_prompt_tokens)
                self._end(seq, reason)
                return
        if num_drafted and is_current:
            self._tables.trim(seq)
        if seq.state is SequenceState.WAITING and not seq.num_unread:  # preempted while this step was in flight
            self._enqueue(seq)

    def _pool_states(self, seq: Sequence, share: Share, states: bytes | None) -> None:
        """Takes in what a step brought of a vector; for one that was preempted meanwhile, nothing."""
        if states is not None and share.is_current:
            seq.pool(states)
        if share.samples and share.is_current:
            self._end(seq, FinishReason.STOP)
        elif share.samples:
            seq.unsample()
            self._enqueue(seq)

    def _preempt(self, seq: Sequence) -> None:
        self.counters.preemptions += 1
        self.counters.recomputed_tokens += seq.computed_tokens
        self._stop_running(seq)
        seq.rewind()
        if not seq.num_unread:
            self._enqueue(seq)

    def _end(self, seq: Sequence, reason: FinishReason, code: str | None = None, message: str | None = None) -> None:
        if seq.state is SequenceState.RUNNING:
            self._stop_running(seq)
        elif seq in self._waiting:
            self._waiting.remove(seq)
        del self._sequences[seq.id]
        self._lane(seq).open -= 1
        if self._speculation is not None:
            self._speculation.forget(seq.id, is_last=not self._sequences)
        seq.finish(reason, code, message)
        self._finished.append(seq)
        self._begin_forks(seq)

    def _fail(self, seq: Sequence, result: StepResult) -> None:
        code = result.codes.get(seq.id, "invalid_logits")
        self._end(seq, FinishReason.ERROR, code, result.failed[seq.id])

    def _end_too_large(self, seq: Sequence) -> None:
        says = too_large(seq.num_prompt_tokens, seq.max_outputs, self.num_blocks * self._block_tokens)
        self._end(seq, FinishReason.ERROR, "kv_capacity_exceeded", says)

    def _stop_running(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._lane(seq).running -= 1
        self._tables.release(seq)
        self._give_up(seq, seq.block_keys)
        self._refused.clear()

    def _give_up(self, seq: Sequence, keys: list[bytes]) -> None:
        for key in self._leaders.give_up(seq, keys):
            if self._waiting.wake(key):
                self._refused.clear()
