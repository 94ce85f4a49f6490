"""The engine of test mode: the fake engine, which answers at once, behind a door that does what magic prompts ask.

A slow line waits at the door until its time has come, one that is to expire waits for ever, and one that is to fail
runs and then fails. What waits here is no work of the engine: nobody takes it for an engine that hangs.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from batchsvc.batches import magic
from batchsvc.batches.magic import Magic
from batchsvc.clock import monotonic_s
from engine.fake import FakeEngine
from engine.request import Completion, Expectation, FinishReason, Request, StepOutput

_TICK_S = 0.05  # how long a step that has nothing to do yet waits
_VOCAB_SIZE = 1 << 22  # prompts of all models come here
_MOST_TOLD = 10_000  # lines whose failures are counted, of flaky ones


class MagicEngine:
    """Same methods as an engine; `add` and `abort` may be called while another thread steps. `on_expire` is called with
    the id of a request that will never be answered, by the thread that steps."""

    def __init__(self, *, on_expire: Callable[[str], None], max_running: int = 256) -> None:
        self._inner = FakeEngine(None, max_running=max_running, vocab_size=_VOCAB_SIZE)
        self._on_expire = on_expire
        self._lock = threading.Lock()
        self._asleep: list[tuple[float, int, str]] = []  # (when it may run, order, id), a heap
        self._held: dict[str, Request] = {}  # what waits here, by id
        self._failing: dict[str, Magic] = {}  # what fails when it has run
        self._expiring: deque[str] = deque()
        self._failed: Counter[str] = Counter()
        self._count = 0

    def add(self, request: Request) -> None:
        """As Engine.add. Raises RequestError for what no engine could run."""
        spell = magic.parse(request.magic) if request.magic else None
        if spell is None:
            self._inner.add(request)
            return
        if spell.verb in ("fail", "flaky"):
            with self._lock:
                self._failing[request.id] = spell
            self._inner.add(request)
            return
        with self._lock:
            self._held[request.id] = request
            if spell.verb == "slow":
                self._count += 1
                heapq.heappush(self._asleep, (monotonic_s() + spell.value, self._count, request.id))
            else:
                self._expiring.append(request.id)

    def abort(self, request_id: str) -> None:
        """As Engine.abort."""
        with self._lock:
            held = self._held.pop(request_id, None)
        if held is not None:
            self._inner.add(held)
        self._inner.abort(request_id)

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """As Engine.expect; there is no cache."""

    def has_work(self) -> bool:
        return bool(self._inner.has_work() or self._held)

    def step(self) -> StepOutput:
        """A step of the fake engine, once what has slept long enough is in it."""
        while self._expiring:
            self._on_expire(self._expiring.popleft())
        for request in self._awake():
            self._inner.add(request)
        if not self._inner.has_work():
            time.sleep(_TICK_S)
            return StepOutput(idle_s=_TICK_S)
        output = self._inner.step()
        output.completions = [self._spelled(completion) for completion in output.completions]
        return output

    def stats(self) -> Any:
        """As Engine.stats; what waits at the door isn't counted."""
        return self._inner.stats()

    def signals(self) -> dict[str, Any]:
        """As Engine.signals."""
        return self._inner.signals()

    def close(self) -> None:
        self._inner.close()

    def _awake(self) -> list[Request]:
        found = []
        with self._lock:
            while self._asleep and self._asleep[0][0] <= monotonic_s():
                request = self._held.pop(heapq.heappop(self._asleep)[2], None)
                if request is not None:  # else it was aborted
                    found.append(request)
        return found

    def _spelled(self, completion: Completion) -> Completion:
        with self._lock:
            spell = self._failing.pop(completion.request_id, None)
        if spell is None or completion.finish_reason is FinishReason.ABORT:
            return completion
        code, row = spell.code, _row_of(completion.request_id)
        if spell.verb == "flaky":
            if len(self._failed) > _MOST_TOLD:
                self._failed.clear()
            self._failed[row] += 1
            if self._failed[row] > spell.value:
                del self._failed[row]
                return completion
            code = "engine_error"
        return replace(
            completion,
            finish_reason=FinishReason.ERROR,
            error_code=code,
            error_message="A prompt of test mode asked for this error.",
            choices=(),
        )


def _row_of(request_id: str) -> str:
    """A row of a unit, whoever owns the unit: its requests are <unit>:<epoch>:<row>."""
    unit, _, rest = request_id.partition(":")
    return f"{unit}:{rest.partition(':')[2]}"
