"""`alerts`: the alert rules and the dashboard of a deployment, to be put into Prometheus and Grafana."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def alerts(
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="A Grafana dashboard (JSON) instead of the rules.")
    ] = False,
) -> None:
    """Print alert rules for Prometheus (YAML). README's runbook says of each what to do."""
    from batchsvc import alerts as rules
    from batchsvc import dashboard as board

    sys.stdout.write(board.dashboard_json() + "\n" if dashboard else rules.rules_yaml())
