"""Input 17 on an engine whose numbers aren't finite."""

from __future__ import annotations

import math
from dataclasses import replace

from engine.fake import FakeEngine
from engine.faults import Faults
from engine.request import SpelledLogprob, StepOutput
from tests.batchsvc.batches.planned import jsonl, line
from tests.inputs.service import Service

COMPLETIONS = "/v1/completions"


class Unsound(FakeEngine):
    """Its logprobs aren't numbers, as those of a broken kernel, or of tokens that can't come."""

    def step(self) -> StepOutput:
        output = super().step()
        bad = (SpelledLogprob(b"x", -math.inf, ((b"x", -math.inf), (b"y", math.nan), (b"z", -0.5))),)
        changed = [replace(done, logprobs=bad if done.logprobs else None) for done in output.completions]
        return replace(output, completions=changed)


def test_input_17_logprobs_that_are_no_numbers(service: Service) -> None:
    """What is written is JSON, whatever an engine says; a line whose logits are no numbers says so, others run."""
    engine = Unsound(service.planned.text, faults=Faults.parse("nan:poison"))
    asked = {"logprobs": True, "top_logprobs": 3}
    with service.working(engine, "unsound"):
        ended = service.run(jsonl(line("a", **asked), line("b", "poison", **asked), line("c", service_tier="auto")))
        (token,) = ended.answers[1]["choices"][0]["logprobs"]["content"]
        assert token["logprob"] == -9999.0
        assert [top["logprob"] for top in token["top_logprobs"]] == [-9999.0, None, -0.5]
        assert ended.answers[3]["choices"][0]["logprobs"] is None
        (flag,) = ended.output[1]["warnings"]
        assert (flag["code"], flag["param"]) == ("logprobs_not_finite", "logprobs") and "null" in flag["message"]
        assert "warnings" not in ended.output[3], "only where something is to be said"
        assert ended.answers[3]["service_tier"] == "default" and "service_tier" not in ended.answers[1]
        (broken,) = ended.errors.values()
        assert broken["response"]["status_code"] == 500
        assert broken["response"]["body"]["error"]["code"] == "invalid_logits"
        old = {"custom_id": "old", "method": "POST", "url": COMPLETIONS}
        old |= {"body": {"model": "tiny", "prompt": "a", "logprobs": 3, "max_tokens": 4}}
        completed = service.run(jsonl(old), endpoint=COMPLETIONS)
        found = completed.answers[1]["choices"][0]["logprobs"]
        assert [one["code"] for one in completed.output[1]["warnings"]] == ["logprobs_not_finite"]
        assert found["token_logprobs"] == [-9999.0]
        assert found["top_logprobs"] == [{"z": -0.5, "y": None, "x": -9999.0}]
