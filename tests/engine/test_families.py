"""Every family computes what transformers computes on a tiny random model, through our pages, chunks and both tiers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.kernels.cpu import CpuKernels
from engine.kernels.cpu.build import library
from engine.load.hf_config import config_json
from engine.model.config import config_from_directory
from tests.engine.load.test_weights import to_gguf
from tests.engine.stepping import Stepper, make_runner
from tests.engine.test_engine_exactness import DRAWN, GREEDY, family, make_engine, request, run, tokens
from tests.engine.test_logits import TOLERANCE, load_oracle, oracle_logits
from tests.families import WINDOW, gemma3, make_family, mistral, qwen2, qwen3

VARIANTS: dict[str, Callable[[], Any]] = {
    "mistral": mistral,
    "mistral without windows": lambda: mistral(sliding_window=None, head_dim=24),
    "qwen2": lambda: qwen2(use_sliding_window=False, tie_word_embeddings=True),
    "qwen2 with windows from its second layer on": qwen2,
    "qwen3": qwen3,
    "qwen3 with biases and windows": lambda: qwen3(
        attention_bias=True, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma3": gemma3,
    "gemma3 as it is by default": lambda: gemma3(
        rope_parameters=None, query_pre_attn_scalar=256, final_logit_softcapping=None, sliding_window_pattern=6
    ),
}
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
FUSED: dict[str, Callable[[], Any]] = {
    "mistral": lambda: mistral(**WIDE),
    "qwen2": lambda: qwen2(hidden_size=128, intermediate_size=192),
    "qwen3": lambda: qwen3(**WIDE),
    "gemma3": lambda: gemma3(**WIDE),
}


def prompts(*sizes: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 384, (size,), generator=draw).tolist() for size in sizes]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_through_odd_chunks(variant: str, tmp_path: Path) -> None:
    path = make_family(tmp_path / "m", VARIANTS[variant]())
    asked = prompts(1, 16, 17, 97, 130)
    got = Stepper(make_runner(path), asked).logits([7, 1, 33, 16])
    want = oracle_logits(load_oracle(path), asked)
    assert max(logits.std() for logits in want) > 1, "logits this flat would agree by chance"
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).abs().max() <= TOLERANCE


def test_each_difference_of_a_family_changes_the_answer(tmp_path: Path) -> None:
    """Else the variants above would show nothing. The same weights, and one field of config.json at a time."""
    path = make_family(tmp_path / "m", gemma3())
    config = json.loads((path / "config.json").read_text())

    def logits(**changes: Any) -> torch.Tensor:
        (path / "config.json").write_text(json.dumps(config | changes))
        return Stepper(make_runner(path), prompts(97)).logits([97])[0]

    plain = logits()
    ropes = config["rope_parameters"]
    for changes in (
        {"sliding_window": 20},
        {"layer_types": ["full_attention"] * 5},
        {"query_pre_attn_scalar": 32},
        {"final_logit_softcapping": None},
        {"rope_parameters": {**ropes, "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}},
        {"rope_parameters": {**ropes, "full_attention": {"rope_type": "default", "rope_theta": 1e5}}},
    ):
        assert (logits(**changes) - plain).abs().max() > 0.05, changes


def test_both_spellings_of_a_gemma_mean_the_same(tmp_path: Path) -> None:
    """As transformers 5 writes it, as files on the hub are, and inside a model that sees images."""
    path = make_family(tmp_path / "m", gemma3(sliding_window_pattern=6))
    config = json.loads((path / "config.json").read_text())
    first, want = config_from_directory(path), Stepper(make_runner(path), prompts(60)).logits([33])[0]
    older = {name: value for name, value in config.items() if name not in ("rope_parameters", "layer_types")}
    older |= {"rope_theta": 1e5, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    (path / "config.json").write_text(json.dumps(older))
    assert config_from_directory(path) == first
    outer = {"model_type": "gemma3", "text_config": older | {"model_type": "gemma3_text"}}
    (path / "config.json").write_text(json.dumps(outer))
    tensors = {f"language_model.{name}": value for name, value in load_file(path / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.patch.weight": torch.zeros(4, 4)}, path / "model.safetensors")
    assert torch.equal(Stepper(make_runner(path), prompts(60)).logits([33])[0], want)


@pytest.mark.parametrize(
    "config",
    [
        lambda: mistral(),
        lambda: qwen2(use_sliding_window=False, sliding_window=None),
        lambda: qwen3(),
        lambda: gemma3(query_pre_attn_scalar=32, sliding_window_pattern=6, num_hidden_layers=7),
    ],
    ids=["mistral", "qwen2", "qwen3", "gemma3"],
)
def test_the_same_model_as_gguf_gives_the_same_logits(config: Callable[[], Any], tmp_path: Path) -> None:
    directory = make_family(tmp_path / "hf", config())
    file = to_gguf(directory, tmp_path / "model.gguf")
    one, other = (Stepper(make_runner(path), prompts(60)).logits([33])[0] for path in (directory, file))
    assert (one - other).abs().max() < 1e-5, "a norm with 1 added and stored may round"


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma3"])
def test_a_config_that_we_write_says_the_same(name: str, tmp_path: Path) -> None:
    """As for a quantized copy of a GGUF file, which has none."""
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[name]().to_dict()))
    config = config_from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config, tmp_path)))
    assert config_from_directory(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_activation": "gelu"}, "gelu_pytorch_tanh is supported"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "of its windows"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ],
)
def test_what_a_gemma_cannot_be_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    tmp_path.joinpath("config.json").write_text(json.dumps(gemma3().to_dict() | changes))
    with pytest.raises(ModelError, match=says):
        config_from_directory(tmp_path)


@pytest.mark.parametrize("name", FUSED)
def test_compiled_kernels_agree_and_one_call_is_verb_by_verb(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = make_family(tmp_path / "m", FUSED[name]()), prompts(90, 40, 3)
    exact = Stepper(make_runner(path), asked).logits([16, 1, 33])
    in_one_call, taken = CpuKernels.run_layers, []

    def watched(self: CpuKernels, *args: Any) -> bool:
        taken.append(in_one_call(self, *args))
        return taken[-1]

    for formats, most in ((("bf16", "bf16"), 0.05), (("int8", "bf16"), 0.1), (("int8", "int8"), 0.1)):
        results = []
        for run_layers in (watched, lambda *_: False):
            monkeypatch.setattr(CpuKernels, "run_layers", run_layers)
            runner = make_runner(path, weight_format=formats[0], kv_format=formats[1], num_blocks=16, threads=2)
            logits = Stepper(runner, asked).logits([16, 1, 33])
            caches = [cache.view(torch.uint8) for layer in range(3) for cache in runner.pool.layer(layer)]
            results.append((logits, caches))
        (logits, caches), (one_by_one, same_caches) = results
        assert all(map(torch.equal, (*logits, *caches), (*one_by_one, *same_caches)))
        off = torch.cat([(a - b).flatten() for a, b in zip(logits, exact, strict=True)])
        assert off.std() < most * torch.cat(exact).std(), f"{formats} are off by {off.std():.3f}"
    assert taken and set(taken) == {bool(library().has_tiles())}


def test_schedules_change_no_token_of_a_model_with_windows(tmp_path: Path) -> None:
    """Small pools preempt and evict, small budgets chop prompts, every prompt comes again warm; freed blocks are
    poisoned. The definition is one request after the other without a cache."""
    path, asked = make_family(tmp_path / "m", gemma3(num_hidden_layers=3)), family(4) + family(4)
    params = [replace(GREEDY if i % 2 else DRAWN, max_tokens=6) for i in range(len(asked))]
    plain = make_engine(path, prefix_cache=False, max_running=1)
    expected = tokens([run(plain, request(p, q))[0] for p, q in zip(asked, params, strict=True)])
    plain.close()
    for limits in ({"num_blocks": 9}, {"step_tokens": 7, "block_tokens": 5, "num_blocks": 40}):
        engine = make_engine(path, **limits)
        assert tokens(run(engine, *(request(p, q) for p, q in zip(asked, params, strict=True)))) == expected
        engine.scheduler.check_integrity()
        engine.close()


@pytest.mark.parametrize("kv_format", ["float32", "bf16", "int8"])
def test_what_lies_outside_of_all_windows_is_not_read(kv_format: str, tmp_path: Path) -> None:
    path, (prompt,) = make_family(tmp_path / "m", mistral(**WIDE)), prompts(150)
    weights = "float32" if kv_format == "float32" else "bf16"
    found = []
    for is_poisoned in (False, True):
        runner = make_runner(path, weight_format=weights, kv_format=kv_format)
        stepper = Stepper(runner, [prompt])
        stepper.tokens = [prompt[:140]]
        stepper.logits([140])
        if is_poisoned:  # positions before 64: of 140 to 149 each looks back 24, in chunks of 64
            runner.pool.poison(stepper.blocks[0][:4])
        stepper.tokens = [prompt]
        found.append(stepper.logits([5])[0])
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
