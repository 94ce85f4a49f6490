"""The engine's door and its ends of answers, on the oracle memory with a real tokenizer; at the end the real model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.answer import Answer
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, RequestError
from engine.request import Completion, Expectation, FinishReason, Request, SamplingParams, TokenLogprobs
from engine.sched.plan import Chunk, StepPlan, StepResult
from engine.text import TextModel, load_text
from tests.engine.oracle import EOS, VOCAB, OracleRunner, answer, request


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> TextModel:
    return load_text(tiny_model)


def make_engine(runner: OracleRunner | None = None, text: TextModel | None = None, **settings: object) -> Engine:
    config = {"block_tokens": 4, "step_tokens": 32, "max_running": 8, **settings}
    return Engine(EngineConfig(model="", **config), runner=runner or OracleRunner(4, 64), text=text)


def drain(engine: Engine) -> dict[str, Completion]:
    ended = {}
    while engine.has_work():
        for completion in engine.step().completions:
            ended[completion.request_id] = completion
    return ended


def scripted(engine_text: TextModel, script: Sequence[int], **params: object) -> Completion:
    """The completion of a request whose model says exactly `script`."""

    def say(history: list[int], chunk: Chunk) -> int:
        return script[len(history) - chunk.num_prompt_tokens]

    eos = engine_text.meta.eos_ids
    runner = OracleRunner(4, 64, vocab_size=engine_text.meta.vocab_size, eos_ids=eos, sample=say)
    fields = {"max_tokens": len(script), "temperature": 0.0, **params}
    made = Request(id="r", prompt_ids=(5, 6, 7), params=SamplingParams(**fields))
    (completion,) = make_engine(runner, engine_text).run([made])
    return completion


def test_run_gives_each_request_its_answer_in_the_order_of_the_requests() -> None:
    engine = make_engine()
    requests = [request(f"r{i}", [1 + i % 9] * (1 + i % 13), 1 + i % 7) for i in range(60)]
    completions = list(engine.run(requests))
    assert [c.request_id for c in completions] == [r.id for r in requests]
    for made, completion in zip(requests, completions, strict=True):
        assert (list(completion.token_ids), completion.finish_reason) == answer(made)
        assert completion.usage.prompt_tokens == len(made.prompt_ids)
        assert completion.usage.output_tokens == len(completion.token_ids)
    assert engine.num_unfinished() == 0
    assert not engine.has_work()


def test_usage_tells_the_steps_that_a_request_took_part_in() -> None:
    one = request("one", list(range(1, 11)), 4, ignore_eos=True)  # chunks of 4, 4 and 2 tokens, then 3 more tokens
    (alone,) = make_engine(step_tokens=4).run([one])
    assert alone.usage.steps == 6
    together = list(make_engine(step_tokens=64).run([one, request("two", [1], 30, ignore_eos=True)]))
    assert [completion.usage.steps for completion in together] == [4, 30]


def test_run_may_be_called_again_and_again_and_interleaved() -> None:
    engine = make_engine(max_running=2)
    for _ in range(3):
        assert [c.request_id for c in engine.run(request(f"r{i}", [3, i], 4) for i in range(9))] == [
            f"r{i}" for i in range(9)
        ]
    one = engine.run(request(f"a{i}", [3, i], 4) for i in range(9))
    two = engine.run(request(f"b{i}", [4, i], 4) for i in range(9))
    seen = [next(one).request_id, next(two).request_id]
    seen += [c.request_id for c in one] + [c.request_id for c in two]
    assert seen == ["a0", "b0", *(f"a{i}" for i in range(1, 9)), *(f"b{i}" for i in range(1, 9))]


def test_seam_1_run_filters_and_step_still_gets_what_was_not_for_run() -> None:
    engine = make_engine()
    other = request("other", [8, 8], 2, ignore_eos=True)
    engine.add(other)
    assert [c.request_id for c in engine.run([request("mine", [3, 4, 5], 9)])] == ["mine"]
    assert engine.num_unfinished() == 1, "nobody has got its completion yet"
    output = engine.step()
    assert [c.request_id for c in output.completions] == ["other"]
    assert output.new_tokens == {"other": answer(other)[0]}
    assert not engine.has_work()


def test_seam_1_a_step_reports_new_tokens_by_request() -> None:
    engine = make_engine()
    engine.add(request("a", [3, 4], 5, ignore_eos=True))
    engine.add(request("b", [5, 6], 5, ignore_eos=True))
    streams: dict[str, list[int]] = {"a": [], "b": []}
    steps = 0
    while engine.has_work():
        for name, tokens in engine.step().new_tokens.items():
            streams[name] += tokens
        steps += 1
    assert steps == 5
    assert all(
        streams[name] == answer(request(name, p, 5, ignore_eos=True))[0] for name, p in [("a", [3, 4]), ("b", [5, 6])]
    )


def test_seam_1_add_and_abort_from_other_threads() -> None:
    engine = make_engine(max_running=4)
    ended: dict[str, Completion] = {}
    names = [[f"t{t}.{i}" for i in range(60)] for t in range(4)]

    def work(mine: list[str]) -> None:
        for i, name in enumerate(mine):
            engine.add(request(name, [1 + i % 9, 2], 6, ignore_eos=True))
            if i % 5 == 4:
                engine.abort(name)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in names]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_work():
        for completion in engine.step().completions:
            assert completion.request_id not in ended
            ended[completion.request_id] = completion
    assert ended.keys() == {name for mine in names for name in mine}
    for mine in names:
        for i, name in enumerate(mine):
            expected = answer(request(name, [1 + i % 9, 2], 6, ignore_eos=True))[0]
            completion = ended[name]
            if completion.finish_reason is FinishReason.ABORT:
                assert i % 5 == 4
                expected = expected[: len(completion.token_ids)]
            assert list(completion.token_ids) == expected


def test_seam_2_lanes_and_adapters_reach_scheduler_and_block_key() -> None:
    engine = make_engine(max_running=1)
    for name, lane, adapter in [("late", 1, ""), ("soon", 0, ""), ("tuned", 2, "lora")]:
        made = request(name, [7] * 9, 2, lane=lane)
        engine.add(Request(id=name, prompt_ids=made.prompt_ids, params=made.params, lane=lane, adapter=adapter))
    ended = drain(engine)
    assert list(ended) == ["soon", "late", "tuned"]
    assert [c.usage.hit_tokens for c in ended.values()] == [0, 8, 0], "another adapter's KV is never a hit"


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ((), "invalid_value"),
        ((1,) * 20, "context_length_exceeded"),
        ((1, VOCAB), "invalid_value"),
        ((-1,), "invalid_value"),
    ],
)
def test_a_prompt_that_cannot_run_costs_that_request_alone(prompt: tuple[int, ...], code: str) -> None:
    engine = make_engine(OracleRunner(4, 64, context_tokens=20))
    good = request("good", [3, 4], 5)
    bad, ok = engine.run([request("bad", prompt), good])
    assert (bad.finish_reason, bad.error_code, bad.token_ids, bad.text) == (FinishReason.ERROR, code, (), "")
    assert bad.error_message
    assert bad.error_message.endswith(".")
    assert bad.usage.output_tokens == 0
    assert list(ok.token_ids) == answer(good)[0]


def test_a_prompt_beyond_the_kv_pool_costs_that_request_alone() -> None:
    bad, ok = make_engine(OracleRunner(4, 4)).run([request("bad", [1] * 30), request("good", [3, 4], 5)])
    assert bad.error_code == "kv_capacity_exceeded"
    assert ok.finish_reason is not FinishReason.ERROR


def test_the_context_ends_an_answer_with_length() -> None:
    (completion,) = make_engine(OracleRunner(4, 64, context_tokens=20)).run(
        [request("r", [3] * 17, 50, ignore_eos=True)]
    )
    assert (len(completion.token_ids), completion.finish_reason) == (3, FinishReason.LENGTH)


def test_an_id_is_taken_while_its_request_is_unfinished() -> None:
    engine = make_engine()
    engine.add(request("r", [3], 2))
    with pytest.raises(RequestError, match="unfinished"):
        engine.add(request("r", [4], 2))
    assert len(drain(engine)) == 1
    engine.add(request("r", [4], 2))
    assert len(drain(engine)) == 1


def test_expectations_from_other_threads_keep_what_they_name_and_change_no_answer() -> None:
    engine = make_engine(OracleRunner(4, 8), max_running=1)
    old, new = [1] * 9, [2] * 9
    expectation = Expectation(prompt_ids=old, uses=((8, 1),))
    threads = [threading.Thread(target=engine.expect, args=(f"unit{i}", expectation)) for i in range(8)]
    for thread in threads:
        thread.start()
    requests = [request(f"r{i}", prompt, 1) for i, prompt in enumerate([old, new, [3] * 17])]
    for thread in threads:
        thread.join()
    for made in [*requests, request("again", old, 1)]:
        (completion,) = engine.run([made])
        assert list(completion.token_ids) == answer(made)[0]
    assert completion.usage.hit_tokens == 8
    for i in range(8):
        engine.expect(f"unit{i}", None)
    assert drain(engine) == {}
    assert len(engine.scheduler._expected) == 0


def test_an_abort_ends_a_request_with_what_it_has_and_unknown_ids_are_ignored() -> None:
    engine = make_engine()
    engine.add(request("r", [3], 50, ignore_eos=True))
    engine.add(request("never ran", [4], 50))
    engine.step()
    engine.abort("r")
    engine.abort("nobody")
    ended = drain(engine)
    assert ended["r"].finish_reason is FinishReason.ABORT
    assert len(ended["r"].token_ids) == 1
    engine.add(request("x", [3], 2))
    engine.abort("x")
    assert drain(engine)["x"].token_ids == ()


def test_a_run_that_is_left_early_drops_its_requests() -> None:
    engine = make_engine()
    engine.add(request("other", [8, 8], 40, ignore_eos=True))
    run = engine.run(request(f"r{i}", [3, i], 2 + i, ignore_eos=True) for i in range(6))
    assert next(run).request_id == "r0"
    run.close()
    assert engine.num_unfinished() == 1
    assert list(drain(engine)) == ["other"]
    assert len(list(engine.run(request(f"r{i}", [3, i], 4) for i in range(6)))) == 6


def test_rows_that_are_not_numbers_end_that_request_with_an_error() -> None:
    runner = OracleRunner(4, 64, fail_at={"bad": 4})
    bad, ok = make_engine(runner).run([request("bad", [3, 4], 9, ignore_eos=True), request("good", [5, 6], 5)])
    assert (bad.finish_reason, bad.error_code) == (FinishReason.ERROR, "invalid_logits")
    assert len(bad.token_ids) == 2
    assert list(ok.token_ids) == answer(request("good", [5, 6], 5))[0]


def test_a_runner_that_raises_is_seen_and_its_requests_stay_counted() -> None:
    class Broken(OracleRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            if plan.step == 2:
                raise MemoryError("no memory")
            return super().execute(plan)

    engine = make_engine(Broken(4, 64))
    for i in range(3):
        engine.add(request(f"r{i}", [3, i], 9, ignore_eos=True))
    with pytest.raises(MemoryError):
        drain(engine)
    assert engine.num_unfinished() == 3
    with pytest.raises(EngineError, match="build a new one"):
        engine.step()


def test_a_closed_engine_takes_nothing_more() -> None:
    engine = make_engine()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.add(request("r", [3]))


def test_stats_count_what_was_done() -> None:
    engine = make_engine()
    list(engine.run([request("a", [3] * 9, 4, ignore_eos=True)]))
    list(engine.run([request("b", [3] * 9, 4, ignore_eos=True)]))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.hit_tokens, stats.output_tokens) == (18, 8, 8)
    assert (stats.computed_tokens, stats.preemptions, stats.waiting, stats.running) == (9 + 3 + 1 + 3, 0, 0, 0)
    assert (stats.steps, stats.used_blocks, stats.num_blocks, stats.mean_running) == (8, 0, 64, 1.0)


def test_without_a_prefix_cache_nothing_is_a_hit() -> None:
    engine = make_engine(prefix_cache=False)
    completions = list(engine.run(request(f"r{i}", [3] * 9, 4) for i in range(3)))
    assert [c.usage.hit_tokens for c in completions] == [0, 0, 0]


# ends of answers


def test_eos_and_stop_ids_are_counted_and_are_not_in_the_text(text: TextModel) -> None:
    (eos,) = text.meta.eos_ids
    words = text.tokenizer.encode("The order")
    stopped = scripted(text, [*words, eos, *words])
    assert (stopped.text, stopped.finish_reason, stopped.stopped_by) == ("The order", FinishReason.STOP, None)
    assert stopped.token_ids == (*words, eos)
    by_id = scripted(text, [*words, 40, *words], stop_token_ids=(40,))
    assert (by_id.text, by_id.finish_reason, by_id.usage.output_tokens) == (
        "The order",
        FinishReason.STOP,
        len(words) + 1,
    )
    assert by_id.stopped_by == 40


def test_ignore_eos_goes_on_to_max_tokens(text: TextModel) -> None:
    (eos,) = text.meta.eos_ids
    words = text.tokenizer.encode("The order")
    completion = scripted(text, [*words, eos, *words], ignore_eos=True)
    assert (completion.text, completion.finish_reason) == ("The orderThe order", FinishReason.LENGTH)


def test_nothing_ends_an_answer_before_min_tokens(text: TextModel) -> None:
    (eos,) = text.meta.eos_ids
    letters = [text.tokenizer.encode(letter)[0] for letter in "abcabc"]
    script = [letters[0], eos, *letters[1:], eos]
    completion = scripted(text, script, min_tokens=3, stop=("b",))
    assert (completion.text, completion.finish_reason) == ("abca", FinishReason.STOP)
    assert len(completion.token_ids) == 6


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_a_stop_string_is_cut_wherever_tokens_end(text: TextModel, data: st.DataObject) -> None:
    """The answer is spelled in single bytes and pairs, so that the stop string spans any number of tokens."""
    before, stop = data.draw(st.text("xyé🙂", max_size=6)), data.draw(st.text("abé🙂", min_size=1, max_size=4))
    said = before + stop + data.draw(st.text("abxy", max_size=4))
    pieces, rest = [], said
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces += text.tokenizer.encode(rest[:size])
        rest = rest[size:]
    completion = scripted(text, pieces, stop=(stop,))
    assert completion.text == said[: said.index(stop)]
    assert (completion.finish_reason, completion.stopped_by) == (FinishReason.STOP, stop)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_logprobs_are_those_of_the_tokens_that_begin_in_the_text(text: TextModel, data: st.DataObject) -> None:
    """Whatever lies between: characters of several tokens, and special tokens, which have a name and no text."""
    special = next(token for token in range(text.meta.vocab_size) if not text.tokenizer.token_bytes(token))
    said, stop = data.draw(st.text("xyé🙂", max_size=6)), data.draw(st.sampled_from(["", "ab", "é🙂", "x"]))
    tokens = [token for char in said + stop + "yy" for token in (*text.tokenizer.encode(char), special)]
    params = SamplingParams(max_tokens=99, stop=(stop,) if stop else (), logprobs=0)
    answer = Answer(Request(id="r", prompt_ids=(5,), params=params), text, frozenset())
    begins = []
    for token in tokens:
        begins.append(len(b"".join(map(text.tokenizer.token_bytes, tokens[: len(begins)])).decode(errors="ignore")))
        answer.note(TokenLogprobs(token, -1.0))
        if answer.push(token):
            break
    whole = answer.text()
    shown = answer.logprobs(whole) or ()
    wanted = [text.tokenizer.spelled(t) for t, at in zip(tokens, begins, strict=False) if not stop or at < len(whole)]
    assert [one.piece for one in shown] == wanted


def test_a_held_back_beginning_of_a_stop_string_is_given_out_at_the_end(text: TextModel) -> None:
    completion = scripted(text, text.tokenizer.encode("x END"), stop=("ENDING",))
    assert (completion.text, completion.finish_reason) == ("x END", FinishReason.LENGTH)
    assert completion.stopped_by is None


def test_an_unfinished_character_at_the_end_is_replaced(text: TextModel) -> None:
    first_byte = text.tokenizer.encode("🙂")[0]
    assert scripted(text, [first_byte]).text == "\ufffd"


# the real runner


def test_the_real_runner_gives_the_same_tokens_in_any_pool_and_budget(tiny_model: Path) -> None:
    stem = list(range(20, 52))
    requests = [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(stem[: 8 + 3 * i] + [60 + i] * (i % 3)),
            params=SamplingParams(max_tokens=12, temperature=float(i % 2), seed=i, ignore_eos=True),
        )
        for i in range(8)
    ]

    def run(**settings: object) -> list[tuple[int, ...]]:
        config = EngineConfig(
            model=str(tiny_model), weight_format="float32", kv_format="float32", threads=1, poison=True, **settings
        )
        engine = Engine(config)
        cold = [c.token_ids for c in engine.run(requests)]
        warm = [c.token_ids for c in engine.run(requests)]
        assert cold == warm
        assert engine.stats().hit_tokens > 0
        return cold

    expected = run(num_blocks=64)
    assert run(num_blocks=5, max_running=4) == expected
    assert run(num_blocks=40, block_tokens=3, step_tokens=7) == expected
    assert EOS == 0
