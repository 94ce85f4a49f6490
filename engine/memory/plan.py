"""How much memory goes to weights, workspace and KV, as a number of blocks and a sentence that explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.config import PLAIN_FORMATS, EngineConfig
from engine.errors import ConfigError, ModelError
from engine.memory.formats import KvFormat, kv_format, weight_format
from engine.memory.sizing import block_bytes, weight_parts, workspace_bytes
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
    kv = kv_format(config.kv_format)
    per_block = block_bytes(model, kv, config.block_tokens)
    weights = _weight_bytes(model, config.weight_format)
    workspace = _workspace_bytes(config, model, kv)
    useful = config.max_running * -(-model.context_tokens // config.block_tokens)
    if config.num_blocks is not None:
        num_blocks, why = config.num_blocks, "as configured"
    elif config.kv_bytes is not None:
        num_blocks, why = config.kv_bytes // per_block, f"what kv_bytes = {_mib(config.kv_bytes)} holds"
        if num_blocks < 2:
            raise ConfigError(f"kv_bytes is {config.kv_bytes}; two KV blocks of this model take {2 * per_block}.")
    else:
        if available < _least_bytes(config, model, config.weight_format, kv):
            raise ModelError(
                f"The model needs {_mib(weights)} for weights and {_mib(workspace)} for workspace, "
                f"but only {_mib(available)} of memory is free; {_way_out(config, model, available)}."
            )
        rest = available - weights - workspace
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


def _weight_bytes(model: ModelConfig, weights: str) -> int:
    """As the engine keeps them: it packs a head of its own even where the head is the embedding."""
    return weight_parts(model.shape, weight_format(weights), packs_head=True).total


def _workspace_bytes(config: EngineConfig, model: ModelConfig, kv: KvFormat) -> int:
    return workspace_bytes(
        model.shape,
        kv,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
        context_tokens=model.context_tokens,
    )


def _least_bytes(config: EngineConfig, model: ModelConfig, weights: str, kv: KvFormat) -> int:
    """Of free memory, of which the share for KV holds two blocks."""
    blocks = math.ceil(2 * block_bytes(model, kv, config.block_tokens) / KV_SHARE)
    return _weight_bytes(model, weights) + _workspace_bytes(config, model, kv) + blocks


def _way_out(config: EngineConfig, model: ModelConfig, available: int) -> str:
    """The formats that would fit, the least narrow first; else what the narrowest needs."""
    needed = {
        (weights, kv): _least_bytes(config, model, weights, kv_format(kv))
        for weights in PLAIN_FORMATS
        for kv in (config.kv_format, "int8")
    }
    weights, kv = max((pair for pair in needed if needed[pair] <= available), key=needed.__getitem__, default=("", ""))
    if weights:
        return f"{weights} weights with {kv} KV would fit, with {_mib(needed[weights, kv])}"
    (weights, kv), least = min(needed.items(), key=lambda item: item[1])
    return f"even {weights} weights with {kv} KV need {_mib(least)}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
