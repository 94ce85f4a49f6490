"""What engine workers say of themselves with their heartbeats, as an operator sees it: pure, from their stored words.

A worker that hasn't said something yet, or is older than we are, shows zeros for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LANES = ("interactive", "batch")
"""In their order of priority."""


def view(
    stats: Mapping[str, Any], *, worker_id: str, model: str, model_digest: str, is_draining: bool, silent_s: float
) -> dict[str, Any]:
    """One worker. Shares are of what there is: KV blocks, prompt tokens, time, computed tokens."""
    lanes = {name: _lane(dict(stats.get("lanes") or {}).get(name) or {}) for name in LANES}
    computed = sum(lane["computed_tokens"] for lane in lanes.values())
    for lane in lanes.values():
        lane["share"] = _share(lane["computed_tokens"], computed)
    steps = stats.get("step_times") or {}
    return {
        "id": worker_id,
        "model": model,
        "model_digest": model_digest,
        "is_draining": is_draining,
        "silent_s": round(silent_s, 1),
        "units": stats.get("units", 0),
        "steps": stats.get("steps", 0),
        "step_p50_s": steps.get("p50_s"),
        "step_p99_s": steps.get("p99_s"),
        "kv_blocks": stats.get("num_blocks", 0),
        "kv_used_blocks": stats.get("used_blocks", 0),
        "kv_share": _share(stats.get("used_blocks", 0), stats.get("num_blocks", 0)),
        "hit_share": _share(stats.get("hit_tokens", 0), stats.get("prompt_tokens", 0)),
        "busy_share": stats.get("busy_share", 0.0),
        "preemptions": stats.get("preemptions", 0),
        "lanes": lanes,
    }


def _lane(said: Mapping[str, Any]) -> dict[str, Any]:
    ttft, gaps = said.get("ttft") or {}, said.get("gaps") or {}
    counts = ("running", "waiting", "prompt_tokens", "hit_tokens", "computed_tokens", "output_tokens")
    return {
        **{name: said.get(name, 0) for name in counts},
        "output_tps": said.get("output_tps", 0.0),
        "ttft_p50_s": ttft.get("p50_s"),
        "ttft_p99_s": ttft.get("p99_s"),
        "itl_p50_s": gaps.get("p50_s"),
        "itl_p99_s": gaps.get("p99_s"),
    }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
