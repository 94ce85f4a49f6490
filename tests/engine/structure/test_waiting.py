"""Steps are scheduled ahead of their results, but not for a row whose next token depends on the one before."""

from __future__ import annotations

from engine.request import Request, SamplingParams
from engine.sched.plan import PLACEHOLDER, StepResult
from engine.sched.scheduler import Scheduler


def test_a_row_with_a_grammar_waits_for_its_token() -> None:
    scheduler = Scheduler(num_blocks=20, block_tokens=16, step_tokens=64, max_running=4)
    for name, grammar in (("free", ""), ("formed", '{"regex":"a+"}')):
        params = SamplingParams(max_tokens=5, temperature=0, grammar=grammar)
        scheduler.add(Request(id=name, prompt_ids=[7, 8, 9], params=params))
    first = scheduler.schedule()
    assert first is not None and {chunk.seq_id for chunk in first.chunks} == {"free", "formed"}
    ahead = scheduler.schedule()
    assert ahead is not None
    assert [(chunk.seq_id, chunk.token_ids) for chunk in ahead.chunks] == [("free", (PLACEHOLDER,))]
    scheduler.commit(first, StepResult({"free": (1,), "formed": (2,)}, {}))
    third = scheduler.schedule()
    assert third is not None
    assert {chunk.seq_id: chunk.token_ids for chunk in third.chunks}["formed"] == (2,)
