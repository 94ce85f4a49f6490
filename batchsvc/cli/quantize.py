"""`batchsvc models quantize`: a smaller copy of a model, made by `python -m engine.quant` in a process of its own.

That process tells a JSON line for each layer, and at the end what it wrote or why it can't.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsvc.cli import engine_child
from batchsvc.cli.console import Console
from batchsvc.cli.options import JsonOption
from batchsvc.cli.target import absolute_model

_TOLD_LAYERS = 10
"""How often a log is told of progress."""


class Method(StrEnum):
    """How codes are chosen."""

    GPTQ = "gptq"
    AWQ = "awq"
    RTN = "rtn"


class Bits(StrEnum):
    """What weights become."""

    FOUR = "4"
    EIGHT = "8"
    FP8 = "fp8"


class Layout(StrEnum):
    """How they are stored."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"
    AWQ = "awq"


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, path, or hf:owner/name.")],
    method: Annotated[Method, typer.Option(help="gptq and awq calibrate on text; rtn rounds to nearest.")],
    bits: Annotated[Bits, typer.Option(help="Of a weight; fp8 are numbers of 8 bits with a scale a row.")] = Bits.FOUR,
    group: Annotated[int, typer.Option(metavar="32|64|128", help="Columns that share a scale.")] = 64,
    calib: Annotated[Path | None, typer.Option(metavar="FILE", help="JSONL of chats, prompts or texts.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Most tokens of FILE that are used.")] = 32_768,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to (default: a new directory here).")] = None,
    save_as: Annotated[Layout, typer.Option(help="Layout of the files.")] = Layout.COMPRESSED_TENSORS,
    zero_points: Annotated[
        bool | None,
        typer.Option("--zero-points/--symmetric", help="Whether each group has a zero (default: with awq)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Quantize a model's weights in groups, or to fp8; `batchsvc run --model DIR` runs the result."""
    console = Console(as_json=as_json)
    spelled = absolute_model(model)
    kind = bits if bits is Bits.FP8 else f"w{bits}g{group}"
    target = (out or Path(f"{Path(model).stem}-{method}-{kind}")).expanduser().absolute()
    argv = [spelled, str(target), "--method", method, "--save-as", save_as, "--tokens", str(tokens)]
    argv += ["--bits", bits, "--group", str(group)]
    if calib is not None:
        argv += ["--calib", str(calib.expanduser().absolute())]
    if zero_points is not None:
        argv.append("--zero-points" if zero_points else "--no-zero-points")

    def told(line: dict[str, Any]) -> None:
        if line["layer"] % max(line["layers"] // _TOLD_LAYERS, 1) == 0:
            console.say(f"Layer {line['layer']} of {line['layers']} is quantized.")

    done = engine_child.ask("engine.quant", argv, told)
    before, after = done["bytes_before"] / 1e6, done["bytes_after"] / 1e6
    console.out(f"{target} holds the quantized model: {after:,.0f} MB, from {before:,.0f} MB.")
    console.out(f"See what that costs in quality: batchsvc models eval {target}")
    console.out(f"Run it with: batchsvc run FILE.jsonl --model {target}")
    console.result(done)
