"""A Grafana dashboard of a deployment, as JSON to import: work, deadlines, engines, money, and the processes.

Panels come in rows of three. Legends end with the digest of a model, since all that belong to one project are named
`private`. The data source is chosen in Grafana (a variable), so nothing of a deployment stands here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_WIDTH, _HEIGHT = 8, 8  # of Grafana's 24 columns
_SCHEMA = 39


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph: `lines` are expressions with their legends, `unit` is Grafana's name of one."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _quantile(share: float, name: str, by: str = "model, model_digest, lane") -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({name}_bucket[5m])))"


PANELS = (
    Panel(
        title="Calls of the API a second",
        unit="short",
        lines=(("sum by (outcome) (rate(batchsvc_http_requests_total[5m]))", "{{outcome}}"),),
    ),
    Panel(
        title="Time of a call",
        unit="s",
        lines=(
            ("histogram_quantile(0.5, sum by (le) (rate(batchsvc_http_request_seconds_bucket[5m])))", "median"),
            ("histogram_quantile(0.99, sum by (le) (rate(batchsvc_http_request_seconds_bucket[5m])))", "p99"),
        ),
    ),
    Panel(title="Batches", unit="short", lines=(("max by (status) (batchsvc_batches)", "{{status}}"),)),
    Panel(
        title="Units",
        unit="short",
        lines=(
            ("max by (model, model_digest) (batchsvc_units_claimable)", "{{model}} claimable {{model_digest}}"),
            ("max by (model, model_digest) (batchsvc_units_leased)", "{{model}} leased {{model_digest}}"),
            ("max by (model, model_digest) (batchsvc_units_suspect)", "{{model}} suspect {{model_digest}}"),
        ),
    ),
    Panel(
        title="Deadline slack",
        unit="s",
        lines=(
            (
                "min by (tier, model, model_digest) (batchsvc_deadline_slack_seconds)",
                "{{tier}} {{model}} {{model_digest}}",
            ),
        ),
    ),
    Panel(
        title="Backlog and age of the oldest claimable work",
        unit="s",
        lines=(
            ("max by (model, model_digest) (batchsvc_backlog_seconds)", "{{model}} backlog {{model_digest}}"),
            ("max by (model, model_digest) (batchsvc_claimable_age_seconds)", "{{model}} age {{model_digest}}"),
        ),
    ),
    Panel(
        title="Lines a second",
        unit="short",
        lines=(
            (
                "max by (model, model_digest, outcome) (rate(batchsvc_lines_total[5m]))",
                "{{model}} {{outcome}} {{model_digest}}",
            ),
            ("sum by (outcome) (rate(batchsvc_unrun_lines_total[5m]))", "unrun {{outcome}}"),
        ),
    ),
    Panel(
        title="Billed tokens a second",
        unit="short",
        lines=(
            (
                "max by (model, model_digest, kind) (rate(batchsvc_line_tokens_total[5m]))",
                "{{model}} {{kind}} {{model_digest}}",
            ),
        ),
    ),
    Panel(
        title="Generated tokens a second",
        unit="short",
        lines=(
            (
                "max by (model, model_digest, lane) (batchsvc_output_tokens_per_second)",
                "{{model}} {{lane}} {{model_digest}}",
            ),
        ),
    ),
    Panel(
        title="Speed of an answer (tokens a second)",
        unit="short",
        lines=(
            (_quantile(0.5, "batchsvc_answer_tokens_per_second"), "{{model}} {{lane}} median {{model_digest}}"),
            (_quantile(0.05, "batchsvc_answer_tokens_per_second"), "{{model}} {{lane}} slowest 5 % {{model_digest}}"),
        ),
    ),
    Panel(
        title="Time to the first token",
        unit="s",
        lines=(
            (_quantile(0.5, "batchsvc_ttft_seconds"), "{{model}} {{lane}} median {{model_digest}}"),
            (_quantile(0.99, "batchsvc_ttft_seconds"), "{{model}} {{lane}} p99 {{model_digest}}"),
        ),
    ),
    Panel(
        title="Time between tokens",
        unit="s",
        lines=((_quantile(0.99, "batchsvc_inter_token_seconds"), "{{model}} {{lane}} p99 {{model_digest}}"),),
    ),
    Panel(
        title="Time of a step",
        unit="s",
        lines=(
            (_quantile(0.5, "batchsvc_step_seconds", "model, model_digest"), "{{model}} median {{model_digest}}"),
            (_quantile(0.99, "batchsvc_step_seconds", "model, model_digest"), "{{model}} p99 {{model_digest}}"),
        ),
    ),
    Panel(
        title="Sequences",
        unit="short",
        lines=(
            (
                "max by (model, model_digest, lane) (batchsvc_requests_running)",
                "{{model}} {{lane}} running {{model_digest}}",
            ),
            (
                "max by (model, model_digest, lane) (batchsvc_requests_waiting)",
                "{{model}} {{lane}} waiting {{model_digest}}",
            ),
        ),
    ),
    Panel(
        title="KV cache in use, prefix hits",
        unit="percentunit",
        lines=(
            ("max by (model, model_digest) (batchsvc_kv_used_ratio)", "{{model}} KV {{model_digest}}"),
            ("max by (model, model_digest) (batchsvc_prefix_hit_ratio)", "{{model}} hits {{model_digest}}"),
        ),
    ),
    Panel(
        title="Workers, and the share of their time that they compute",
        unit="short",
        lines=(
            ("max by (model, model_digest) (batchsvc_workers_live)", "{{model}} workers {{model_digest}}"),
            (
                "max by (model, model_digest) (rate(batchsvc_engine_busy_seconds_total[5m]))",
                "{{model}} busy {{model_digest}}",
            ),
        ),
    ),
    Panel(
        title="Leases lost, lines quarantined, parts damaged in an hour",
        unit="short",
        lines=(
            ("max(increase(batchsvc_leases_lost_total[1h]))", "leases"),
            ("max(increase(batchsvc_lines_quarantined_total[1h]))", "lines"),
            ("max(increase(batchsvc_parts_damaged_total[1h]))", "parts"),
        ),
    ),
    Panel(
        title="What waits outside: webhooks, exports",
        unit="s",
        lines=(("max(batchsvc_outbox_age_seconds)", "webhooks"), ("max(batchsvc_export_age_seconds)", "exports")),
    ),
    Panel(
        title="Money that doesn't add up (nano-dollars)",
        unit="short",
        lines=(
            ("max(batchsvc_unreconciled_nanos)", "nano-dollars"),
            ("max(batchsvc_reconcile_differences)", "numbers that differ"),
        ),
    ),
    Panel(
        title="Parts of processes, and the reaper's silence",
        unit="short",
        lines=(
            ("min by (part) (batchsvc_part_up)", "{{part}} up"),
            ("time() - max(batchsvc_reaper_last_tick_timestamp_seconds)", "reaper silent (s)"),
        ),
    ),
    Panel(
        title="Memory of processes",
        unit="bytes",
        lines=(("max by (instance) (batchsvc_process_resident_memory_bytes)", "{{instance}}"),),
    ),
)


def dashboard_json() -> str:
    """The dashboard, for Grafana's import."""
    return json.dumps(
        {
            "title": "batchsvc",
            "uid": "batchsvc",
            "schemaVersion": _SCHEMA,
            "editable": True,
            "refresh": "30s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {
                "list": [{"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}]
            },
            "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
        },
        indent=1,
    )


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    row, column = divmod(number, 24 // _WIDTH)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": expr, "legendFormat": legend}
            for place, (expr, legend) in enumerate(panel.lines)
        ],
    }
