"""The same work by transformers' continuous batching, where it is installed."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch

from engine.ondevice.llama import LLAMA_8B, TOY
from engine.ondevice.loads import Load
from engine.ondevice.place import Place


class PeerError(Exception):
    """It can't be measured; the message is a clause."""


def run_transformers(place: Place, load: Load) -> float:
    """Seconds for random prompts on a random model of our shape, in bf16. Raises PeerError."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise PeerError("it isn't installed here") from error
    shape = TOY if place.is_toy else LLAMA_8B
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context_tokens,
        rope_theta=shape.rope_theta,
        attn_implementation="sdpa",
    )
    wanted = transformers.GenerationConfig(max_new_tokens=load.output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, shape.vocab_size, (load.count, load.prompt), generator=random).tolist()
    try:
        with torch.device(place.device):
            model = transformers.LlamaForCausalLM(config).to(torch.float32 if place.is_toy else torch.bfloat16).eval()
        model.generate_batch(prompts[:2], generation_config=wanted)
        place.wait()
        start = time.perf_counter()
        found = model.generate_batch(prompts, generation_config=wanted)
        place.wait()
        seconds = time.perf_counter() - start
    except Exception as error:  # another version of it, or a device that it doesn't serve
        raise PeerError(f"it failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}") from error
    if sum(len(one.generated_tokens) for one in found.values()) != load.tokens:
        raise PeerError("it didn't give all tokens")
    return seconds
