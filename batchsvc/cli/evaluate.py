"""`batchsvc models eval`: what formats cost models in quality, measured by `python -m engine.quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from batchsvc.cli import engine_child
from batchsvc.cli.console import Console
from batchsvc.cli.options import JsonOption
from batchsvc.cli.target import absolute_model


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names, paths, or hf:owner/name.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="What quantized ones were made from (default: what `quantize` noted)."),
    ] = None,
    formats: Annotated[
        str, typer.Option(metavar="F,F", help="Of weights: float32, bf16, int8, fp8; quantized ones run as they are.")
    ] = "bf16,int8",
    kv: Annotated[str, typer.Option(metavar="F,F", help="Of the KV cache.")] = "bf16,int8",
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure on this text, not on ours; serving goes by ours.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Most tokens of the text that are used.")] = 16_384,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Where the report goes (default: your cache directory)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what formats cost in quality: perplexity, KL, its tails, and whether they may be served.

    Writes quality.json, quality.md and quality.svg. A model that isn't quantized is held against itself in float32.
    """
    from engine.quality import table

    console = Console(as_json=as_json)
    argv = [absolute_model(model) for model in models]
    argv += ["--formats", formats, "--kv", kv, "--tokens", str(tokens)]
    if against is not None:
        argv += ["--against", absolute_model(against)]
    for option, path in (("--text", text), ("--out", out)):
        if path is not None:
            argv += [option, str(path.expanduser().absolute())]
    report = engine_child.ask("engine.quality", argv, lambda line: console.say(line["say"]))
    rows = [table.cells(row) for row in report["rows"]]
    console.table(rows, table.COLUMNS)
    console.out("")
    console.out(table.note(report))
    for row in report["rows"]:
        if row["verdict"] == "over":
            console.out(_refusal(row))
    console.out(f"Written: {', '.join(report['files'])}")
    console.result(report)


def _refusal(row: dict[str, Any]) -> str:
    what = f"with KV in {row['kv_format']}" if row["of"] == "kv" else f"in {row['weight_format']}"
    return f"{row['model']} isn't served {what}, unless forced by --force-format or BATCHSVC_FORCE_FORMAT=true."
