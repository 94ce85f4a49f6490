"""Answers of the real engine have the form they must have, and others' forms change no token of theirs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Completion, FinishReason, Request, SamplingParams
from engine.sched.plan import StepPlan, StepResult
from engine.structure import forms
from engine.structure.grammar import spec_of
from engine.text import load_text
from tests.schemas import random_schema

PROMPT = list(range(20, 49))


def make_engine(model: Path, **changes: Any) -> Engine:
    made = {
        "weight_format": "float32",
        "kv_format": "float32",
        "num_blocks": 400,
        "poison": True,
        "threads": 1,
        **changes,
    }
    return Engine(EngineConfig(model=str(model), **made))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model)


def asking(name: str, kind: str, value: Any, **changes: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "seed": 5, **changes})
    return Request(id=name, prompt_ids=PROMPT, params=replace(params, grammar=spec_of(kind, value)), salt=name)


def follows(completion: Completion, schema: dict[str, Any]) -> bool:
    """Whether a finished answer parses and validates; one cut short needs only to say so."""
    if completion.finish_reason is FinishReason.LENGTH:
        return True
    assert completion.finish_reason is FinishReason.STOP, completion.error_message
    value = json.loads(completion.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    return True


def run_schemas(engine: Engine, seeds: Iterable[int]) -> list[Completion]:
    requests = [
        asking(f"schema {seed}", "json", random_schema(seed), seed=seed, temperature=(0.0, 0.7, 1.5)[seed % 3])
        for seed in seeds
    ]
    found = list(engine.run(requests))
    assert len(found) == len(requests)
    return found


def num_whole(found: Sequence[Completion]) -> int:
    """Answers that end by themselves: those that are cut prove little."""
    return sum(completion.finish_reason is FinishReason.STOP for completion in found)


def test_random_schemas_are_followed_or_the_answer_says_length(engine: Engine) -> None:
    found = run_schemas(engine, range(24))
    assert all(follows(completion, random_schema(seed)) for seed, completion in enumerate(found))
    assert num_whole(found) >= len(found) / 4


@pytest.mark.slow
def test_five_hundred_random_schemas_on_the_real_model(default_model: Path) -> None:
    engine = Engine(EngineConfig(model=str(default_model), num_blocks=4000))
    found = run_schemas(engine, range(500))
    assert all(follows(completion, random_schema(seed)) for seed, completion in enumerate(found))
    assert num_whole(found) >= len(found) / 4


def test_company_of_other_forms_changes_no_token(tiny_model: Path, engine: Engine) -> None:
    """48 mixed forms at once, in a pool so small that some are preempted, against each alone."""
    kinds = [("regex", "[a-z]{3,30}"), ("choice", ["one", "two and a half"]), ("grammar", 'root ::= "x" | "y" root')]
    requests = [
        asking(f"{n}", *(("json", random_schema(n)) if n % 4 else kinds[n % 3]), seed=n, max_tokens=40)
        for n in range(48)
    ]
    free = [replace(r, id=f"free {r.id}", params=replace(r.params, grammar="")) for r in requests[:16]]
    crowded = make_engine(tiny_model, num_blocks=80, max_running=40)
    together = list(crowded.run([*requests, *free]))
    assert crowded.stats().preemptions > 0
    alone = [next(engine.run([request])) for request in [*requests[::4], *free[::4]]]
    assert [c.token_ids for c in [*together[:48:4], *together[48::4]]] == [c.token_ids for c in alone]


def test_a_cut_answer_is_resumed_in_its_form(engine: Engine) -> None:
    whole = next(engine.run([asking("whole", "json", random_schema(1), seed=1)]))
    for cut in (1, 5, len(whole.token_ids) - 1, len(whole.token_ids)):
        request = replace(asking(f"cut {cut}", "json", random_schema(1), seed=1), resume_ids=whole.token_ids[:cut])
        again = next(engine.run([request]))
        assert (again.token_ids, again.text, again.finish_reason) == (whole.token_ids, whole.text, whole.finish_reason)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_choice_is_one_of_its_texts_and_ends_at_once(engine: Engine, temperature: float) -> None:
    texts = ["ja", "nein", "weiß nicht 🙂"]
    answer = next(engine.run([asking("choice", "choice", texts, temperature=temperature)]))
    assert answer.text in texts and answer.finish_reason is FinishReason.STOP


def test_min_tokens_delay_an_end_that_the_form_allows_and_never_break_it(engine: Engine) -> None:
    long = next(engine.run([asking("long", "regex", "a+", min_tokens=20, max_tokens=30)]))
    assert len(long.token_ids) > 20 and set(long.text) == {"a"}
    short = next(engine.run([asking("short", "choice", ["a"], min_tokens=20, max_tokens=30)]))
    assert short.text == "a" and short.finish_reason is FinishReason.STOP
    endless = next(engine.run([asking("endless", "regex", "a+", ignore_eos=True, max_tokens=30)]))
    assert len(endless.token_ids) == 30 and set(endless.text) == {"a"}


def test_a_stop_string_still_ends_an_answer(engine: Engine) -> None:
    answer = next(engine.run([asking("stop", "regex", "aaab?a{20}", stop=("aaaaa",))]))
    assert answer.finish_reason is FinishReason.STOP and "aaaaa" not in answer.text


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"not": {}}, "not"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "no answer"),
    ],
)
def test_a_form_that_can_not_be_followed_costs_its_line_only(engine: Engine, schema: dict[str, Any], says: str) -> None:
    bad, good = engine.run([asking("bad", "json", schema), asking("good", "choice", ["fine"])])
    assert (bad.finish_reason, bad.error_code) == (FinishReason.ERROR, forms.CODE)
    assert says in (bad.error_message or "")
    assert good.text == "fine"


@pytest.mark.parametrize(
    "regex",
    [
        "(x+x+)+y",
        "(((a{1,1000}){1,1000}){1,1000}b?){1,1000}",
        "(a|aa|aaa)*b" * 200,
        r"(\w|\d|\pL){1,5000}!",
        ".*.*.*x.*y",
    ],
)
def test_a_hostile_regex_ends_soon_one_way_or_the_other(engine: Engine, regex: str) -> None:
    hostile, good = engine.run([asking("hostile", "regex", regex, max_tokens=6), asking("good", "choice", ["fine"])])
    assert hostile.finish_reason in (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR)
    assert hostile.error_code in (None, forms.CODE)
    assert good.text == "fine"


def test_a_resumed_answer_that_breaks_its_form_costs_its_line_only(engine: Engine) -> None:
    broken = replace(asking("broken", "choice", ["yes"]), resume_ids=(60, 61, 62))
    good = asking("good", "choice", ["fine"])
    found = list(engine.run([broken, good]))
    assert (found[0].finish_reason, found[0].error_code) == (FinishReason.ERROR, forms.CODE)
    assert found[1].text == "fine"


def test_a_grammar_that_failed_is_the_reason_whatever_was_made_of_its_mask(tiny_model: Path) -> None:
    text = load_text(tiny_model)
    made = forms.Forms(text, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)
    matcher = made.start(asking("r", "choice", ["yes"]))
    assert matcher is not None
    matcher.push(60)
    plan = StepPlan(step=0, chunks=(), masks={"r": np.zeros(1, np.int32)})
    found = made.follow(plan, StepResult({}, {"r": "The output is not a number."}))
    assert "form" in found.failed["r"] and found.codes == {"r": forms.CODE}
