"""What the formats of weights and KV cost in quality: the same text through them and through float32.

    kl            mean of Σ p log(p / q), p the float32 model's next-token distribution and q the format's, in nats
    top1          share of positions at which both rank the same token first
    perplexity    exp(mean -log q(next token)) over the float32 model's

`auto` means int8, of both, where it stays within the limits below on this model, else bf16; and the weights of a
checkpoint that is quantized in groups as they are. A verdict is measured once a model, formats and version of the
arithmetic, and kept in the user's cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs
import torch

from engine.config import KV_FORMATS, EngineConfig, Formats
from engine.errors import ConfigError, EngineError
from engine.load.fetch import locate
from engine.load.meta import ModelMeta, read_meta
from engine.load.quantization import stored_format
from engine.load.weights import open_model
from engine.memory.plan import available_bytes
from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.sched.plan import Chunk, StepPlan
from engine.text import load_text

MOST_KL = 0.01
MOST_PERPLEXITY = 1.01
_VERSION = 3  # of the arithmetic: a new one measures again
_MOST_TOKENS = 2048
_CHUNK_TOKENS = 128
_PARAMS = SamplingParams(max_tokens=1, temperature=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One pair of formats against float32. `perplexity` is a ratio."""

    weight_format: str
    kv_format: str
    kl: float
    top1: float
    perplexity: float
    is_fused: bool  # by the kernels it ran on: without them a smaller format isn't faster

    @property
    def is_good(self) -> bool:
        return self.kl <= MOST_KL and self.perplexity <= MOST_PERPLEXITY


def resolve_formats(
    model: str, weight_format: str, kv_format: str, say: Callable[[str], None]
) -> tuple[Formats, Quality | None]:
    """The formats to use for those asked for, and what is known of their quality (None: not measured)."""
    plain = Formats("bf16", "bf16" if kv_format == "auto" else kv_format)
    if weight_format != "auto":
        kv = "float32" if (weight_format, kv_format) == ("float32", "auto") else plain.kv
        return Formats(weight_format, kv), None
    meta = read_meta(model)
    if stored := stored_format(meta.path):
        return Formats(stored, plain.kv), None
    wanted = Formats("int8", "int8" if kv_format == "auto" else kv_format)
    quality = _kept(meta, wanted)
    if quality is None:
        if not _can_measure(meta):
            say(f"{meta.name} runs in bf16: there is too little memory here to compare int8 with float32.")
            return plain, None
        say(f"Measuring once what int8 costs {meta.name} in quality.")
        try:
            quality = measure(model, *wanted)
        except ConfigError as error:
            say(f"{meta.name} runs in bf16: {error}")
            return plain, None
        _keep(meta, quality)
    if not quality.is_fused:
        return plain, None
    if quality.is_good:
        return wanted, quality
    say(
        f"{meta.name} runs in bf16: in int8 its mean KL would be {quality.kl:.4f} (at most {MOST_KL}) "
        f"and its perplexity {quality.perplexity:.4f} times that of float32 (at most {MOST_PERPLEXITY})."
    )
    return plain, None


def measure(model: str, weight_format: str, kv_format: str = "bf16", *, against: str | None = None) -> Quality:
    """Runs the held-out text through both formats; the float32 model is `against` where that is another one, of which
    this is a quantized copy. Raises ModelError where a model can't be run."""
    ids = load_text(model).tokenizer.encode(resources.files("engine").joinpath("heldout.txt").read_text("utf-8"))
    exact = _Forward(against or model, "float32", "float32", ids)
    other = _Forward(model, weight_format, kv_format, ids)
    size = min(len(ids), _MOST_TOKENS, exact.runner.context_tokens)
    kl = agree = exact_nll = other_nll = 0.0
    for start in range(0, size, _CHUNK_TOKENS):
        end = min(start + _CHUNK_TOKENS, size)
        p, q = (forward.log_probabilities(start, end) for forward in (exact, other))
        kl += float((p.exp() * (p - q)).sum())
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        following = torch.tensor(ids[start + 1 : end + 1])
        rows = torch.arange(len(following))
        exact_nll -= float(p[rows, following].sum())
        other_nll -= float(q[rows, following].sum())
    ratio = float(torch.tensor((other_nll - exact_nll) / size).exp())
    return Quality(
        weight_format=weight_format,
        kv_format=kv_format,
        kl=kl / size,
        top1=agree / size,
        perplexity=ratio,
        is_fused=other.runner.kernels.is_fused,
    )


class _Forward:
    """One runner that walks the text as a single sequence."""

    def __init__(self, model: str, weight_format: str, kv_format: str, ids: list[int]) -> None:
        self.runner = ModelRunner(
            EngineConfig(
                model=model, weight_format=weight_format, kv_format=kv_format, num_blocks=_MOST_TOKENS // 16 + 1
            )
        )
        self._ids = ids

    def log_probabilities(self, start: int, end: int) -> torch.Tensor:
        """float32 [end - start, vocab]; calls follow each other."""
        chunk = Chunk(
            seq_id="text",
            token_ids=tuple(self._ids[start:end]),
            start=start,
            block_ids=tuple(range(-(-end // 16))),
            logit_rows=tuple(range(end - start)),
            params=_PARAMS,
            num_prompt_tokens=len(self._ids),
        )
        return self.runner.logits(StepPlan(step=start // _CHUNK_TOKENS, chunks=(chunk,))).log_softmax(-1)


def _can_measure(meta: ModelMeta) -> bool:
    """Whether the model fits into memory as float32 and int8 at once, with some room."""
    config, _ = open_model(meta.path)
    return 6 * config.num_parameters < available_bytes()


def _file(meta: ModelMeta, formats: Formats) -> Path:
    folder = platformdirs.user_cache_path("batchsvc", appauthor=False) / "quality"
    return folder / f"{meta.digest[:24]}-{formats.weights}-kv-{formats.kv}-v{_VERSION}.json"


def _kept(meta: ModelMeta, formats: Formats) -> Quality | None:
    try:
        return Quality(**json.loads(_file(meta, formats).read_text("utf-8")))
    except (OSError, ValueError, TypeError):  # never measured, or not readable: measure
        return None


def _keep(meta: ModelMeta, quality: Quality) -> None:
    path = _file(meta, Formats(quality.weight_format, quality.kv_format))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(asdict(quality)), "utf-8")
        scratch.replace(path)
    except OSError:  # a read-only cache only costs the next measurement
        return


def main(argv: list[str] | None = None) -> int:
    """`python -m engine.quality MODEL [--format F] [--kv F] [--against BASE]`: prints one JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.quality", description="Measure what formats cost in quality."
    )
    parser.add_argument("model", help="name, path or hf:owner/name")
    parser.add_argument("--format", help="of weights (default: as a quantized model has them, else int8)")
    parser.add_argument("--kv", default="bf16", choices=KV_FORMATS)
    parser.add_argument("--against", metavar="BASE", help="the model that it is a quantized copy of")
    args = parser.parse_args(argv)
    try:
        path = locate(args.model)
        weight_format = args.format or stored_format(path) or "int8"
        base = str(locate(args.against)) if args.against else None
        quality = measure(str(path), weight_format, args.kv, against=base)
    except EngineError as error:
        sys.stderr.write(f"The quality can't be measured: {error}\n")
        return 1
    report: dict[str, Any] = {**asdict(quality), "is_good": quality.is_good}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
