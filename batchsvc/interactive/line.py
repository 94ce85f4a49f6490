"""One call in an API process: what its worker said of it and its client hasn't read yet, in a bounded buffer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from batchsvc.errors import InvalidRequestError, ServiceError, UnavailableError
from batchsvc.interactive.growth import Gathered
from batchsvc.interactive.wire import Ended, Failed, Grown, Taken

_MESSAGE_BYTES = 64  # that a message takes besides its text
_LOGPROB_BYTES = 200
_ERRORS = {UnavailableError.status: UnavailableError}


class Line:
    """News of a call in order. `worker` is who has it; `heard_s` is when it was last heard of, by the loop's clock.

    A client that reads more slowly than the answer grows has about `most_bytes` waiting for it. Whoever brings news
    gives the reader of an overfull line a chance, then lets it `overflow`: the call fails, what waits is dropped, and
    `on_overflow` is called, for whoever is stuck in sending.

    Beyond that bound a line keeps what was said of the answer, read or not, since its end brings only the rest: until
    the end, or until the call fails. That is as much as its `max_tokens` and logprobs allow, which bound it (asked.py).
    """

    def __init__(self, call_id: str, *, most_bytes: int, now_s: float) -> None:
        self.call_id = call_id
        self.heard_s = now_s
        self.worker: str | None = None
        self._most_bytes = most_bytes
        self._waiting: deque[Grown | Ended] = deque()
        self._waiting_bytes = 0
        self._num_grown = 0
        self._gathered = Gathered()
        self._failure: ServiceError | None = None
        self._is_over = self._has_reader = False
        self._changed = asyncio.Event()
        self.on_overflow: Callable[[], object] = lambda: None

    @property
    def is_over(self) -> bool:
        """Whether its worker is done with it."""
        return self._is_over

    @property
    def whole(self) -> Ended | None:
        """The answer, if all of it is here and hasn't been read."""
        last = self._waiting[-1] if self._waiting else None
        return last if isinstance(last, Ended) else None

    @property
    def is_overfull(self) -> bool:
        """Whether more waits than may, though somebody reads. One message alone is never too much, and neither is what
        waits when there is nothing more to come."""
        is_much = self._waiting_bytes > self._most_bytes and len(self._waiting) > 1
        return is_much and self._has_reader and not self._is_over

    def push(self, news: Taken | Grown | Ended | Failed, now_s: float) -> None:
        """Something was said of this call."""
        self.heard_s = now_s
        if self._failure is not None:
            return
        match news:
            case Taken(worker=worker):
                self.worker = worker
            case Failed():
                self.fail(_error_of(news))
                self._is_over = True
            case Grown(no=no) if no != self._num_grown:
                self.fail(lost())
            case Grown():
                self._waiting_bytes += _bytes_of(news)
                self._waiting.append(news)
                self._num_grown += 1
                for text in news.texts:
                    self._gathered.add(text)
            case Ended():
                if news.num_grown == self._num_grown:
                    self._waiting.append(self._whole(news) if news.is_rest else news)
                else:
                    self.fail(lost())
                self._is_over = True
        self._changed.set()

    def _whole(self, ended: Ended) -> Ended:
        whole = self._gathered.whole_of(ended.completion)
        self._gathered = Gathered()
        return replace(ended, completion=whole, is_rest=False)

    def fail(self, error: ServiceError) -> None:
        """There will be no answer: whoever reads next gets this error. An answer that is whole stays."""
        if not self._is_over:
            self._break_off(error)

    def _break_off(self, error: ServiceError) -> None:
        self._failure = self._failure or error
        self._waiting.clear()
        self._waiting_bytes = 0
        self._gathered = Gathered()
        self._changed.set()

    async def changed(self) -> None:
        """Wait until something was said. Raises the error of a call that failed."""
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            self._changed.set()
            raise self._failure

    async def next(self) -> Grown | Ended:
        """The next news; the end has the whole answer. Raises the error of a call that failed."""
        self._has_reader = True
        while not self._waiting:
            await self.changed()
        news = self._waiting.popleft()
        if isinstance(news, Grown):
            self._waiting_bytes -= _bytes_of(news)
        return news

    def overflow(self) -> None:
        """Its client reads too slowly."""
        self._break_off(UnavailableError("The answer was read too slowly, so it was ended.", code="slow_reader"))
        self.on_overflow()


def lost() -> UnavailableError:
    """The error of a call of which nothing more will be heard."""
    says = "The engine worker that ran this call is gone, and the call with it: send it again."
    return UnavailableError(says, code="worker_lost")


def _error_of(failed: Failed) -> ServiceError:
    kind = InvalidRequestError if failed.status < 500 else _ERRORS.get(failed.status, ServiceError)
    return kind(failed.message, code=failed.code, param=failed.param)


def _bytes_of(news: Grown) -> int:
    return sum(
        _MESSAGE_BYTES + 4 * len(one.text) + _LOGPROB_BYTES * sum(1 + len(found.top) for found in one.logprobs)
        for one in news.texts
    )
