"""How a batch ended, told to a person and as an exit code."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from batchsvc.cli import formats
from batchsvc.cli.console import Console
from batchsvc.cli.exits import Exit, allowed_errors
from batchsvc.cli.follow import clock
from batchsvc.money import format_dollars

_SHOWN_PROBLEMS = 20
_OVER_BUDGET = frozenset({"budget_exceeded", "insufficient_balance", "insufficient_quota", "token_limit_exceeded"})


def exit_of(batch: dict[str, Any], allow_errors: str | None) -> Exit:
    """The exit code of an ended batch."""
    status = batch["status"]
    if status == "failed":
        return Exit.ENDED_EARLY if _codes(batch) & _OVER_BUDGET else Exit.REFUSED
    if status in ("expired", "cancelled"):
        return Exit.ENDED_EARLY
    if batch.get("lines_over_budget"):
        return Exit.ENDED_EARLY
    counts = batch.get("request_counts") or {}
    failed = counts.get("failed", 0)
    return Exit.OK if failed <= allowed_errors(allow_errors, counts.get("total", 0)) else Exit.ERROR_LINES


def tell_problems(batch: dict[str, Any], console: Console, *, all_by: str | None = None) -> None:
    """Why a batch failed: the problems with their lines, and the way out of the usual ones.

    `all_by` is the command that lists all of them.
    """
    problems = _problems(batch)
    total = batch.get("errors_total") or len(problems)
    console.say(f"{batch['id']} was refused: {total:,} problem{'' if total == 1 else 's'}.")
    for problem in problems[:_SHOWN_PROBLEMS]:
        where = f"line {problem['line']}: " if problem.get("line") is not None else ""
        console.say(f"  {where}{problem.get('message')} ({problem.get('code')})")
    if total > _SHOWN_PROBLEMS:
        command = all_by or f"batchsvc show {batch['id']} --json"
        console.say(f"  ... and {total - _SHOWN_PROBLEMS:,} more: `{command}` lists them.")
    if "model_not_found" in _codes(batch):
        console.say(
            "Let the file's model name mean one of ours with `batchsvc models alias NAME smollm2-135m`, "
            "or run every line on one model with --model; `batchsvc models list` shows which there are."
        )
    elif any(problem.get("line") is not None for problem in problems):
        console.say("Correct these lines, or add --skip-invalid to turn each into an error line.")


def summary(
    batch: dict[str, Any],
    console: Console,
    *,
    results: str = "",
    elapsed_s: float | None = None,
    before: dict[str, Any] | None = None,
) -> None:
    """The figures of an ended batch. Its speed is of the `elapsed_s` since it looked like `before`."""
    counts, usage = batch.get("request_counts") or {}, batch.get("usage") or {}
    total, failed = counts.get("total", 0), counts.get("failed", 0)
    tokens_in, tokens_out = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens", 0)
    share = f"{100 * cached / tokens_in:.1f} %" if tokens_in else "0 %"
    says = {
        "Batch": f"{batch['id']} {batch['status']}",
        "Lines": f"{total:,}: {counts.get('completed', 0):,} answered, {failed:,} failed",
        "Tokens": f"{tokens_in:,} input, of them {cached:,} cached ({share}); {tokens_out:,} output",
    }
    if ran_in := formats.told(batch):
        says["Formats"] = ran_in
    if elapsed_s:
        earlier = (before or {}).get("usage") or {}
        new_in, new_out = tokens_in - earlier.get("input_tokens", 0), tokens_out - earlier.get("output_tokens", 0)
        rate, out_rate = (new_in + new_out) / elapsed_s, new_out / elapsed_s
        says["Speed"] = f"{rate:,.1f} tokens/s, of them {out_rate:,.1f} output, in {clock(elapsed_s)}"
    if "cost_nanos" in usage:
        standard = usage.get("standard_nanos")
        beside = f" (at the standard price {format_dollars(standard)})" if standard is not None else ""
        says["Cost"] = f"{format_dollars(usage['cost_nanos'])} at the batch price{beside}"
    if over := batch.get("lines_over_budget"):
        says["Over budget"] = f"{over:,} lines were not run: what they can cost is more than was left"
    if results:
        says["Results"] = results
    console.fields(says)


def local_time(seconds: int) -> str:
    """A time of the API as the user's clock shows it."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def elapsed_of(batch: dict[str, Any]) -> float | None:
    """Seconds from the start of the work to its end, from the batch's own stamps."""
    start = batch.get("in_progress_at")
    end = batch.get("finalizing_at") or batch.get("completed_at") or batch.get("cancelled_at")
    return max(1.0, float(end - start)) if start and end else None


def _problems(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return list((batch.get("errors") or {}).get("data") or [])


def _codes(batch: dict[str, Any]) -> set[str]:
    return {str(problem.get("code")) for problem in _problems(batch)}
