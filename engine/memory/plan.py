"""How much memory goes to weights, workspace and KV, as a number of blocks and a sentence that explains it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import PLAIN_FORMATS, EngineConfig
from engine.errors import ConfigError, ModelError
from engine.memory.formats import KvFormat, kv_format, weight_format
from engine.memory.sizing import block_bytes, weight_parts, workspace_bytes
from engine.model.config import ModelConfig

SMALL_STEP, FEW = 256, 16
"""Tokens of a step and sequences at once that take little workspace, and cost little speed where memory is short."""

KV_SHARE = 0.25
"""Share of the free memory that KV takes unless it is told: others on the machine need theirs."""

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, `draft_bytes` being the weights of what proposes tokens; `sentence` says why there are
    `num_blocks`."""

    num_blocks: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes: int
    sentence: str
    draft_bytes: int = 0


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory this process may still take: what the machine has free, or less where a container's limit is nearer.

    A container's cached file pages that were not used lately count as free: the system drops them on demand.
    """
    import psutil  # here, as an engine on a GPU asks torch

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


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    *,
    available: int,
    weight_bytes: int | None = None,
    draft_bytes: int = 0,
    kv_share: float = KV_SHARE,
    place: str = "memory",
) -> MemoryPlan:
    """Decides the number of KV blocks. Raises ConfigError or ModelError when nothing useful fits. `weight_bytes` of the
    weights, where a file tells them better than the format, and `draft_bytes` of those of what proposes tokens;
    `kv_share` of what is left beside weights and workspace is for KV; `place` is what `available` bytes are free of."""
    kv = kv_format(config.kv_format)
    per_block = block_bytes(model, kv, config.block_tokens)
    weights = weight_bytes or _weight_bytes(model, config.weight_format)
    workspace = _workspace_bytes(config, model, kv)
    useful = config.max_running * -(-model.context_tokens // config.block_tokens)
    if config.num_blocks is not None:
        num_blocks, why = config.num_blocks, "as configured"
    elif config.kv_bytes is not None:
        num_blocks, why = config.kv_bytes // per_block, f"what kv_bytes = {_mib(config.kv_bytes)} holds"
        if num_blocks < 2:
            raise ConfigError(f"kv_bytes is {config.kv_bytes}; two KV blocks of this model take {2 * per_block}.")
    else:
        least = _least_bytes(config, model, weights, kv, kv_share)
        if available < least + draft_bytes:
            beside = f", {_mib(draft_bytes)} for what drafts" if draft_bytes else ""
            is_held = available >= least
            way = "without a draft it would fit" if is_held else _way_out(config, model, available, kv_share)
            raise ModelError(
                f"The model needs {_mib(weights)} for weights{beside} and {_mib(workspace)} for workspace, "
                f"but only {_mib(available)} of {place} is free; {way}."
            )
        rest = available - weights - draft_bytes - workspace
        num_blocks, why = int(rest * kv_share) // per_block, f"{kv_share:.0%} of the {_mib(rest)} left beside them"
        if num_blocks > useful:
            num_blocks, why = useful, f"all that {config.max_running} sequences of full context can use"
    sentence = (
        f"Weights take {_mib(weights)}, {f'those of the draft {_mib(draft_bytes)}, ' if draft_bytes else ''}"
        f"workspace up to {_mib(workspace)}, KV {_mib(num_blocks * per_block)}: "
        f"{num_blocks} blocks of {config.block_tokens} tokens, {why}."
    )
    return MemoryPlan(
        num_blocks=num_blocks,
        weight_bytes=weights,
        workspace_bytes=workspace,
        kv_bytes=num_blocks * per_block,
        sentence=sentence,
        draft_bytes=draft_bytes,
    )


def _weight_bytes(model: ModelConfig, weights: str) -> int:
    return weight_parts(model.shape, weight_format(weights)).total


def _workspace_bytes(config: EngineConfig, model: ModelConfig, kv: KvFormat) -> int:
    return workspace_bytes(
        model.shape,
        kv,
        step_tokens=config.step_tokens,
        max_running=config.max_running,
        context_tokens=model.context_tokens,
    )


def _least_bytes(config: EngineConfig, model: ModelConfig, weights: int, kv: KvFormat, kv_share: float) -> int:
    """Of free memory, of which the share for KV holds two blocks, beside weights of so many bytes."""
    blocks = math.ceil(2 * block_bytes(model, kv, config.block_tokens) / kv_share)
    return weights + _workspace_bytes(config, model, kv) + blocks


def _way_out(config: EngineConfig, model: ModelConfig, available: int, kv_share: float) -> str:
    """The formats that would fit, the least narrow first; else those that do with fewer and shorter steps; else what
    the narrowest needs."""
    small = replace(config, step_tokens=min(config.step_tokens, SMALL_STEP), max_running=min(config.max_running, FEW))
    fewer = f" and {small.max_running} sequences at once in steps of {small.step_tokens} tokens"
    for tried, more in ((config, ""), (small, fewer)):
        needed = {
            (weights, kv): _least_bytes(tried, model, _weight_bytes(model, weights), kv_format(kv), kv_share)
            for weights in PLAIN_FORMATS
            if weights != "fp8"  # takes no less than int8, and on a CPU more time
            for kv in (config.kv_format, "int8")
        }
        fitting = [pair for pair in needed if needed[pair] <= available]
        if fitting:
            weights, kv = max(fitting, key=needed.__getitem__)
            return f"{weights} weights with {kv} KV{more} would fit, with {_mib(needed[weights, kv])}"
    (weights, kv), least = min(needed.items(), key=lambda item: item[1])
    return f"even {weights} weights with {kv} KV{fewer} need {_mib(least)}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
