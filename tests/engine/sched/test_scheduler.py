"""The scheduler's promises, each shown on the oracle memory: right tokens, no leak, no stall."""

from __future__ import annotations

import pytest

from engine.request import FinishReason
from engine.sched.plan import PLACEHOLDER
from tests.engine.oracle import EOS, answer, request
from tests.engine.sched.harness import Harness

STEM = [1 + i % 7 for i in range(13)]


def mixed(count: int = 12, **fields: object) -> list:
    """Requests that share stems of different depth, of all lengths around block boundaries."""
    prompts = [STEM[: 3 + i % 11] + [20 + i % 3] * (i % 6) for i in range(count)]
    return [request(f"r{i}", prompt, 3 + i % 9, **fields) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("step_tokens", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_every_token_budget_gives_the_same_answers(step_tokens: int, prefix_cache: bool) -> None:
    harness = Harness(step_tokens=step_tokens, prefix_cache=prefix_cache)
    harness.add(*mixed())
    harness.run()
    harness.assert_answers()


@pytest.mark.parametrize("num_blocks", [6, 7, 9, 14])
def test_tiny_pools_give_the_same_answers(num_blocks: int) -> None:
    harness = Harness(num_blocks=num_blocks)
    harness.add(*mixed())
    harness.run()
    harness.assert_answers()


@pytest.mark.parametrize("length", range(1, 14))
def test_cold_warm_and_partly_warm_runs_are_equal_at_every_block_boundary(length: int) -> None:
    prompt = STEM[:length]
    warm = Harness()
    warm.add(request("cold", prompt))
    warm.run()
    warm.add(request("warm", prompt))
    warm.run()
    warm.assert_answers()
    assert warm.finished["cold"].hit_tokens == 0
    assert warm.finished["warm"].hit_tokens == (length - 1 if length % 4 == 0 else length - length % 4)
    for cached in range(1, length):
        partly = Harness()
        partly.add(request("first", [*prompt[:cached], 30]))
        partly.run()
        partly.add(request("second", prompt))
        partly.run()
        partly.assert_answers()
        assert partly.finished["second"].hit_tokens == cached - cached % 4


def test_a_request_preempted_at_any_step_gives_the_same_tokens() -> None:
    victim = request("victim", STEM, 12, ignore_eos=True)
    for at in range(16):
        for others in ([], mixed(4)):
            harness = Harness(step_tokens=6)
            harness.add(victim, *others)
            harness.run(on_step=lambda step, at=at, harness=harness: step == at and harness.scheduler.preempt("victim"))
            harness.assert_answers()
            assert harness.finished["victim"].hit_tokens == 0, "frozen at first admission"


def test_a_preempted_request_goes_on_from_what_is_still_cached() -> None:
    harness = Harness()
    harness.add(request("r", STEM, 8, ignore_eos=True))
    for _ in range(3):
        harness.launch()
        harness.commit()
    harness.scheduler.preempt("r")
    harness.check()
    plan = harness.launch()
    assert plan is not None
    assert plan.chunks[0].start == 12, "of 13 + 2 computed tokens three full blocks were found again"
    harness.commit()
    harness.run()
    harness.assert_answers()


def test_preemption_wastes_little_when_answers_are_longer_than_expected() -> None:
    """64 requests, a pool for a third of them: memory forces preemptions, but far less work is lost than done."""
    harness = Harness(num_blocks=120, max_running=64, step_tokens=256)
    requests = [request(f"r{i}", [*STEM, i % 40, 1 + i // 40], 40, min_tokens=38) for i in range(64)]
    harness.add(*requests)
    harness.run()
    harness.assert_answers()
    counters = harness.scheduler.counters
    assert counters.recomputed_tokens <= 0.02 * counters.computed_tokens
    assert counters.chunks / counters.steps > 8, "the pool is used"


def test_every_computed_token_is_a_miss_or_a_recomputation() -> None:
    """Work = prompt and output positions, less hits, less the last token of each answer, plus what was lost."""
    harness = Harness(num_blocks=9)
    harness.add(*mixed(20))
    harness.run(on_step=lambda step: step % 5 == 0 and harness.scheduler.preempt(f"r{step % 20}"))
    counters = harness.scheduler.counters
    needed = counters.prompt_tokens + counters.output_tokens - len(harness.finished) - counters.hit_tokens
    assert counters.computed_tokens == needed + counters.recomputed_tokens
    assert counters.preemptions > 0


def test_a_leader_computes_a_shared_prefix_and_its_followers_hit_it() -> None:
    harness = Harness(step_tokens=10_000, block_tokens=4)
    harness.add(*(request(f"r{i}", [*STEM[:12], 20 + i], 4, ignore_eos=True) for i in range(10)))
    first = harness.launch()
    assert first is not None
    assert [chunk.seq_id for chunk in first.chunks] == ["r0"]
    harness.commit()
    second = harness.launch()
    assert second is not None
    assert len(second.chunks) == 10
    harness.commit()
    harness.run()
    harness.assert_answers()
    assert harness.scheduler.counters.hit_tokens == 9 * 12
    assert harness.scheduler.counters.computed_tokens == 13 + 9 * 1 + 10 * 3


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_followers_go_on_when_their_leader_goes_away(end: str) -> None:
    harness = Harness(step_tokens=4)
    harness.add(*(request(f"r{i}", [*STEM[:12], 20 + i], 4) for i in range(5)))
    harness.launch()
    harness.commit()
    getattr(harness.scheduler, end)("r0")
    harness.run()
    harness.assert_answers([f"r{i}" for i in range(1, 5)])


@pytest.mark.parametrize("step_tokens", [3, 64])
def test_decodes_come_first_and_prefill_chunks_fill_the_step(step_tokens: int) -> None:
    harness = Harness(step_tokens=step_tokens)
    harness.add(request("decode", [9], 20, ignore_eos=True))
    harness.launch()
    harness.commit()
    harness.add(request("prefill", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 2))
    plan = harness.launch()
    assert plan is not None
    assert [(chunk.seq_id, len(chunk.token_ids)) for chunk in plan.chunks] == [
        ("decode", 1),
        ("prefill", min(step_tokens - 1, 11)),
    ]
    harness.commit()
    harness.run()
    harness.assert_answers()


def test_what_can_never_fit_ends_with_an_error_and_the_rest_goes_on() -> None:
    harness = Harness(num_blocks=4)
    harness.add(request("long", [1] * 17), request("grows", [2] * 6, 40, min_tokens=30), request("fits", [3] * 6, 9))
    harness.add(request("known", [1] * 6, 12, ignore_eos=True))
    harness.run()
    for name in ("long", "grows", "known"):
        seq = harness.finished[name]
        assert (seq.finish_reason, seq.error_code) == (FinishReason.ERROR, "kv_capacity_exceeded")
        assert seq.error_message
        assert "16" in seq.error_message
        assert seq.output_ids == [], "the prompt told, nothing was computed"
    harness.assert_answers(["fits"])


def test_a_request_that_outgrows_the_pool_alone_ends_with_an_error() -> None:
    """Nothing tells beforehand: it might have stopped. A seed is picked for which it doesn't."""
    seed = next(s for s in range(99) if len(answer(request("x", [2] * 6, 40, seed=s))[0]) > 30)
    harness = Harness(num_blocks=4)
    harness.add(request("grows", [2] * 6, 40, seed=seed), request("fits", [3] * 6, 4))
    harness.run()
    seq = harness.finished["grows"]
    assert seq.error_code == "kv_capacity_exceeded"
    assert seq.output_ids == answer(harness.requests["grows"])[0][:11], "16 positions hold 6 + 10, one more is sampled"
    harness.assert_answers(["fits"])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_that_ends_with_the_last_slot_of_the_pool_is_no_error_at_any_depth(depth: int) -> None:
    """16 positions hold 6 + 10 tokens, the eleventh is EOS: it may be unread when the next step finds no block."""
    made = (request("r", [2] * 6, 40, seed=seed) for seed in range(9_999))
    harness = Harness(num_blocks=4)
    harness.add(next(m for m in made if answer(m)[1] is FinishReason.STOP and len(answer(m)[0]) == 11))
    harness.run(depth=depth)
    harness.assert_answers()


def test_a_large_request_waits_while_small_ones_pass_but_not_for_ever() -> None:
    harness = Harness(num_blocks=16, max_running=8, step_tokens=64)
    harness.add(request("first", [9] * 20, 8, ignore_eos=True))
    harness.launch()
    harness.commit()
    harness.add(request("large", [1 + i % 30 for i in range(50)], 6, ignore_eos=True))
    lengths = [3 + i % 5 for i in range(400)]  # uneven, so that the pool is never empty by chance
    harness.add(*(request(f"small{i}", [2 + i % 40, 3, i // 40], n, ignore_eos=True) for i, n in enumerate(lengths)))
    harness.run()
    harness.assert_answers()
    order = list(harness.finished)
    assert order.index("large") > 8, "small ones passed"
    assert order.index("large") < 300, "and then it had its turn"


def test_lower_lanes_run_first_and_are_preempted_last() -> None:
    harness = Harness(max_running=1)
    harness.add(*(request(f"l{lane}.{i}", [9, i], 3, lane=lane) for i in range(3) for lane in (2, 0, 1)))
    harness.run()
    assert [name[:2] for name in harness.finished] == ["l0"] * 3 + ["l1"] * 3 + ["l2"] * 3
    harness = Harness(num_blocks=5)
    harness.add(request("later", [1] * 4, 12, lane=1, min_tokens=11))
    harness.launch()
    harness.commit()
    harness.add(request("sooner", [2] * 4, 12, lane=0, min_tokens=11))
    harness.run()
    harness.assert_answers()
    assert harness.finished["sooner"].num_preemptions == 0


def test_requests_of_one_token_need_no_decode_slot_and_no_room_to_grow() -> None:
    harness = Harness(num_blocks=12, max_running=2, step_tokens=64)
    harness.add(*(request(f"long{i}", [9, i], 12, ignore_eos=True) for i in range(2)))
    harness.launch()
    harness.commit()
    harness.add(*(request(f"score{i}", [2 + i, 3, 4], 1) for i in range(5)), request("later", [8, 8], 4))
    plan = harness.launch()
    assert plan is not None
    assert [c.seq_id for c in plan.chunks] == ["long0", "long1", *(f"score{i}" for i in range(5))]
    assert all(len(c.block_ids) == 1 for c in plan.chunks)
    harness.commit()
    assert harness.scheduler.num_running == 2, "the third that decodes waits for a slot"
    harness.run()
    harness.assert_answers()
    assert harness.scheduler.counters.preemptions == 0


def test_salts_and_adapters_share_no_blocks() -> None:
    """Paired: the same prompt in one project does share, so the test can fail."""
    harness = Harness(num_blocks=128, step_tokens=10_000)
    names = [("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")]
    harness.add(*(request(name, STEM, 6, salt=salt) for name, salt in names))
    harness.run()
    harness.assert_answers()
    together = 0
    for plan in harness.plans:
        tables = {chunk.seq_id: set(chunk.block_ids) for chunk in plan.chunks}
        a = [tables[name] for name in ("a1", "a2") if name in tables]
        b = [tables[name] for name in ("b1", "b2") if name in tables]
        assert not set().union(*a) & set().union(*b)
        together += any(len(pair) == 2 and len(pair[0] & pair[1]) >= 3 for pair in (a, b))
    assert together > 0
    assert [harness.finished[name].hit_tokens for name, _ in names] == [0, 0, 12, 12]


def test_answers_are_right_when_all_block_keys_collide() -> None:
    harness = Harness(num_blocks=20, hash_bytes=lambda _data: b"same")
    harness.add(*mixed(16), *(request(f"s{i}", STEM[: 4 + i], 5, salt="other") for i in range(8)))
    harness.run()
    harness.assert_answers()
    assert harness.scheduler.counters.hit_tokens > 0


def test_hits_survive_churn_and_are_never_stale() -> None:
    harness = Harness(num_blocks=12)
    for round_no in range(12):
        harness.add(request(f"canary{round_no}", STEM, 4), request(f"churn{round_no}", [round_no + 8] * 30, 4))
        harness.run()
    harness.assert_answers()


def test_cached_blocks_that_waiting_requests_need_outlive_the_others() -> None:
    """Eviction by plan: `old` was used longest ago, but a waiting request needs it."""
    harness = Harness(num_blocks=8, max_running=1)
    harness.add(request("old", [1] * 9, 2), request("new", [2] * 9, 2))
    harness.add(request("filler", [3] * 17, 2), request("again", [1] * 9, 2))
    harness.run()
    harness.assert_answers()
    assert harness.finished["again"].hit_tokens == 8


def test_next_use_can_be_told_from_outside() -> None:
    needed: dict[bytes, float] = {}
    harness = Harness(num_blocks=8, max_running=1, next_use=lambda key: needed.get(key, float("inf")))
    seq = harness.scheduler.add(request("keep", [1] * 9, 2))
    needed.update(dict.fromkeys(seq.block_keys, 5.0))
    harness.requests["keep"] = seq.request
    harness.run()
    harness.add(request("new", [2] * 9, 2), request("filler", [3] * 17, 2))
    harness.run()
    harness.add(request("again", [1] * 9, 2), request("new again", [2] * 9, 2))
    harness.run()
    assert [harness.finished[name].hit_tokens for name in ("again", "new again")] == [8, 0]


def test_a_fork_shares_the_prompt_and_answers_on_its_own() -> None:
    for length in range(1, 10):
        harness = Harness()
        parent = request("parent", STEM[:length], 8, ignore_eos=True)
        harness.add(parent)
        for _ in range(3):
            harness.launch()
            harness.commit()
        for seed in (1, 2, 3):
            child = request(f"child{seed}", STEM[:length], 8, seed=seed, ignore_eos=True)
            harness.requests[child.id] = child
            harness.scheduler.fork("parent", child)
            harness.check()
        harness.run()
        harness.assert_answers()
        assert any(plan.copies for plan in harness.plans) == (length % 4 != 1), "a partial block was shared"
        assert [harness.finished[f"child{s}"].hit_tokens for s in (1, 2, 3)] == [length - 1] * 3


def test_a_fork_without_a_parent_to_share_with_is_an_ordinary_request() -> None:
    harness = Harness()
    child = harness.requests["child"] = request("child", STEM)
    harness.scheduler.fork("nobody", child)
    harness.run()
    harness.assert_answers()


def test_a_row_without_numbers_ends_that_request_alone() -> None:
    harness = Harness()
    harness.add(*mixed(6, ignore_eos=True))
    prompt_tokens = harness.requests["r3"].prompt_ids
    harness.runner.fail_at["r3"] = len(prompt_tokens) + 2
    harness.run(depth=2)
    seq = harness.finished["r3"]
    assert (seq.finish_reason, seq.error_code) == (FinishReason.ERROR, "invalid_logits")
    assert seq.output_ids == answer(harness.requests["r3"])[0][:2]
    harness.assert_answers(name for name in harness.requests if name != "r3")


def test_an_aborted_request_keeps_its_tokens_and_frees_its_blocks() -> None:
    harness = Harness()
    harness.add(request("gone", STEM, 20, ignore_eos=True), request("stays", STEM, 6))
    for _ in range(5):
        harness.launch()
        harness.commit()
    assert harness.scheduler.abort("gone") is not None
    assert harness.scheduler.abort("gone") is None
    harness.run()
    assert harness.finished["gone"].finish_reason is FinishReason.ABORT
    expected = answer(harness.requests["gone"])[0]
    got = harness.finished["gone"].output_ids
    assert got
    assert got == expected[: len(got)]
    harness.assert_answers(["stays"])


def test_an_id_may_come_back_while_its_old_step_is_in_flight() -> None:
    harness = Harness()
    harness.add(request("r", [5, 6, 7], 6, ignore_eos=True))
    harness.launch()
    harness.scheduler.abort("r")
    old = harness.scheduler.take_finished()
    assert [seq.output_ids for seq in old] == [[]]
    harness.add(request("r", [8, 9], 6, ignore_eos=True))
    harness.run(depth=2)
    harness.assert_answers()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_seam_4_steps_scheduled_before_the_last_commit_give_the_same_answers(depth: int, num_blocks: int) -> None:
    harness = Harness(num_blocks=num_blocks)
    harness.add(*mixed(16))
    harness.run(depth=depth)
    harness.assert_answers()
    placeholders = any(-1 in chunk.token_ids for plan in harness.plans for chunk in plan.chunks)
    assert placeholders == (depth > 1)


def test_seam_4_a_placeholder_is_computed_right_after_the_step_that_samples_it_or_once_it_was_read() -> None:
    """The runner knows its last step only. Here a more urgent fork takes the step in between."""
    harness = Harness(step_tokens=1)
    harness.add(request("parent", [5], 6, lane=1, ignore_eos=True))
    harness.launch()
    harness.commit()
    harness.launch()
    child = harness.requests["child"] = request("child", [5], 1, lane=0, ignore_eos=True)
    harness.scheduler.fork("parent", child)
    plan = harness.launch()
    assert plan is not None
    assert [chunk.seq_id for chunk in plan.chunks] == ["child"]
    assert harness.launch() is None, "the parent's token is neither read nor the runner's last"
    harness.commit()
    harness.commit()
    harness.run()
    harness.assert_answers()


def test_seam_4_blocks_enter_the_index_at_commit_only() -> None:
    harness = Harness(step_tokens=64)
    harness.add(request("r", STEM, 4))
    harness.launch()
    harness.add(request("same", STEM, 4))
    plan = harness.launch()
    assert plan is not None
    assert [chunk.seq_id for chunk in plan.chunks] == ["r"], "the follower waits for the commit"
    harness.commit()
    harness.run()
    assert harness.finished["same"].hit_tokens == 12


def test_seam_3_a_plan_is_plain_data_that_any_rank_can_run() -> None:
    """The harness pickles every plan; a second runner, fed with the same plans, samples the same tokens."""
    harness = Harness(num_blocks=12)
    harness.add(*mixed())
    harness.run(depth=2)
    rank = type(harness.runner)(harness.runner.block_tokens, 12)
    for plan in harness.plans:
        rank.execute(plan)
    assert rank.memory == harness.runner.memory


def test_thousands_of_waiting_followers_are_not_looked_at_again_every_step() -> None:
    harness = Harness(num_blocks=400, block_tokens=4, step_tokens=512, max_running=32)
    scheduler, looks = harness.scheduler, 0
    match = scheduler._tables.match

    def counted(seq):
        nonlocal looks
        looks += 1
        return match(seq)

    scheduler._tables.match = counted
    for i in range(2_000):
        scheduler.add(request(f"r{i}", [*STEM, 1 + i % 40, i // 40], 3))
    steps = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, harness.runner.execute(plan))
        steps += 1
    assert steps > 100
    assert looks < 3 * 2_000, "each is matched when parked and when admitted, and rarely in between"


def test_the_oracle_knows_what_eos_is() -> None:
    """A guard for the tests above: some answers stop early and some don't."""
    reasons = {answer(r)[1] for r in mixed()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert all(EOS not in answer(r)[0][:-1] for r in mixed())


def test_what_penalties_count_is_known_however_far_ahead_steps_are_scheduled() -> None:
    harness = Harness()
    harness.add(request("r", STEM, 9, ignore_eos=True, frequency_penalty=0.5), request("free", STEM, 9))
    harness.run(depth=3)
    harness.assert_answers()
    histories = [chunk.history for plan in harness.plans for chunk in plan.chunks if chunk.history]
    assert len(histories) == 8 and not any(PLACEHOLDER in history for history in histories)
