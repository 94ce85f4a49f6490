"""`batchsvc models quantize`: a smaller copy of a model, made by `python -m engine.quant` in a process of its own.

That process tells a JSON line for each layer, and at the end what it wrote or why it can't.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import JsonOption
from batchsvc.cli.target import absolute_model

_TOLD_LAYERS = 10
"""How often a log is told of progress."""


class Method(StrEnum):
    """How codes are chosen."""

    GPTQ = "gptq"
    AWQ = "awq"
    RTN = "rtn"


class Layout(StrEnum):
    """How they are stored."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"
    AWQ = "awq"


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, path, or hf:owner/name.")],
    method: Annotated[Method, typer.Option(help="gptq and awq calibrate on text; rtn rounds to nearest.")],
    bits: Annotated[int, typer.Option(metavar="4|8", help="Of a weight.")] = 4,
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
    """Quantize a model's weights in groups; `batchsvc run --model DIR` runs the result."""
    console = Console(as_json=as_json)
    spelled = absolute_model(model)
    target = (out or Path(f"{Path(model).stem}-{method}-w{bits}g{group}")).expanduser().absolute()
    argv = [spelled, str(target), "--method", method, "--save-as", save_as, "--tokens", str(tokens)]
    argv += ["--bits", str(bits), "--group", str(group)]
    if calib is not None:
        argv += ["--calib", str(calib.expanduser().absolute())]
    if zero_points is not None:
        argv.append("--zero-points" if zero_points else "--no-zero-points")
    done = _run(argv, console)
    before, after = done["bytes_before"] / 1e6, done["bytes_after"] / 1e6
    console.out(f"{target} holds the quantized model: {after:,.0f} MB, from {before:,.0f} MB.")
    console.out(f"Run it with: batchsvc run FILE.jsonl --model {target}")
    console.result(done)


def _run(argv: list[str], console: Console) -> dict[str, Any]:
    """What the quantizing process wrote last. Raises CommandError when it failed, with its sentence."""
    last: dict[str, Any] = {}
    with _quantizer(argv) as (lines, process):
        for line in lines:
            last = json.loads(line)
            if "layer" in last and last["layer"] % max(last["layers"] // _TOLD_LAYERS, 1) == 0:
                console.say(f"Layer {last['layer']} of {last['layers']} is quantized.")
        code = process.wait()
    if "error" in last:
        raise CommandError(last["error"], Exit.REFUSED)
    if code != 0 or "path" not in last:
        raise CommandError(f"The quantizing process ended with code {code} and wrote no model.")
    return last


@contextmanager
def _quantizer(argv: list[str]) -> Iterator[tuple[Iterator[str], subprocess.Popen[str]]]:
    command = [sys.executable, "-P", "-m", "engine.quant", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None, "its output is a pipe"
        try:
            yield iter(process.stdout), process
        except BaseException:
            process.terminate()
            raise
