"""The alert rules of a deployment, for Prometheus: what an operator must hear of, and nothing that mends itself.

Each rule has an entry under its name in README's runbook: what it means, which command to run, when to wake someone.
Rules take the largest or smallest value over processes, because every API process shows the same deployment. A rule's
`wait` is how long its expression must hold; expressions look back by themselves where a moment says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule. `critical` wakes someone; `warning` waits for the morning."""

    name: str
    expr: str
    wait: str
    severity: Severity
    says: str


_MODEL = "{{ $labels.model }} ({{ $labels.model_digest }})"  # a project's own are all named `private`
_ENDED_LINES = (  # every API process counts all of them
    "sum by (model, model_digest) (max by (model, model_digest, outcome) (increase(batchsvc_lines_total[30m])))"
)

ALERTS = (
    Alert(
        name="BatchsvcTargetDown",
        expr='up{job=~"batchsvc.*"} == 0',
        wait="2m",
        severity="critical",
        says="Prometheus can't scrape {{ $labels.instance }}: the process is gone, or nobody can reach it.",
    ),
    Alert(
        name="BatchsvcDatabaseDown",
        expr='min(batchsvc_part_up{part="database"}) == 0',
        wait="1m",
        severity="critical",
        says="A process can't write to the database: calls get 503, and workers claim nothing.",
    ),
    Alert(
        name="BatchsvcStoreDown",
        expr='min(batchsvc_part_up{part="store"}) == 0',
        wait="2m",
        severity="critical",
        says="A process can't use the object store: uploads get 503, and finished lines wait in memory.",
    ),
    Alert(
        name="BatchsvcRedisDown",
        expr='min(batchsvc_part_up{part="redis"}) == 0',
        wait="10m",
        severity="warning",
        says="Redis doesn't answer: all goes on, later; interactive calls fail, and rate limits are kept per process.",
    ),
    Alert(
        name="BatchsvcRequestsFail",
        expr=(
            'sum(increase(batchsvc_http_requests_total{outcome="5xx"}[5m])) '
            "> 0.05 * sum(increase(batchsvc_http_requests_total[5m]))"
        ),
        wait="5m",
        severity="critical",
        says="More than one in twenty calls of the API gets a 5xx.",
    ),
    Alert(
        name="BatchsvcNotReady",
        expr="min(batchsvc_ready) == 0",
        wait="30m",
        severity="warning",
        says="A process has not been ready for half an hour: its /readyz names the part.",
    ),
    Alert(
        name="BatchsvcReaperStopped",
        expr="time() - max(batchsvc_reaper_last_tick_timestamp_seconds) > 120",
        wait="1m",
        severity="critical",
        says="No reaper has ended a tick for two minutes: dead leases, deadlines and webhooks wait.",
    ),
    Alert(
        name="BatchsvcReaperFailing",
        expr="sum(increase(batchsvc_reaper_step_failures_total[15m])) > 5",
        wait="5m",
        severity="warning",
        says="Steps of the reapers fail again and again.",
    ),
    Alert(
        name="BatchsvcTasksCrash",
        expr='sum by (task) (increase(batchsvc_tasks_total{outcome="crashed"}[15m])) > 0',
        wait="0m",
        severity="warning",
        says="The task {{ $labels.task }} ended by a defect or by damaged data.",
    ),
    Alert(
        name="BatchsvcNoWorker",
        expr=(
            "max by (model, model_digest) (batchsvc_units_claimable) > 0 "
            "and max by (model, model_digest) (batchsvc_workers_serving) == 0"
        ),
        wait="5m",
        severity="critical",
        says=f"{_MODEL} has work that may run now, and no engine worker that serves it, not even in turn.",
    ),
    Alert(
        name="BatchsvcWorkNotStarting",
        expr=(
            "(max by (model, model_digest) (batchsvc_claimable_age_seconds) > 600 "
            "and max by (model, model_digest) (batchsvc_workers_live) > 0 "
            "and max by (model, model_digest) (batchsvc_units_leased) == 0) "
            # a model that has its turn later may wait for long (model_switch.py), but not for ever
            "or (max by (model, model_digest) (batchsvc_claimable_age_seconds) > 3600 "
            "and max by (model, model_digest) (batchsvc_workers_serving) > 0 "
            "and max by (model, model_digest) (max_over_time(batchsvc_units_leased[1h])) == 0)"
        ),
        wait="5m",
        severity="critical",
        says=f"Workers of {_MODEL} live, and none takes the work that waits for them.",
    ),
    Alert(
        name="BatchsvcDeadlineAtRisk",
        expr="min by (tier, model, model_digest) (batchsvc_deadline_slack_seconds) < 0",
        wait="5m",
        severity="critical",
        says=(
            "At today's rate a batch ({{ $labels.tier }}) may miss its deadline. "
            f"Its model, unless it has several: {_MODEL}."
        ),
    ),
    Alert(
        name="BatchsvcLeasesLost",
        expr="max(increase(batchsvc_leases_lost_total[15m])) > 0",
        wait="0m",
        severity="warning",
        says="Engine workers died or were cut off with units in their hands; others go on with these.",
    ),
    Alert(
        name="BatchsvcBatchStuck",
        expr="max by (state) (batchsvc_state_age_seconds) > 3600",
        wait="5m",
        severity="warning",
        says="A batch has been {{ $labels.state }} for over an hour.",
    ),
    Alert(
        name="BatchsvcLineQuarantined",
        expr="max(increase(batchsvc_lines_quarantined_total[1h])) > 0",
        wait="0m",
        severity="warning",
        says="A line ended its engine again and again, and got an error instead of another run.",
    ),
    Alert(
        name="BatchsvcBatchPaused",
        expr="max(batchsvc_batches_paused) > 0",
        wait="30m",
        severity="warning",
        says="A batch is paused by an operator, or because engines crashed with it; its deadline goes on.",
    ),
    Alert(
        name="BatchsvcClaimsHeld",
        expr="max by (kind) (batchsvc_claim_holds) > 0",
        wait="30m",
        severity="warning",
        says="An operator's order that nothing new is claimed stands (kind: {{ $labels.kind }}).",
    ),
    Alert(
        name="BatchsvcErrorLines",
        expr=(
            'max by (model, model_digest) (increase(batchsvc_lines_total{outcome="error"}[30m])) '
            f"> 0.2 * {_ENDED_LINES} and {_ENDED_LINES} > 20"  # one bad line is no news
        ),
        wait="10m",
        severity="warning",
        says=f"More than a fifth of the lines of {_MODEL} end as errors.",
    ),
    Alert(
        name="BatchsvcResultsDamaged",
        expr="max(increase(batchsvc_parts_damaged_total[1h])) > 0",
        wait="0m",
        severity="warning",
        says="Stored results were missing or damaged; their lines ran again, at nobody's cost.",
    ),
    Alert(
        name="BatchsvcWebhooksLate",
        expr="max(batchsvc_outbox_age_seconds) > 900",
        wait="5m",
        severity="warning",
        says="A webhook has waited for a quarter of an hour.",
    ),
    Alert(
        name="BatchsvcExportsLate",
        expr="max(batchsvc_export_age_seconds) > 3600",
        wait="5m",
        severity="warning",
        says="Results have waited for a tenant's store for an hour.",
    ),
    Alert(
        name="BatchsvcLedgerDiffers",
        expr="max(batchsvc_unreconciled_nanos) > 0 or max(batchsvc_reconcile_differences) > 0",
        wait="0m",
        severity="critical",
        says="A batch doesn't add up: lines, usage, ledger or bill differ.",
    ),
)


def rules_yaml() -> str:
    """The rules as a file for `rule_files`. A JSON string is a YAML string, so every text is quoted as one."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Made by `batchsvc alerts`: see the runbook in README for each rule."
    yield "groups:"
    yield "  - name: batchsvc"
    yield "    rules:"
    for alert in ALERTS:
        yield f"      - alert: {alert.name}"
        yield f"        expr: {json.dumps(alert.expr)}"
        yield f"        for: {alert.wait}"
        yield "        labels:"
        yield f"          severity: {alert.severity}"
        yield "        annotations:"
        yield f"          summary: {json.dumps(alert.says)}"
        yield f"          runbook: {json.dumps(f'README, Runbook, {alert.name}')}"
