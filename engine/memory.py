"""How much memory goes to weights, workspace and KV, as a number of blocks and a sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.cache.pool import DTYPES, block_bytes
from engine.config import WEIGHT_BYTES, EngineConfig
from engine.errors import ConfigError, ModelError
from engine.model.config import ModelConfig

KV_SHARE = 0.25
"""Share of the free memory that KV takes unless it is told: others on the machine need theirs."""

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose; `sentence` says why there are `num_blocks`."""

    num_blocks: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes: int
    sentence: str


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory this process may still take: what the machine has free, or less where a container's limit is nearer.

    A container's cached file pages that were not used lately count as free: the system drops them on demand.
    """
    free: int = psutil.virtual_memory().available
    for folder, limit_name, used_name, cached_name in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, used = int((folder / limit_name).read_text()), int((folder / used_name).read_text())
            cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, max(limit - used + int(cached.get(cached_name, 0)), 0))
        except (OSError, ValueError):  # another version of cgroups, or no limit ("max")
            continue
    return free


def plan_memory(config: EngineConfig, model: ModelConfig, *, available: int) -> MemoryPlan:
    """Decides the number of KV blocks. Raises ConfigError or ModelError when nothing useful fits."""
    per_block = block_bytes(model, config.kv_format, config.block_tokens)
    weights = model.num_parameters * WEIGHT_BYTES[config.weight_format]
    workspace = _workspace_bytes(config, model)
    useful = config.max_running * -(-model.context_tokens // config.block_tokens)
    if config.num_blocks is not None:
        num_blocks, why = config.num_blocks, "as configured"
    elif config.kv_bytes is not None:
        num_blocks, why = config.kv_bytes // per_block, f"what kv_bytes = {_mib(config.kv_bytes)} holds"
        if num_blocks < 2:
            raise ConfigError(f"kv_bytes is {config.kv_bytes}; two KV blocks of this model take {2 * per_block}.")
    else:
        rest = available - weights - workspace
        if rest * KV_SHARE < 2 * per_block:
            raise ModelError(
                f"The model needs {_mib(weights)} for weights and {_mib(workspace)} for workspace, "
                f"but only {_mib(available)} of memory is free."
            )
        num_blocks, why = int(rest * KV_SHARE) // per_block, f"{KV_SHARE:.0%} of the {_mib(rest)} left beside them"
        if num_blocks > useful:
            num_blocks, why = useful, f"all that {config.max_running} sequences of full context can use"
    sentence = (
        f"Weights take {_mib(weights)}, workspace up to {_mib(workspace)}, KV {_mib(num_blocks * per_block)}: "
        f"{num_blocks} blocks of {config.block_tokens} tokens, {why}."
    )
    return MemoryPlan(
        num_blocks=num_blocks,
        weight_bytes=weights,
        workspace_bytes=workspace,
        kv_bytes=num_blocks * per_block,
        sentence=sentence,
    )


def _workspace_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Most that a step's activations, gathered KV and logits take at once; an estimate from above."""
    row = 4 * (2 * model.hidden + 3 * model.mlp + 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    kv_slot = 2 * model.num_kv_heads * model.head_dim * DTYPES[config.kv_format].itemsize
    logits = 12 * min(config.max_running, 128) * model.vocab_size
    return config.step_tokens * row + max(64 << 20, model.context_tokens * kv_slot) + logits


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
