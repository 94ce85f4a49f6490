"""Progress is honest: twenty real batches with mixed lengths and killed workers, read from two processes in turn."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.cluster import Cluster, Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]
RUNS, NEEDED = 20, 16
MARKS = (0.25, 0.5, 0.75)
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Run:
    """What clients saw of one batch."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    told: dict[float, dict[str, int] | None] = field(default_factory=dict)
    end_s: float = 0.0

    def covers(self, mark: float) -> bool:
        told = self.told.get(mark)
        return told is not None and told["low"] <= self.end_s <= told["high"]


def mixed_lines(cluster: Cluster, rng: random.Random, run: int) -> list[dict[str, Any]]:
    """Answers of 1 to some hundred tokens: of certain length, or with an end that nobody knows before."""
    lines = cluster.lines(rng.randint(120, 240), canary=f"run {run}")
    longest = rng.choice([40, 100, 200])
    certain = rng.choice([0.0, 0.5, 1.0])
    for line in lines:
        body = line["body"]
        if rng.random() < certain:
            body["max_tokens"] = rng.randint(1, longest)
        else:
            body |= {"ignore_eos": False, "min_tokens": rng.randint(1, longest), "max_tokens": 2 * longest}
    return lines


def follow(cluster: Cluster, job: Job, urls: list[str], rng: random.Random) -> Run:
    """Look at a batch until it has ended, and kill a worker now and then; another one takes its place."""
    run, looks, deadline = Run(), 0, time.monotonic() + 300
    next_kill = time.monotonic() + rng.uniform(3, 15)
    while not run.seen or run.seen[-1]["status"] not in ENDED:
        assert time.monotonic() < deadline, run.seen[-1]
        looks += 1
        answer = cluster.http.get(
            f"{urls[looks % len(urls)]}/v1/batches/{job.id}", headers={"Authorization": f"Bearer {cluster.key}"}
        )
        assert answer.status_code == 200, answer.text
        shown = answer.json()
        run.seen.append(shown)
        for mark in MARKS:
            if mark not in run.told and (shown["progress"]["share"] or 0) >= mark and shown["status"] not in ENDED:
                run.told[mark] = shown["estimated_completion_at"]
        if time.monotonic() >= next_kill:
            next_kill += rng.uniform(8, 25)
            rng.choice(cluster.alive("engine")).kill()
            cluster.start("engine")
        time.sleep(0.1)
    run.end_s = (cluster.batch(job).ended_ms or 0) / 1000
    return run


def check_shown(run: Run) -> None:
    """Never backwards, nothing before a rate is known, never all before the results are there."""
    shares = [shown["progress"]["share"] for shown in run.seen]
    known = [share for share in shares if share is not None]
    assert known == sorted(known), "a share fell"
    assert None not in shares[shares.index(known[0]) :], "a share was forgotten"
    for shown in run.seen:
        share, ends = shown["progress"]["share"], shown["estimated_completion_at"]
        assert (share == 1.0) == (shown["status"] in ENDED)
        if shown["status"] == "validating":
            assert share is None and shown["progress"]["phase"] == "planning"
        if share is None or shown["status"] in ENDED:
            assert ends is None, "an end without any rate"
        if ends is not None:
            assert ends["low"] <= ends["high"]
        assert shown["at_risk"] is False, "a day is enough"


def test_twenty_batches_end_when_they_said(cluster: Cluster, rng: random.Random) -> None:
    for role in ("control", "engine", "engine"):
        cluster.start(role, BATCHSVC_FAKE_TOKENS_PER_S=600)
    cluster.env["BATCHSVC_FAKE_TOKENS_PER_S"] = "600"
    urls = []
    for _ in range(2):
        cluster.serve()
        urls.append(cluster.url)
    runs = []
    for number in range(RUNS):
        lines = mixed_lines(cluster, rng, number)
        job = cluster.submit(len(lines), lines=lines)
        cluster.watches.pop(job.id).stop()  # this test looks itself
        run = follow(cluster, job, urls, rng)
        assert run.seen[-1]["status"] == "completed"
        check_shown(run)
        runs.append(run)
        told = {mark: (run.told.get(mark), run.covers(mark)) for mark in MARKS}
        print(f"run {number}: {len(lines)} lines, ended {run.end_s:.1f}, told {told}")
    for mark in MARKS:
        assert sum(run.covers(mark) for run in runs) >= NEEDED, f"at {mark}"
