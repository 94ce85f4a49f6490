"""What came of a run, as JSON, as a Markdown table and as a plot of the loss, in the student's own directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.distill.plot import svg

FOLDER = "distillation"

_ROWS = (
    ("kl", "mean KL to the teacher, nats"),
    ("top1", "same first token"),
    ("perplexity", "perplexity of the answers"),
    ("teacher_perplexity", "the teacher's"),
    ("accepted_per_verify", "accepted tokens a verification, of 4 proposed"),
    ("student_tokens_per_s", "tokens/s alone"),
    ("teacher_tokens_per_s", "the teacher's"),
    ("steps", "steps"),
    ("loss", "loss at the end"),
    ("train_s", "seconds of training"),
    ("trained_lines", "lines learned from"),
    ("held_out_lines", "held-out lines"),
)


def markdown(report: Mapping[str, Any]) -> str:
    """The figures as a table."""
    rows = [f"| {name} | {'' if report.get(key) is None else report[key]} |" for key, name in _ROWS]
    if report.get("accepted_says"):
        rows.append(f"\nAs a draft it isn't measured: {report['accepted_says']}.")
    head = f"Student of {report['teacher']}, measured on lines that it hasn't seen, in float32; speeds of this machine."
    return "\n".join([head, "", "| | |", "|---|---|", *rows, ""])


def write(folder: Path, report: Mapping[str, Any], losses: Sequence[float]) -> None:
    """Writes report.json, report.md and loss.svg to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "report.json": json.dumps(report, indent=2, ensure_ascii=False) + "\n",
        "report.md": markdown(report),
        "loss.svg": svg(losses, f"Loss of {len(losses):,} steps"),
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
