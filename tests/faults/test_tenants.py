"""Rows 66 and 70: a tenant that floods the queue, and one that asks for what belongs to others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from batchsvc.accounts import administration
from batchsvc.audit.actor import at_command_line
from batchsvc.clock import now_ms
from tests.faults import witness
from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict

Judge = Callable[..., Verdict]
pytestmark = pytest.mark.faults

# what one worker holds beyond what it runs, in lines: it was claimed before the small tenant came
AHEAD = 24 + 8 + 2 * 20


def runs_in_order(cluster: Cluster, *jobs: Job) -> list[Job]:
    """Which job each line belonged to, in the order in which lines began to run."""
    owner = {unit.id: job for job in jobs for unit in cluster.units(job)}
    runs = sorted((run for run in witness.read(cluster.witness).runs if run.event == "start"), key=lambda run: run.at_s)
    return [owner[run.unit_id] for run in runs if run.unit_id in owner]


def submit_for(cluster: Cluster, key: str, count: int) -> Job:
    lines = cluster.lines(count)
    answer = cluster.create(cluster.upload(lines, key=key), key=key)
    assert answer.status_code == 200, answer.text
    return Job(answer.json()["id"], lines, "")


@pytest.mark.parametrize("weight", [1, 3])
def test_row_66_a_flood_makes_nobody_wait_beyond_his_share(cluster: Cluster, judge: Judge, weight: int) -> None:
    """B has 100 lines; while they run, A with its thousands gets at most as much again, over B's weight."""
    cluster.start("control")
    flood = cluster.submit(3_000)
    project, key = cluster.add_project("small")
    with cluster.db.transaction() as session:
        administration.change_project(session, at_command_line(), project, {"weight": weight})
    cluster.start("engine")
    cluster.until(lambda: cluster.num_done(flood) > 60, "the flood runs")
    small = submit_for(cluster, key, 100)
    cluster.wait(small, "completed")
    order = runs_in_order(cluster, flood, small)
    came = order.index(small)
    last = len(order) - 1 - order[::-1].index(small)
    between = order[came : last + 1].count(flood)
    assert between <= 100 / weight + AHEAD, f"{between} lines of the flood ran before B's last"
    assert cluster.batch(flood).status == "in_progress"
    cluster.cancel(flood)
    cluster.wait(flood, "cancelled")
    judge(flood)


def test_row_66_the_panic_lane_has_a_cap(cluster: Cluster) -> None:
    """All of A is late; B is not, and still gets what the lane may not take, 70 % of the claims while it has work.

    B's weight is so high that A would get next to nothing otherwise: what A gets comes by the lane.
    """
    cluster.start("control", BATCHSVC_REAPER_S=0.2)
    late = cluster.submit(3_000)
    cluster.wait(late, "in_progress")
    cluster.change_batch(late, expires_ms=now_ms() + 100_000, created_ms=now_ms() - 100_000_000)
    cluster.until(lambda: (cluster.batch(late).latest_start_ms or now_ms() + 1) <= now_ms(), "it is late")
    project, key = cluster.add_project("patient")
    with cluster.db.transaction() as session:
        administration.change_project(session, at_command_line(), project, {"weight": 1_000})
    patient = submit_for(cluster, key, 400)
    cluster.wait(patient, "in_progress")
    cluster.start("engine")
    cluster.wait(patient, "completed")
    order = runs_in_order(cluster, late, patient)
    last = len(order) - 1 - order[::-1].index(patient)
    lane = order[: last + 1].count(late)
    assert lane > 0, "the lane is used"
    # 3 of 10 claims; claims differ in size, so half as much again
    assert lane <= 400 * 3 / 7 * 1.5 + AHEAD, f"{lane} late lines ran before the last of 400 others"


@pytest.mark.quick_faults
def test_row_70_nothing_of_others_is_read_or_changed(cluster: Cluster, judge: Judge) -> None:
    """The whole walk over every route is tests/contract/test_foreign_ids.py; this is it against real processes."""
    cluster.serve()
    cluster.start("control")
    cluster.start("engine")
    job = cluster.submit(20)
    cluster.wait(job, "completed")
    shown = cluster.get(job)
    stranger, key = cluster.add_project("stranger")
    ids = [shown[name] for name in ("output_file_id", "input_file_id")]
    calls = [("GET", f"/v1/batches/{job.id}"), ("POST", f"/v1/batches/{job.id}/cancel")]
    calls += [(method, f"/v1/files/{id_}") for id_ in ids for method in ("GET", "DELETE")]
    calls += [("GET", f"/v1/files/{id_}/content") for id_ in ids]
    tricks = (
        {},
        {"X-Project-Id": cluster.project_id, "OpenAI-Project": cluster.project_id},
        {"X-Forwarded-For": "127.0.0.1", "X-Original-URL": f"/v1/batches/{job.id}"},
        {"X-HTTP-Method-Override": "DELETE", "Host": "evil.example"},
    )
    for method, path in calls:
        for headers in tricks:
            assert cluster.call(method, path, key=key, headers=headers).status_code == 404, (method, path, headers)
        head, _, id_ = path.partition("/v1/")[2].partition("/")
        odd = cluster.call(method, f"/v1/{head}/..%2f{head}%2f{id_}", key=key)
        assert odd.status_code in (400, 404, 405), odd.text
    for listing in ("/v1/files", "/v1/batches"):
        assert cluster.call("GET", listing, key=key).json()["data"] == []
    assert cluster.create(ids[1], key=key).status_code == 400
    server = urlsplit(cluster.url)
    for target in (f"http://evil.example/v1/batches/{job.id}", f"//x/v1/files/{ids[0]}/content"):
        with socket.create_connection((server.hostname, server.port), timeout=60) as connection:
            head = f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())
            answer = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
        assert int(answer.split(b" ", 2)[1]) in (400, 404), answer
    assert stranger != cluster.project_id
    assert cluster.get(job) == shown, "nothing has changed"
    judge(job)


def test_row_70_urls_of_lines_lead_nowhere(cluster: Cluster) -> None:
    """A line names where it goes; anything but the batch's endpoint is refused, and nothing is ever fetched."""
    cluster.start("control")
    lines = cluster.lines(5)
    for row, url in zip(
        lines,
        (
            "http://169.254.169.254/v1/chat/completions",
            "//evil.example/v1/chat/completions",
            "/v1/../v1/admin/keys",
            "/v1/chat/completions?x=1",
            "/v1/embeddings",
        ),
        strict=True,
    ):
        row["url"] = url
    job = cluster.submit(5, lines=lines)
    cluster.wait(job, "failed")
    errors = cluster.get(job)["errors"]["data"]
    assert [error["line"] for error in errors] == [1, 2, 3, 4, 5]
    assert {error["code"] for error in errors} == {"url_mismatch"}, errors
