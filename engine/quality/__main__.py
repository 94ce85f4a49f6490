"""`python -m engine.quality MODEL...`: the quality report; a JSON line a sentence, the last one is the report.

The report is written as JSON, as a Markdown table and as a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import KV_FORMATS, WEIGHT_FORMATS
from engine.errors import ConfigError, EngineError
from engine.quality import kept
from engine.quality.measure import DEFAULT_TOKENS
from engine.quality.plot import svg
from engine.quality.report import evaluate
from engine.quality.table import markdown

DEFAULT_FORMATS = "bf16,int8"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.quality", description="Measure what formats cost models in quality."
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="name, path or hf:owner/name")
    parser.add_argument("--against", metavar="BASE", help="the model that quantized ones were made from")
    parser.add_argument("--formats", default=DEFAULT_FORMATS, help="of weights, of models that aren't quantized yet")
    parser.add_argument("--kv", default=DEFAULT_FORMATS, help="of the KV cache")
    parser.add_argument("--text", type=Path, metavar="FILE", help="measure on this text instead of ours")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="most tokens of it that are used")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes (default: the user's cache)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    try:
        report = evaluate(
            args.models,
            against=args.against,
            weight_formats=_named("--formats", args.formats, WEIGHT_FORMATS),
            kv_formats=_named("--kv", args.kv, KV_FORMATS),
            file=args.text,
            tokens=args.tokens,
            say=lambda sentence: _tell({"say": sentence}),
        )
        report["files"] = write(report, args.out or kept.folder() / "reports" / report["rows"][0]["digest"][:16])
    except EngineError as error:
        _tell({"error": str(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    _tell(report)
    return 0


def write(report: dict[str, Any], target: Path) -> list[str]:
    """Writes quality.json, quality.md and quality.svg; their paths. Raises ConfigError."""
    contents = {
        "quality.json": json.dumps(report, indent=2, ensure_ascii=False) + "\n",
        "quality.md": markdown(report),
        "quality.svg": svg(report),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (target / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The report can't be written to {target}: {error.strerror or error}.") from error
    return [str(target / name) for name in contents]


def _named(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The formats of a list with commas, each once. Raises ConfigError."""
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in found:
        if word not in known:
            raise ConfigError(f"{option} can't be {word!r}: it takes {', '.join(known)}, with commas between.")
    if not found:
        raise ConfigError(f"{option} names no format: it takes {', '.join(known)}, with commas between.")
    return found


def _tell(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
