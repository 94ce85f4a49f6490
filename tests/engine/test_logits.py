"""The model computes what transformers computes: the oracle is theirs, the paged and chunked path is ours."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine.load.gguf import GGUFFile
from engine.text import load_text
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model

TOLERANCE = 1e-3
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "one KV head": {"heads": 8, "kv_heads": 1},
    "no sharing of KV heads": {"heads": 4, "kv_heads": 4},
    "odd sizes": {"hidden": 60, "heads": 6, "kv_heads": 3, "mlp": 100, "layers": 3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "old spelling of rope": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic rope": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}


def load_oracle(path: Path) -> Any:
    if path.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with pytest.MonkeyPatch.context() as patch:
        # transformers builds this table anew for each of its modules, for 10 s
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()


def without_tokenizer(source: Path, target: Path) -> Path:
    """The same weights and shapes, without the vocabulary, on which transformers' reader would spend 15 s."""
    file, data = GGUFFile(source), np.memmap(source, mode="r")
    writer = gguf.GGUFWriter(target, "llama")
    for key, value in file.fields.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for info in file.tensors.values():
        raw = data[info.offset : info.offset + info.num_bytes]
        if info.kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(info.name, raw.view(np.float32).reshape(info.shape))
        else:
            writer.add_tensor(info.name, raw.reshape(info.shape[0], -1), raw_dtype=info.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@torch.inference_mode()
def oracle_logits(oracle: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Padded on the right, which causal attention never sees."""
    longest = max(map(len, sequences))
    batch = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences])
    return [row[: len(ids)].float() for row, ids in zip(oracle(batch).logits, sequences, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_agree_through_odd_chunks(variant: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", seed=1, **VARIANTS[variant])
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 384, (size,), generator=random).tolist() for size in (1, 16, 17, 97, 130)]
    got = Stepper(make_runner(path), prompts).logits([7, 1, 33, 16])
    want = oracle_logits(load_oracle(path), prompts)
    assert max(logits.std() for logits in want) > 1, "logits this flat would agree by chance"
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).abs().max() <= TOLERANCE


def test_rope_scaling_changes_the_answer(tmp_path: Path) -> None:
    """Else the variants above would show nothing."""
    prompt = [list(range(3, 120))]
    plain, *scaled = (
        Stepper(make_runner(make_tiny_model(tmp_path / str(i), rope_scaling=scaling)), prompt).logits([64])[0]
        for i, scaling in enumerate([None, LLAMA3, {"rope_type": "linear", "factor": 4.0}])
    )
    assert all((logits - plain).abs().max() > 0.1 for logits in scaled)


def test_the_real_model_agrees_and_decodes_the_same(default_model: Path, tmp_path: Path) -> None:
    """32 prompts by 64 greedy tokens: the oracle, fed our tokens, would have chosen each, or the first it wouldn't
    was a close call of its own; and no logit on the way is further than the tolerance from ours."""
    text = load_text(default_model)
    lines = (Path(__file__).parents[1] / "data/prompts.jsonl").read_text().splitlines()[:32]
    questions = [json.loads(line)["messages"][-1]["content"][:60] for line in lines]
    system = {"role": "system", "content": "Answer."}
    prompts = [text.prompt_ids([system, {"role": "user", "content": question}]) for question in questions]
    runner = make_runner(default_model, num_blocks=256, threads=2)
    answers = Stepper(runner, prompts, room=64).generate(64, chunk=13)
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    oracle = load_oracle(without_tokenizer(default_model, tmp_path / "slim.gguf"))
    for start in range(0, len(sequences), 8):
        eight = slice(start, start + 8)
        want = oracle_logits(oracle, sequences[eight])
        for prompt, answer, logits in zip(prompts[eight], answers[eight], want, strict=True):
            assert_same_choices(answer, logits[len(prompt) - 1 : -1])
        if start == 0:
            got = Stepper(runner, sequences[:3]).logits([29, 64, 1])
            assert all((a - b).abs().max() <= TOLERANCE for a, b in zip(got, want, strict=False))


def assert_same_choices(answer: list[int], logits: torch.Tensor) -> None:
    """`logits` [n, vocab] are the oracle's before each token of `answer`."""
    differs = (logits.argmax(dim=-1) != torch.tensor(answer)).nonzero()
    if len(differs):
        top = logits[differs[0, 0]].topk(2).values
        assert top[0] - top[1] < TOLERANCE, "the first different token was no close call"
