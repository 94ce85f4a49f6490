"""The sequence's counts: progress, hits and unread tokens never mix."""

from __future__ import annotations

import pytest

from engine.cache.sequence import PLACEHOLDER, Sequence, SequenceState
from engine.request import FinishReason
from tests.engine.oracle import request


def started(prompt: list[int], hit_tokens: int = 0, max_tokens: int = 4) -> Sequence:
    seq = Sequence(request("r", prompt), rank=1, max_outputs=max_tokens)
    seq.admit(hit_tokens)
    return seq


def test_a_chunk_that_reaches_the_end_samples_and_leaves_a_placeholder() -> None:
    seq = started([5, 6, 7])
    assert not seq.advance(2)
    assert seq.advance(1)
    assert seq.tokens == [5, 6, 7, PLACEHOLDER]
    assert (seq.num_pending, seq.num_known, seq.num_unread) == (1, 3, 1)


def test_placeholders_are_read_in_the_order_they_were_sampled() -> None:
    seq = started([5])
    for _ in range(3):
        assert seq.advance(1)
    for token in (8, 9):
        seq.read(token)
    assert seq.tokens == [5, 8, 9, PLACEHOLDER]
    assert seq.output_ids == [8, 9]


def test_nothing_is_pending_once_the_last_token_that_may_be_sampled_was() -> None:
    seq = started([5], max_tokens=2)
    seq.advance(1)
    assert seq.num_pending == 1
    seq.advance(1)
    assert seq.num_pending == 0


def test_computed_tokens_never_pass_the_tokens() -> None:
    with pytest.raises(AssertionError, match="beyond"):
        started([5, 6]).advance(3)


def test_the_last_token_is_never_a_hit() -> None:
    with pytest.raises(AssertionError, match="last token"):
        started([5, 6], hit_tokens=2)


def test_hit_tokens_are_frozen_at_the_first_admission() -> None:
    seq = started([5, 6, 7, 8], hit_tokens=2)
    seq.advance(2)
    seq.read(9)
    seq.rewind()
    assert (seq.state, seq.computed_tokens, seq.num_preemptions) == (SequenceState.WAITING, 0, 1)
    seq.admit(4)
    assert (seq.hit_tokens, seq.computed_tokens) == (2, 4)


def test_an_ended_sequence_drops_what_was_never_read() -> None:
    seq = started([5])
    seq.advance(1)
    seq.read(9)
    seq.advance(1)
    seq.finish(FinishReason.ABORT)
    assert seq.output_ids == [9]
    assert seq.tokens == [5, 9]
