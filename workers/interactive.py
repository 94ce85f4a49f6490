"""The second source of the pump: interactive calls, each with a client that waits for it.

A call is open from the moment it is taken until its last word is said. It has no lease and is written nowhere: what
ends it early ends it for good. What is said of calls goes into an outbox, in order; how calls come in and what is said
goes out is for call_lines.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import structlog

from batchsvc.batches.magic import PARAM
from batchsvc.batches.sampling_body import sampling_params
from batchsvc.interactive.growth import Growth
from batchsvc.interactive.wire import Ended, Failed, Grown, NewCall, News, Taken
from engine.errors import RequestError
from engine.request import Completion, Expectation, FinishReason, Lane, NewText, Request
from workers.seams import EngineOf
from workers.translate import OWN_FAULT

_LOST = 503

log = structlog.get_logger(__name__)


class Said(NamedTuple):
    """Something for an API process to hear."""

    api: str
    news: News


@dataclass(slots=True, eq=False)
class _OpenCall:
    api: str
    num_grown: int = 0
    growth: Growth = field(default_factory=Growth)


class CallSource:
    """Carries calls between engine and API processes; at most `most_calls` are open at once."""

    def __init__(
        self,
        *,
        engine: EngineOf,
        owner: str,
        most_calls: int,
        fingerprint: str | None = None,
        may_take: Callable[[], bool] = lambda: True,
        must_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self.outbox: SimpleQueue[Said] = SimpleQueue()
        self._engine = engine
        self._owner = owner
        self._most_calls = most_calls
        self._fingerprint = fingerprint
        self._may_take = may_take  # whether the engine could run a call now
        self._must_wait = must_wait  # for batch work that runs alone
        self._lock = threading.Lock()
        self._open: dict[str, _OpenCall] = {}
        self._backlog: deque[Request] = deque()
        self.is_draining = False  # set in a signal handler too, so a plain attribute and no lock

    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def num_running(self) -> int:
        """How many calls the engine was given that haven't ended."""
        with self._lock:
            return len(self._open) - len(self._backlog)

    def room(self) -> int:
        """How many more calls may be taken."""
        return max(0, self._most_calls - self.num_open()) if self.takes_calls() else 0

    def takes_calls(self) -> bool:
        """Whether there is any use in sending calls here, be there room for one more or not."""
        return not self.is_draining and self._may_take() and not self._must_wait()

    def open_calls(self) -> dict[str, list[str]]:
        """Ids of the open calls by the API process that waits for them."""
        found: dict[str, list[str]] = {}
        with self._lock:
            for call_id, call in self._open.items():
                found.setdefault(call.api, []).append(call_id)
        return found

    def begin(self, call: NewCall) -> None:
        """Run a call that was just taken."""
        with self._lock:
            self._open[call.id] = _OpenCall(call.api)
            self._say(call.id, Taken(call.id, self._owner))
            try:
                self._backlog.append(to_request(call))
            except RequestError as error:
                self._end(call.id, Failed(call.id, 400, error.code, str(error), error.param))
            except Exception as error:  # one message must not end the worker, nor the other calls with it
                log.warning("call.unusable", call=call.id, error=type(error).__name__)
                self._end(call.id, Failed(call.id, 500, "engine_error", "The engine worker can't read this call."))
        self._engine.wake()

    def stop(self, call_ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        known = list(call_ids)
        with self._lock:
            ended = [call_id for call_id in known if self._open.pop(call_id, None) is not None]
            self._backlog = deque(request for request in self._backlog if request.id in self._open)
        self._engine.abort(ended)
        if ended:
            log.info("calls.stopped", calls=len(ended))

    def stop_for(self, api: str) -> None:
        """This API process is gone."""
        self.stop(self.open_calls().get(api, ()))

    def stop_all(self) -> None:
        """None of the open calls will have an answer from here."""
        for calls in self.open_calls().values():
            with self._lock:
                for call_id in calls:
                    says = "The engine worker that ran this call stops, and the call with it: send it again."
                    self._say(call_id, Failed(call_id, _LOST, "worker_lost", says))
            self.stop(calls)

    # ---- the pump's side

    def announce(self) -> list[tuple[str, Expectation | None]]:
        """Nobody knows which calls will come."""
        return []

    def take(self, room: int) -> list[Request]:
        """All calls that the engine doesn't have yet, whatever the room: they don't stand behind what can wait."""
        if self._must_wait():
            return []
        with self._lock:
            taken = list(self._backlog)
            self._backlog.clear()
        return taken

    def grow(self, request_id: str, texts: list[NewText]) -> None:
        with self._lock:
            call = self._open.get(request_id)
            if call is not None:
                self._say(request_id, Grown(request_id, call.num_grown, tuple(texts)))
                call.num_grown += 1
                for text in texts:
                    call.growth.add(text)
        if call is None:  # it was stopped while it went into the engine
            self._engine.abort([request_id])

    def finish(self, completion: Completion) -> None:
        with self._lock:
            call = self._open.get(completion.request_id)
            if call is None:
                return
            if completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                rest = call.growth.rest_of(completion)
                ended = Ended(rest.request_id, call.num_grown, rest, self._fingerprint, is_rest=True)
                self._end(rest.request_id, ended)
                return
            code = completion.error_code or "engine_error"
            says = completion.error_message or "The engine could not run this request."
            self._end(
                completion.request_id,
                Failed(completion.request_id, 400 if code in OWN_FAULT else 500, code, says),
            )

    def refuse(self, request_id: str, error: RequestError) -> None:
        with self._lock:
            if request_id in self._open:
                self._end(request_id, Failed(request_id, 400, error.code, str(error), error.param))

    def _end(self, call_id: str, news: Ended | Failed) -> None:
        self._say(call_id, news)
        del self._open[call_id]

    def _say(self, call_id: str, news: News) -> None:
        """The caller holds the lock, so what is said of a call is in order."""
        self.outbox.put(Said(self._open[call_id].api, news))


def to_request(call: NewCall) -> Request:
    """What the engine runs. Raises RequestError if the parameters can't be run."""
    return Request(
        id=call.id,
        prompt_ids=call.prompt_ids,
        params=sampling_params(dict(call.params), call.seed),
        salt=call.salt,
        lane=Lane.INTERACTIVE,
        n=int(call.params.get("n", 1)),
        streams=call.streams,
        magic=str(call.params.get(PARAM, "")),
    )
