"""What `status` says of a stack beyond its processes: paused claims, drained workers, batches that don't move."""

from __future__ import annotations

from collections import Counter
from typing import Any

from batchsvc.cli import claims
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import StackState

_TIMEOUT_S = 10.0


def look(state: StackState, directory: DataDir) -> dict[str, Any]:
    """Lists by name, for --json; empty where the API doesn't answer, which `status` says elsewhere."""
    import httpx

    try:
        key = directory.admin_key.read_text(encoding="utf-8").strip()
        with httpx.Client(
            base_url=f"{state.url}/admin/",
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT_S,
            trust_env=False,
        ) as client:
            found = {
                name: client.get(path).raise_for_status().json()
                for name, path in (("claims", "claims"), ("workers", "workers"), ("stuck", "batches/stuck"))
            }
            return {
                "claims": found["claims"]["data"],
                "drained": [row for row in found["workers"]["data"] if row["drain_reason"]],
                "stuck": found["stuck"]["data"],
            }
    except (OSError, httpx.HTTPError, ValueError, KeyError):
        return {"claims": [], "drained": [], "stuck": []}


def sentences(found: dict[str, Any]) -> list[str]:
    """What an operator should see, a line each."""
    says = claims.lines({"data": found["claims"]})
    for worker in found["drained"]:
        name = worker["name"] or worker["id"]
        says.append(f"The worker {name} is {worker['state']}: {worker['drain_reason']}")
    reasons = Counter(row["reason"] for row in found["stuck"])
    for reason, count in reasons.most_common():
        batches = "A batch doesn't move" if count == 1 else f"{count} batches don't move"
        says.append(f"{batches}: {reason} (`batchsvc batches stuck` says what to do)")
    return says
