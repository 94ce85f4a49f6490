"""A thread that lasts outlives its own exceptions, which are logged, and ends when it is told to."""

from __future__ import annotations

import threading

from structlog.testing import capture_logs

from batchsvc.threads import LastingThread, WokenThread


def test_a_turn_that_crashes_is_logged_and_followed_by_the_next() -> None:
    turns: list[int] = []
    has_two = threading.Event()

    def turn() -> None:
        turns.append(1)
        if len(turns) == 1:
            raise ValueError("a defect")
        has_two.set()
        thread.stopped.wait()

    thread = LastingThread("some", turn)
    with capture_logs() as logged:
        thread.start()
        assert has_two.wait(10)
        thread.stop()
    assert [(line["event"], line["error"]) for line in logged] == [("some.crashed", "ValueError")]
    assert len(turns) == 2


def test_one_that_is_woken_while_it_works_works_once_more() -> None:
    works, may_end = [threading.Event() for _ in range(3)], threading.Event()
    done: list[int] = []

    def work() -> None:
        works[len(done)].set()
        may_end.wait(10)
        done.append(1)

    thread = WokenThread("some", work)
    thread.start()
    thread.wake()
    assert works[0].wait(10)
    for _ in range(3):
        thread.wake()
    may_end.set()
    assert works[1].wait(10)
    thread.stop()
    assert len(done) == 2 and not works[2].is_set()


def test_one_that_never_started_is_stopped_at_once() -> None:
    for thread in (LastingThread("some", lambda: None), WokenThread("some", lambda: None)):
        thread.stop()
