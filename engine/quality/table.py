"""The rows of a quality report as cells of text, and as a Markdown table; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.quality.limits import Limit, Word, shown_change

COLUMNS = (
    *("model", "weights", "KV", "against", "mean KL", "KL of 1 in 100", "1 in 1,000", "largest"),
    *("same first token", "perplexity", "limits", "verdict"),
)
NOTE = (
    "KL in nats over {tokens:,} positions of {text}, ± standard errors; 1 in 100 positions has a larger KL than its "
    "figure says. Limits are of the mean KL and of the change of perplexity, for weights and for KV each their own. "
    "What is over a limit is served only where that is forced."
)


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """One row, by column."""
    tail = {point["share"]: point["kl"] for point in row["kl_tail"]}
    limit = row["limit"]
    return dict(
        zip(
            COLUMNS,
            (
                row["model"],
                row["weight_format"],
                row["kv_format"],
                row["against"],
                f"{_kl(row['kl'])} ± {_kl(row['kl_error'])}",
                _kl(tail[0.01]),
                _kl(tail[0.001]),
                _kl(tail[0.0]),
                "not a number" if row["top1"] is None else f"{100 * row['top1']:.1f} %",
                _perplexity(row["perplexity"], row["perplexity_ratio"], row["perplexity_error"]),
                "" if limit is None else str(Limit(**limit)),
                "not quantized" if row["verdict"] == Word.UNQUANTIZED else row["verdict"],
            ),
            strict=True,
        )
    )


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a table for a README."""
    lines = [_line(COLUMNS), "|" + "---|" * len(COLUMNS)]
    lines += [_line(tuple(cells(row).values())) for row in report["rows"]]
    return "\n".join([*lines, "", note(report), ""])


def note(report: Mapping[str, Any]) -> str:
    """What the figures are."""
    return NOTE.format(tokens=max(row["tokens"] for row in report["rows"]), text=report["text"])


def _line(values: tuple[str, ...]) -> str:
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"


def _kl(value: float | None) -> str:
    if value is None:
        return "not a number"
    if 0 < value < 0.001:
        return f"{value:.2g}"
    return f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _perplexity(value: float | None, ratio: float | None, error: float | None) -> str:
    if value is None or ratio is None:
        return "not a number"
    return f"{value:,.2f}, {shown_change(ratio)}" + ("" if error is None else f" ± {100 * error:.2g}")
