"""Frozen settings of the engine; a value that can't work is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ConfigError

GROUP_FORMATS = ("w8a16", "w4a16")
"""Weights of 8 or 4 bits in groups, as a quantized checkpoint has them; activations stay floating-point."""
PLAIN_FORMATS = ("float32", "bf16", "int8", "fp8")
"""Formats that any model can be run in."""
WEIGHT_FORMATS = (*PLAIN_FORMATS, *GROUP_FORMATS)
KV_FORMATS = ("float32", "bf16", "int8", "fp8")

DEVICES = ("auto", "cpu", "cuda")
"""What may be asked for; auto is a GPU that can run the formats, else the CPU."""


SPEC_MODES = ("auto", "off", "ngram", "draft", "heads")
"""What may propose tokens (engine/spec); auto is whatever there is, where it makes steps pay."""


class Formats(NamedTuple):
    """What a model runs in: one of WEIGHT_FORMATS, one of KV_FORMATS."""

    weights: str
    kv: str


def fingerprint(digest: str, formats: Formats | None, device: str = "cpu") -> str:
    """What an answer depends on beside its request: the model, what it runs in, and the kind of device. Without
    formats it is the engine that has no weights."""
    runs_in = f"{formats.weights}_{formats.kv}_{device}" if formats is not None else "fake"
    return f"fp_{digest[:12]}_{runs_in}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine runs one model.

    `model`          path of a GGUF file or of a Hugging Face directory
    `block_tokens`   tokens a KV block holds
    `num_blocks`     KV blocks in the pool; None: as many as `kv_bytes` holds
    `kv_bytes`       memory for KV; None: a share of what is free (engine/memory/plan.py explains its answer)
    `step_tokens`    most tokens computed in one step
    `max_running`    most sequences that decode in one step
    `device`         one of DEVICES
    `overlap`        plan the next step while this one runs; None: on a GPU
    `graphs`         replay steps that only decode as CUDA graphs, on a GPU
    `threads`        CPU threads; None: all cores
    `reproducible`   the same tokens bit for bit whatever else is in the batch; None: where that costs nothing
    `spec`           one of SPEC_MODES
    `draft`          path of what proposes tokens: a smaller model of the same vocabulary, or heads on this one; None:
                     heads where they lie in the model's own directory
    `draft_salt`     the salt of the requests that draft or heads may draft for, as they learned from their project's
                     lines; None: all
    `ttft_target_ms` time to the first token of interactive requests, and
    `itl_target_ms`  between their tokens, which batch work leaves them (engine/sched/dial.py); None: any
    `prefix_cache`   off only in tests and measurements
    `poison`         overwrite freed blocks with NaN, so that a read of one is seen (tests)
    """

    model: str
    weight_format: str = "bf16"
    kv_format: str = "bf16"
    block_tokens: int = 16
    num_blocks: int | None = None
    kv_bytes: int | None = None
    step_tokens: int = 2048
    max_running: int = 256
    device: str = "auto"
    overlap: bool | None = None
    graphs: bool = True
    threads: int | None = None
    reproducible: bool | None = None
    spec: str = "auto"
    draft: str | None = None
    draft_salt: str | None = None
    ttft_target_ms: float | None = None
    itl_target_ms: float | None = None
    prefix_cache: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, says: str) -> None:
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {says}.")

        check(self.weight_format in WEIGHT_FORMATS, "weight_format", f"one of {', '.join(WEIGHT_FORMATS)}")
        check(self.kv_format in KV_FORMATS, "kv_format", f"one of {', '.join(KV_FORMATS)}")
        check(self.block_tokens >= 1, "block_tokens", "at least 1")
        check(self.num_blocks is None or self.num_blocks >= 2, "num_blocks", "at least 2")
        check(self.kv_bytes is None or self.kv_bytes > 0, "kv_bytes", "above 0")
        check(self.step_tokens >= 1, "step_tokens", "at least 1")
        check(self.max_running >= 1, "max_running", "at least 1")
        check(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}")
        check(self.spec in SPEC_MODES, "spec", f"one of {', '.join(SPEC_MODES)}")
        check(self.spec != "draft" or self.draft is not None, "draft", "a model, as spec is 'draft'")
        for name in ("ttft_target_ms", "itl_target_ms"):
            check(getattr(self, name) is None or getattr(self, name) > 0, name, "above 0")
        check(self.threads is None or self.threads >= 1, "threads", "at least 1")
