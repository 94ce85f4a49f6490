"""Several answers and logprobs as the official client's own models read them; each answer is paid, the prompt once."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion

from batchsvc.batches import resume_file, unit_file
from batchsvc.batches.choices import text_choices_of, text_logprobs_of
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.sampling_body import parse_sampling
from batchsvc.batches.unit_file import UnitRow
from batchsvc.money import Rates, line_cost_nanos
from engine.config import Formats, fingerprint
from engine.fake import FakeEngine
from engine.request import Begun, Completion, FinishReason, SpelledLogprob, Usage
from tests.workers.conftest import RATES
from tests.workers.test_translate import claimed
from workers.allowance import most_of
from workers.generated import Growing
from workers.translate import OpenRow, open_rows, to_lines, to_request, to_unfinished

ASKED = {"n": 3, "logprobs": True, "top_logprobs": 2, "seed": 1, "logit_bias": {"7": -100}}


def open_row(max_tokens: int = 6, **asked: Any) -> OpenRow:
    row = UnitRow(
        line_nos=(1, 2),
        custom_ids=("a", "b"),
        prompt_ids=np.arange(8, dtype=np.int32),
        params=parse_sampling(asked),
        planned_cached_tokens=4,
        max_tokens=max_tokens,
    )
    return OpenRow(request_id="unit_a:3:0", row=row, members=((0, 0), (1, 1)))


def completed(row: OpenRow) -> Completion:
    (completion,) = FakeEngine(None).run([to_request(claimed(2), row)])
    return completion


def test_the_official_client_reads_all_choices_and_their_logprobs() -> None:
    row = open_row(**ASKED)
    completion = completed(row)
    name = fingerprint("0123456789abcdef", Formats("int8", "bf16"))
    for line in to_lines(claimed(2), row, completion, fingerprint=name):
        body = orjson.loads(line.line.row)["response"]["body"]
        found = ChatCompletion.model_validate(body, strict=True)
        assert found.system_fingerprint == "fp_0123456789ab_int8_bf16_cpu"
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert [choice.message.content for choice in found.choices] == [answer.text for answer in completion.answers]
        for choice in found.choices:
            assert choice.logprobs is not None and choice.logprobs.content
            assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
            for one in choice.logprobs.content:
                assert bytes(one.bytes or []).decode() == one.token
                assert len(one.top_logprobs) == 2 and math.isfinite(one.logprob)


def test_a_text_completion_has_them_in_its_own_shape() -> None:
    choices = text_choices_of(completed(open_row(**ASKED)).answers)
    body = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices}
    found = TextCompletion.model_validate(body)
    assert len(found.choices) == 3
    for choice in found.choices:
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.text_offset
        assert [choice.text[at] for at in logprobs.text_offset] == [token[0] for token in logprobs.tokens]
        assert logprobs.top_logprobs is not None and all(len(top) == 2 for top in logprobs.top_logprobs)


def test_a_stop_string_that_ended_an_answer_is_named_as_vllm_names_it() -> None:
    whole = completed(open_row(30, n=2, ignore_eos=True, seed=1))
    (stop, other) = (answer.text.split()[3] for answer in whole.answers)
    row = open_row(30, n=2, ignore_eos=True, seed=1, stop=[stop])
    body = orjson.loads(to_lines(claimed(2), row, completed(row))[0].line.row)["response"]["body"]
    first, second = ChatCompletion.model_validate(body, strict=True).choices
    assert (first.finish_reason, first.to_dict()["stop_reason"]) == ("stop", stop)
    assert stop != other and second.to_dict().get("stop_reason") == (stop if second.finish_reason == "stop" else None)
    assert text_choices_of(completed(row).answers)[0]["stop_reason"] == stop
    plain = text_choices_of(completed(open_row(30, n=2, ignore_eos=True, seed=1)).answers)
    assert not any("stop_reason" in choice for choice in plain)


def test_the_prompt_is_billed_once_and_all_output_within_what_was_reserved() -> None:
    row = open_row(n=3, ignore_eos=True, seed=1)
    first, second = to_lines(claimed(2), row, completed(row))
    assert (first.line.input_tokens, first.line.output_tokens) == (8, 18)
    assert (second.line.cached_tokens, second.line.output_tokens) == (8, 18), "the folded line is delivered in full"
    rates = Rates(**RATES)
    assert [first.line.cost_nanos, second.line.cost_nanos] == most_of(rates, row), "these answers are as long as can be"
    assert first.line.cost_nanos == line_cost_nanos(rates, input_tokens=8, cached_tokens=4, output_tokens=18)
    assert row.row.est_tokens(0) == 4 + 3 * 6


def test_what_runs_is_saved_by_answer_with_the_logprobs_that_are_asked_for() -> None:
    row = open_row(n=3, logprobs=True, top_logprobs=2, seed=1)
    engine = FakeEngine(None, step_tokens=4)
    engine.add(to_request(claimed(2), row))
    growing = Growing(5)
    for _ in range(2):
        growing.add(engine.step().tokens_of(row.request_id))
    saved = to_unfinished(row, growing.so_far())
    assert saved is not None and saved.num_tokens == 8 and saved.hit_tokens == 5
    assert [len(answer.token_ids) for answer in saved.answers] == [len(answer.logprobs) for answer in saved.answers]
    data = resume_file.encode([saved])
    back = resume_file.decode(data, hashlib.sha256(data).hexdigest())
    assert back == {1: saved}
    next_row = replace(row, request_id="unit_a:4:0", resumed=back[1])
    (again,) = FakeEngine(None).run([to_request(claimed(2), next_row)])
    assert again.choices == completed(row).choices
    nothing_new = to_unfinished(next_row, None)
    assert nothing_new == saved, "whoever adds nothing saves what it was given"


def test_what_was_saved_without_logprobs_is_of_no_use_where_they_are_asked_for() -> None:
    tokens_alone = {1: Unfinished(line_no=1, answers=(Begun((1, 2)),), hit_tokens=0)}
    for params, is_usable in (({}, True), ({"logprobs": 0}, False)):
        row = replace(open_row().row, params=params, line_nos=(1,), custom_ids=("a",))
        file = unit_file.read(unit_file.write([row]))
        (opened,) = open_rows(claimed(1), file, tokens_alone)
        assert (opened.resumed is not None) == is_usable


def test_a_lone_answer_is_a_list_of_one() -> None:
    ended = Completion(
        request_id="r",
        token_ids=(1,),
        text="x",
        finish_reason=FinishReason.LENGTH,
        usage=Usage(3, 0, 1),
        logprobs=(SpelledLogprob(b"\xff", -1.0),),
    )
    (choice,) = text_choices_of(ended.answers)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["\N{REPLACEMENT CHARACTER}"]


def test_an_offset_counts_characters_not_tokens() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x99\x82", b" b", b"c"]
    found = text_logprobs_of([SpelledLogprob(piece, -1.0) for piece in pieces])
    assert found["text_offset"] == [0, 1, 1, 2, 4], "in 'a🙂 bc'"
