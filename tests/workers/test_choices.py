"""Several answers and logprobs as the official client's own models read them; each answer is paid, the prompt once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion

from batchsvc.batches.sampling_body import parse_sampling
from batchsvc.batches.unit_file import UnitRow
from batchsvc.money import Rates, line_cost_nanos
from engine.config import Formats, fingerprint
from engine.fake import FakeEngine
from engine.request import Completion, FinishReason, SpelledLogprob, Usage
from tests.workers.conftest import RATES
from tests.workers.test_translate import claimed
from workers.allowance import most_of
from workers.choices import text_choices_of
from workers.pump import Generated
from workers.translate import OpenRow, to_lines, to_request, to_unfinished

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


def test_the_prompt_is_billed_once_and_all_output_within_what_was_reserved() -> None:
    row = open_row(n=3, ignore_eos=True, seed=1)
    first, second = to_lines(claimed(2), row, completed(row))
    assert (first.line.input_tokens, first.line.output_tokens) == (8, 18)
    assert (second.line.cached_tokens, second.line.output_tokens) == (8, 18), "the folded line is delivered in full"
    rates = Rates(**RATES)
    assert [first.line.cost_nanos, second.line.cost_nanos] == most_of(rates, row), "these answers are as long as can be"
    assert first.line.cost_nanos == line_cost_nanos(rates, input_tokens=8, cached_tokens=4, output_tokens=18)
    assert row.row.est_tokens(0) == 4 + 3 * 6


def test_such_rows_begin_anew_after_a_kill_and_others_go_on() -> None:
    generated = Generated([1, 2, 3], 0)
    assert to_unfinished(open_row(n=2), generated) is None
    assert to_unfinished(open_row(logprobs=True), generated) is None
    plain = to_unfinished(open_row(min_p=0.1, frequency_penalty=1), generated)
    assert plain is not None and plain.token_ids == (1, 2, 3)


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
