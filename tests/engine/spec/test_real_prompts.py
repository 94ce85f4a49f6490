"""Greedy answers of the default model to 200 prompts of the workloads are the same with drafts of any proposer.

The draft model and the heads are trained here, for so short that they are wrong about as often as right: what they
propose is accepted in part, so both what is kept and what is thrown away is compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine.config import EngineConfig
from engine.distill.heads import HeadsRun
from engine.distill.options import Options
from engine.distill.run import Run
from engine.engine import Engine
from engine.intake import EngineStats
from engine.request import Completion, Request, SamplingParams
from engine.runner import ModelRunner
from engine.spec.choose import drafting
from engine.spec.ngram import NgramProposer
from engine.spec.speculation import Speculation
from engine.text import TextModel, load_text
from tests.engine.spec.test_lossless import assert_same

DATA = Path(__file__).parents[2] / "data"
NUM_PROMPTS = 200
LENGTH = 24  # of answers that are learned from
MOST_DRAFT = 4
STUDENTS = {"draft": "layers:6", "heads": "heads:2"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def asked() -> list[tuple[list[dict[str, str]], int]]:
    """The conversations, with what may be answered at most: a hundred that share a long instruction, and a hundred with
    texts and instructions of their own."""
    instruction = next(row["messages"][0] for row in rows("prompts") if row["source"] == "shared_prefix:0")
    found = [
        ([instruction] * row["source"].startswith("shared_prefix:") + row["messages"], row["max_tokens"])
        for row in rows("workloads")
    ]
    assert len({json.dumps(messages) for messages, _ in found}) == NUM_PROMPTS == len(found)
    return found


class Plain(NamedTuple):
    """What is said without drafts."""

    config: EngineConfig
    runner: ModelRunner
    text: TextModel
    requests: list[Request]
    answers: Sequence[Completion]
    steps: int


@pytest.fixture(scope="module")
def plain(default_model: Path) -> Plain:
    text = load_text(default_model)
    found = asked()
    prompts = text.encode_prompts([text.render(messages) for messages, _ in found])
    requests = [
        Request(id=str(i), prompt_ids=ids, params=SamplingParams(max_tokens=most, temperature=0))
        for i, (ids, (_, most)) in enumerate(zip(prompts, found, strict=True))
    ]
    config = EngineConfig(
        model=str(default_model), weight_format="int8", kv_format="int8", num_blocks=3000, max_running=8,
        reproducible=True, spec="off",
    )  # fmt: skip
    runner = ModelRunner(config)
    engine = Engine(config, runner=runner, text=text)
    answers = list(engine.run(requests))
    assert len(answers) == NUM_PROMPTS
    return Plain(config, runner, text, requests, answers, engine.stats().steps)


@pytest.fixture(scope="module")
def trained(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A draft model and heads of few lessons, by their kind."""
    folder = tmp_path_factory.mktemp("trained")
    lines = [
        {"custom_id": str(i), "body": {"messages": messages, "max_tokens": LENGTH, "temperature": 0}}
        for i, (messages, _) in enumerate(asked()[::17])
    ]
    data = folder / "lines.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for kind, student in STUDENTS.items():
        sizes: dict[str, int] = {"steps": 12, "pack_tokens": 512} if kind == "draft" else {"steps": 60}
        options = Options(
            teacher=str(default_model), student=student, data=data, target=folder / kind, draft_vocab=2048,
            lr=1e-3, eval_lines=1, licence="Apache-2.0", **sizes,
        )  # fmt: skip
        (Run if kind == "draft" else HeadsRun)(options, lambda line: None, lambda: False).run()
    return {kind: str(folder / kind) for kind in STUDENTS}


def assert_same_answers(plain: Plain, speculation: Speculation | None, config: EngineConfig) -> EngineStats:
    engine = Engine(config, runner=plain.runner, text=plain.text, speculation=speculation)
    assert_same(list(engine.run(plain.requests)), plain.answers)
    stats = engine.stats()
    print(f"{stats.drafted_tokens} drafted, {stats.accepted_tokens} accepted, {stats.steps} of {plain.steps} steps")
    return stats


def assert_fewer_steps(plain: Plain, speculation: Speculation, config: EngineConfig) -> None:
    stats = assert_same_answers(plain, speculation, config)
    assert stats.accepted_tokens > 0, "some are accepted"
    assert stats.drafted_tokens > stats.accepted_tokens, "some are rejected"
    assert stats.steps < plain.steps


def test_greedy_answers_to_real_prompts_with_the_look_up(plain: Plain) -> None:
    assert_fewer_steps(plain, Speculation(NgramProposer(), is_gated=False), plain.config)


@pytest.mark.parametrize("kind", STUDENTS)
def test_greedy_answers_to_real_prompts_with_what_was_trained(plain: Plain, trained: dict[str, str], kind: str) -> None:
    config = replace(plain.config, spec=kind, draft=trained[kind])
    proposer = drafting(config, plain.runner, plain.text, print, reads_all=True)
    assert_fewer_steps(plain, Speculation(proposer, is_gated=False, most_draft=MOST_DRAFT), config)


def test_greedy_answers_to_real_prompts_as_the_gate_has_it(plain: Plain) -> None:
    """It decides by measured times, so how much is drafted on a busy machine is up to that."""
    assert_same_answers(plain, None, replace(plain.config, spec="auto"))
