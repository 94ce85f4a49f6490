"""Vectors of texts: those that transformers computes, whatever shares a batch, in any chunks, and after any hits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.fake import FakeEngine
from engine.load.meta import read_meta
from engine.load.pooling import gguf_pooling
from engine.pooling import segments_of, sequences_of, unit_vector
from engine.request import Completion, FinishReason, Pooling, Request, SamplingParams
from engine.text import load_text

ONE = SamplingParams(max_tokens=1, temperature=0)


def make_engine(model: Path, **changes: object) -> Engine:
    values = {"weight_format": "float32", "kv_format": "float32", "num_blocks": 64, "threads": 1, **changes}
    return Engine(EngineConfig(model=str(model), **values))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return make_engine(tiny_model, step_tokens=32, max_running=8)


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> torch.nn.Module:
    return transformers.AutoModel.from_pretrained(tiny_model, dtype=torch.float32).eval()


def prompt_of(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((size, seed)).integers(3, 384, size).tolist()


def pooled(name: str, ids: list[int], mode: Pooling, segments: tuple[int, ...] = ()) -> Request:
    return Request(id=name, prompt_ids=ids, params=ONE, pooling=mode, segments=segments)


def vectors(completion: Completion) -> list[np.ndarray]:
    assert completion.finish_reason is FinishReason.STOP, completion
    return [np.frombuffer(vector, "<f4") for vector in completion.vectors]


def expected(oracle: torch.nn.Module, ids: list[int], mode: Pooling) -> np.ndarray:
    with torch.inference_mode():
        states = oracle(torch.tensor([ids])).last_hidden_state[0]
    total = states[-1] if mode is Pooling.LAST else states.mean(dim=0)
    return (total / total.norm()).numpy()


@pytest.mark.parametrize("mode", list(Pooling))
def test_vectors_are_those_of_transformers(engine: Engine, oracle: torch.nn.Module, mode: Pooling) -> None:
    """Prompts longer than a step run in several chunks, beside each other and beside an answer that is generated."""
    prompts = [prompt_of(size) for size in (1, 2, 15, 33, 100)]
    answer = Request(id="answer", prompt_ids=prompt_of(20), params=SamplingParams(max_tokens=9, temperature=0))
    (alone,) = engine.run([answer])
    *found, beside = engine.run([*(pooled(f"{mode}-{i}", ids, mode) for i, ids in enumerate(prompts)), answer])
    assert beside.token_ids == alone.token_ids
    for ids, completion in zip(prompts, found, strict=True):
        (vector,) = vectors(completion)
        np.testing.assert_allclose(vector, expected(oracle, ids, mode), atol=2e-5)
        assert (completion.usage.prompt_tokens, completion.usage.output_tokens) == (len(ids), 0)
        assert (completion.token_ids, completion.text) == ((), "")


def test_a_cached_prefix_changes_no_vector_and_the_mean_takes_none(tiny_model: Path, oracle: torch.nn.Module) -> None:
    """Keys and values of a prefix say nothing of its states, so the mean is taken over computed ones only."""
    engine, prefix = make_engine(tiny_model), prompt_of(64)
    other = [*prefix, *prompt_of(7)]
    (first,) = engine.run([pooled("first", prefix, Pooling.LAST)])
    (hit,) = engine.run([pooled("hit", other, Pooling.LAST)])
    (mean,) = engine.run([pooled("mean", other, Pooling.MEAN)])
    assert [one.usage.hit_tokens for one in (first, hit, mean)] == [0, 64, 0]
    np.testing.assert_allclose(vectors(hit)[0], expected(oracle, other, Pooling.LAST), atol=2e-5)
    np.testing.assert_allclose(vectors(mean)[0], expected(oracle, other, Pooling.MEAN), atol=2e-5)


@pytest.mark.parametrize("mode", list(Pooling))
def test_several_prompts_of_one_request_are_as_if_alone(engine: Engine, mode: Pooling) -> None:
    sizes = (3, 40, 3, 17)
    prompts = [prompt_of(size, seed) for seed, size in enumerate(sizes)]
    together = [token for prompt in prompts for token in prompt]
    (found,) = engine.run([pooled(f"all-{mode}", together, mode, sizes)])
    alone = list(engine.run([pooled(f"one-{mode}-{i}", ids, mode) for i, ids in enumerate(prompts)]))
    assert found.usage.prompt_tokens == sum(sizes)
    for mine, other in zip(vectors(found), alone, strict=True):
        np.testing.assert_allclose(mine, vectors(other)[0], atol=2e-5)


@pytest.mark.parametrize("mode", list(Pooling))
def test_a_preempted_prompt_begins_its_vector_anew(tiny_model: Path, oracle: torch.nn.Module, mode: Pooling) -> None:
    engine, ids = make_engine(tiny_model, step_tokens=16), prompt_of(60)
    engine.add(pooled("r", ids, mode))
    engine.step()
    engine.step()
    assert engine.scheduler.preempt("r\x000")
    completions: list[Completion] = []
    while engine.has_work():
        completions += engine.step().completions
    (vector,) = vectors(completions[0])
    np.testing.assert_allclose(vector, expected(oracle, ids, mode), atol=2e-5)
    engine.scheduler.check_integrity()


def test_an_abort_ends_all_prompts_of_a_request(engine: Engine) -> None:
    engine.add(pooled("gone", prompt_of(90), Pooling.MEAN, (40, 50)))
    engine.step()
    engine.abort("gone")
    completions: list[Completion] = []
    while engine.has_work():
        completions += engine.step().completions
    assert [(one.request_id, one.finish_reason, one.vectors) for one in completions] == [
        ("gone", FinishReason.ABORT, ())
    ]
    assert engine.num_unfinished() == 0


@pytest.mark.parametrize(
    ("ids", "segments", "code"),
    [
        ([], (), "invalid_value"),
        ([5, 6], (2, 0), "invalid_value"),
        ([5, 6, 7], (2, 2), "invalid_value"),
        ([5, 384], (), "invalid_value"),
        ([5] * 513, (), "context_length_exceeded"),
    ],
)
def test_inputs_that_cannot_be_run_are_errors(
    engine: Engine, ids: list[int], segments: tuple[int, ...], code: str
) -> None:
    (found,) = engine.run([pooled("bad", ids, Pooling.LAST, segments)])
    assert (found.finish_reason, found.error_code, found.vectors) == (FinishReason.ERROR, code, ())


def test_a_text_may_fill_the_context(engine: Engine) -> None:
    (found,) = engine.run([pooled("full", prompt_of(512), Pooling.LAST)])
    assert len(vectors(found)) == 1


def test_the_fake_engine_gives_equal_prompts_equal_vectors(tiny_model: Path) -> None:
    engine = FakeEngine(load_text(tiny_model))
    a, b = engine.run(
        [pooled("a", [*prompt_of(5), *prompt_of(9)], Pooling.MEAN, (5, 9)), pooled("b", prompt_of(9), Pooling.LAST)]
    )
    first, second, third = *a.vectors, *b.vectors
    assert first != second == third
    assert all(abs(np.linalg.norm(vector) - 1) < 1e-6 for vector in (*vectors(a), *vectors(b)))
    assert (a.usage.prompt_tokens, a.usage.output_tokens) == (14, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_segments_cover_the_prompt(sizes: list[int]) -> None:
    request = pooled("r", list(range(sum(sizes))), Pooling.LAST, tuple(sizes))
    parts = list(sequences_of(request))
    assert [token for part in parts for token in part.prompt_ids] == list(request.prompt_ids)
    assert tuple(len(part.prompt_ids) for part in parts) == segments_of(request) == tuple(sizes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_a_vector_is_of_length_one_or_there_is_none(numbers: list[float]) -> None:
    total = np.array(numbers, np.float64)
    vector = unit_vector(total)
    if vector is None:
        assert not np.isfinite(total).all() or not total.any()
    else:
        assert abs(float(np.linalg.norm(np.frombuffer(vector, "<f4").astype(np.float64))) - 1) < 1e-5


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, None),
        ({}, None),
    ],
)
def test_a_model_directory_says_how_it_is_pooled(
    tiny_model: Path, tmp_path: Path, config: dict[str, bool], mode: Pooling | None
) -> None:
    plain = read_meta(tiny_model)
    assert (plain.pooling, plain.hidden) == (Pooling.LAST, 64)
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    meta = read_meta(tmp_path)
    assert meta.pooling is mode
    assert meta.digest != plain.digest, "another pooling is another model"


def test_gguf_fields_say_how_a_file_is_pooled() -> None:
    kinds = (None, 0, 1, 2, 3, 4)
    found = [gguf_pooling({} if kind is None else {"llama.pooling_type": kind}, "llama") for kind in kinds]
    assert found == [Pooling.LAST, Pooling.LAST, Pooling.MEAN, None, Pooling.LAST, None]
