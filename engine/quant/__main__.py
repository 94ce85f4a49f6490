"""`python -m engine.quant MODEL OUT`: quantizes a model; a JSON line a layer, the last one says what came of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.errors import ConfigError, EngineError
from engine.load.fetch import locate
from engine.load.meta import ModelMeta, read_meta
from engine.load.origin import described
from engine.load.weights import open_model
from engine.quant.calibration import read_sequences
from engine.quant.groups import BITS, GROUPS, Scheme
from engine.quant.layouts import LAYOUTS
from engine.quant.recipe import CALIBRATED, METHODS, Recipe, check_widths, quantized
from engine.quant.save import DTYPES, save
from engine.text import load_text

DEFAULT_TOKENS = 32768
MOST_SEQUENCE_TOKENS = 2048


def quantize(
    model: str,
    target: Path,
    *,
    method: str,
    bits: int,
    group: int,
    layout: str,
    symmetric: bool,
    is_float: bool = False,
    act_order: bool = True,
    calibration: Path | None = None,
    tokens: int = DEFAULT_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Quantizes the model at a path, name or hub name into the new directory `target`; what was done, as plain data.

    Raises EngineError in one sentence.
    """
    scheme = Scheme(bits=bits, group=group, symmetric=symmetric, is_float=is_float, scale_dtype=DTYPES[layout])
    _check(scheme, layout, method, calibration)
    meta = read_meta(locate(model))
    config, source = open_model(meta.path)
    check_widths(config, scheme, meta.name)
    sequences = _sequences(meta, calibration, tokens) if method in CALIBRATED and calibration else []
    recipe = Recipe(method=method, scheme=scheme, act_order=act_order)
    made = {
        "method": method,
        "bits": "fp8" if is_float else bits,
        "group": None if is_float else group,
        "symmetric": symmetric,
        "layout": layout,
        "calibration_tokens": sum(map(len, sequences)),
    }
    with torch.inference_mode():
        parameters = quantized(config, source, recipe, sequences, progress)
        save(target, meta, config, scheme, layout, parameters, described(model, meta, made))
    return {
        "path": str(target),
        **made,
        "bytes_before": meta.weight_bytes,
        "bytes_after": read_meta(target).weight_bytes,
    }


def _check(scheme: Scheme, layout: str, method: str, calibration: Path | None) -> None:
    if scheme.is_float and (method in CALIBRATED or layout != "compressed-tensors" or not scheme.symmetric):
        raise ConfigError("fp8 is rounded to nearest, without zero points, and saved as compressed-tensors only.")
    if scheme.is_float:
        return
    if scheme.bits not in BITS or scheme.group not in GROUPS:
        raise ConfigError(
            f"Weights have 4 or 8 bits in groups of 32, 64 or 128, not {scheme.bits} bits in groups of {scheme.group}."
        )
    if method in CALIBRATED and calibration is None:
        raise ConfigError(f"The method {method} calibrates on text: give a JSONL file with --calib.")
    if layout == "gptq" and not scheme.symmetric:
        raise ConfigError("GPTQ files with zero points are read by few; save as compressed-tensors or awq instead.")
    if layout == "awq" and scheme.bits != 4:
        raise ConfigError(f"AWQ files hold 4 bits, not {scheme.bits}; save as compressed-tensors or gptq instead.")


def _sequences(meta: ModelMeta, calibration: Path, tokens: int) -> list[list[int]]:
    most = min(meta.context_tokens, MOST_SEQUENCE_TOKENS)
    return read_sequences(calibration, load_text(meta.path), tokens=tokens, most=most)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.quant", description="Quantize a model in groups.")
    parser.add_argument("model", help="name, path or hf:owner/name")
    parser.add_argument("target", type=Path, help="the directory to make")
    parser.add_argument("--method", default="gptq", choices=METHODS)
    parser.add_argument("--bits", default="4", help="4, 8, or fp8: numbers of 8 bits with a scale a row")
    parser.add_argument("--group", type=int, default=64, help="columns that share a scale")
    parser.add_argument("--calib", type=Path, help="JSONL file of calibration text")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="most tokens of it that are used")
    parser.add_argument("--save-as", default="compressed-tensors", choices=tuple(LAYOUTS))
    parser.add_argument(
        "--zero-points", action=argparse.BooleanOptionalAction, help="each group has a zero (default: with awq)"
    )
    parser.add_argument("--act-order", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    is_float = args.bits == "fp8"
    has_zeros = args.method == "awq" if args.zero_points is None else args.zero_points
    try:
        done = quantize(
            args.model,
            args.target,
            method=args.method,
            bits=8 if is_float else _bits(args.bits),
            is_float=is_float,
            group=args.group,
            layout=args.save_as,
            symmetric=not has_zeros,
            act_order=args.act_order,
            calibration=args.calib,
            tokens=args.tokens,
            progress=lambda layer, layers: _tell({"layer": layer, "layers": layers}),
        )
    except EngineError as error:
        _tell({"error": str(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    _tell(done)
    return 0


def _bits(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 3 else 0


def _tell(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
