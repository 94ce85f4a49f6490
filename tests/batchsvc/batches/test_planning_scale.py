"""50,000 lines of 4 KB are planned in bounded memory. Slow; prints its figures (run with -s)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsvc.batches.tables import Unit, Window
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.store import keys
from tests.batchsvc.batches.planned import PROJECT, Planned, line, make_planned
from tests.tiny import make_tiny_model

NUM_LINES = 50_000
_CHILD = """
import json, resource, sys, time
import batchsvc.tables
from batchsvc.batches.planning import PlanProgress, plan_next_window
from batchsvc.batches.reading import PlanContext
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from engine.text import load_text
from functools import cache
values = json.loads(sys.argv[1])
settings = Settings.model_validate(values)
context = PlanContext(Database(settings.database_url), ObjectStore(settings), settings, cache(load_text))
started = time.monotonic()
while plan_next_window(context, sys.argv[2], "child") == PlanProgress.AGAIN:
    pass
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({"wall_s": round(time.monotonic() - started, 1), "peak_rss_mib": rss}))
"""


def lines() -> Iterator[bytes]:
    system = "You are a helpful assistant that reads tickets. " * 20
    for number in range(NUM_LINES):
        text = f"Order {number} was shipped to Berlin. " + "Please answer in one short sentence, thank you. " * 60
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text[:2900]}]
        yield json.dumps(line(f"id{number}", messages=messages)).encode() + b"\n"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_50_000_lines_of_4_kb_need_less_than_1_gb(settings: Settings, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", context_tokens=8192)
    planned: Planned = make_planned(settings, model)
    batch_id = planned.add_batch(b"")
    key = keys.input_file(PROJECT, planned.batch(batch_id).input_file_id)
    data = b"".join(lines())
    with planned.db.transaction() as session:
        row = session.get_one(File, planned.batch(batch_id).input_file_id)
        row.etag, row.size_bytes = planned.store.put(key, data), len(data)
    values = settings.model_dump()
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(values), batch_id], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-3000:]
    figures = json.loads(child.stdout)
    batch = planned.batch(batch_id)
    windows = planned.rows(Window, batch_id)
    tokens = sum(window.input_tokens for window in windows)
    print(f"\n{len(data) / 1e6:.0f} MB, {tokens} tokens, {len(windows)} windows, {figures}")
    assert (batch.status, batch.total) == ("in_progress", NUM_LINES)
    assert sum(unit.num_lines for unit in planned.rows(Unit, batch_id)) == NUM_LINES
    assert figures["peak_rss_mib"] < 1000
    planned.db.dispose()
