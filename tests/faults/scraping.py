"""Prometheus over a cluster: scrapes its processes, and tells whether an alert of ours fires, without its `for`."""

from __future__ import annotations

import time

import httpx

from batchsvc.alerts import ALERTS
from tests.faults.cluster import Cluster, Process
from tests.promql import Prometheus, Vector

_EXPRESSIONS = {alert.name: alert.expr for alert in ALERTS}


class Scraper:
    """Scrapes every process that was ever started and not taken out; time goes on by itself, and by `later_s`."""

    def __init__(self, cluster: Cluster, timeout_s: float = 30) -> None:
        self.cluster = cluster
        self.prometheus = Prometheus()
        self._gone: list[Process] = []
        self._later_s = 0.0
        self._http = httpx.Client(timeout=timeout_s, trust_env=False)

    def forget(self, process: Process) -> None:
        """It is no target any more: an operator has taken it out of the list, as discovery does."""
        self._gone.append(process)

    def scrape(self) -> dict[str, str]:
        """One scrape of all targets; the texts by the names of the processes that answered."""
        at_s, texts = self.now_s(), {}
        for process in self.cluster.processes:
            if process in self._gone or (not process.signals and process.is_alive):
                continue
            text = self._get(process)
            self.prometheus.take(text, at_s, job=f"batchsvc-{process.role}", instance=process.name)
            if text is not None:
                texts[process.name] = text
        return texts

    def sees(self, process: Process) -> None:
        """Waits until a process answers scrapes."""
        self.cluster.until(lambda: process.signals and self._get(process) is not None, f"{process.name} is seen")

    def firing(self, alert: str) -> Vector:
        """What the rule gives after one more scrape."""
        self.scrape()
        return self.prometheus.query(_EXPRESSIONS[alert], self.now_s())

    def fires(self, alert: str) -> None:
        """Waits until the alert fires."""
        self.cluster.until(lambda: self.firing(alert), f"{alert} fires")

    def is_quiet(self, alert: str) -> None:
        """Waits until the alert doesn't fire."""
        self.cluster.until(lambda: not self.firing(alert), f"{alert} clears")

    def wait_s(self, seconds: float) -> None:
        """As if so much time passed in which nobody scraped."""
        self._later_s += seconds

    def now_s(self) -> float:
        return time.time() + self._later_s

    def close(self) -> None:
        self._http.close()

    def _get(self, process: Process) -> str | None:
        try:
            answer = self._http.get(f"{process.signals}/metrics")
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == 200 else None
