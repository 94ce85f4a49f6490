"""The same as tests/bench/lanes.py over HTTP: streamed calls of many clients over a batch, on an embedded stack.

    python -m tests.bench.lanes_http --seconds 120

starts a stack without targets, measures calls one by one, calls at 30 % of capacity, the batch alone, and both; then
starts it again with targets of 4 times the medians of the first, where the batch goes on, and measures both again.
Times are a client's: from the moment that a call was due to its first text, and from text to text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from batchsvc.stack.datadir import DataDir
from engine.sched.sim_lanes import Seen, poisson, quantile
from tests.bench.lanes import ALONE_S, LOAD, SLACK, WARM_S, table

BATCHSVC = (sys.executable, "-P", "-c", "from batchsvc.cli import main; main()")
START_S = 180.0
WORDS = (
    "parcel",
    "letter",
    "street",
    "window",
    "garden",
    "river",
    "mountain",
    "evening",
    "answer",
    "question",
    "market",
)


def messages(rng: random.Random, least: int, most: int) -> list[dict[str, str]]:
    """A prompt of about so many tokens."""
    return [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(least, most)))}]


class Stack:
    """A running stack, as a client sees it."""

    def __init__(self, directory: DataDir, model: str, seed: int) -> None:
        found = json.loads(_command("status", "--json", directory=directory))
        self._url, self._model, self._directory = found["url"], model, directory
        key = directory.api_key.read_text(encoding="utf-8").strip()
        self._http = httpx.Client(headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=120.0)
        self._rng = random.Random(seed)

    def begin_batch(self, num_lines: int) -> None:
        """A batch with more lines than can be answered meanwhile."""
        body = {"model": self._model, "temperature": 0, "ignore_eos": True}
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for number in range(num_lines):
                own = {"messages": messages(self._rng, 50, 220), "max_tokens": self._rng.randint(32, 128)}
                line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body | own}
                file.write(json.dumps(line) + "\n")
            file.flush()
            _command("submit", file.name, "--json", directory=self._directory)

    def counts(self) -> tuple[float, float, float]:
        """Seconds that the engine was busy, batch tokens so far, and batch sequences that run."""
        text = self._http.get(self._url.removesuffix("/v1") + "/metrics").text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]

        def total(name: str, lane: str | None = None) -> float:
            return sum(one.value for one in samples if one.name == name and one.labels.get("lane") == lane)

        busy_s = total("batchsvc_engine_busy_seconds_total")
        return busy_s, total("batchsvc_output_tokens_total", "batch"), total("batchsvc_requests_running", "batch")

    def play(self, arrivals: Iterable[float], *, seconds: float, most: int | None = None) -> Seen:
        """Calls for so long, or so many, each by a client of its own; then waits for the last."""
        seen, lock, clients = Seen(), threading.Lock(), []
        before, began_s = self.counts(), time.perf_counter()
        for number, after_s in enumerate(arrivals):
            if after_s > seconds or number == most:
                break
            due_s = began_s + after_s
            time.sleep(max(due_s - time.perf_counter(), 0.0))
            body = {"messages": messages(self._rng, 50, 160), "max_tokens": self._rng.randint(16, 48)}
            clients.append(threading.Thread(target=self._call, args=(body, due_s, seen, lock)))
            clients[-1].start()
        if most is None:
            time.sleep(max(began_s + seconds - time.perf_counter(), 0.0))
        for client in clients:
            client.join()
        seen.seconds, after = time.perf_counter() - began_s, self.counts()
        seen.busy_s, seen.batch_tokens = after[0] - before[0], round(after[1] - before[1])
        return seen

    def _call(self, body: dict[str, Any], due_s: float, seen: Seen, lock: threading.Lock) -> None:
        asked = {"model": self._model, "temperature": 0, "ignore_eos": True, "stream": True, **body}
        last_s, gaps = due_s, []
        with self._http.stream("POST", f"{self._url}/chat/completions", json=asked) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if '"content":"' in line.replace(": ", ":") and '"content":""' not in line.replace(": ", ":"):
                    now_s = time.perf_counter()
                    gaps.append(now_s - last_s)
                    last_s = now_s
        with lock:
            seen.ttft_s += gaps[:1]
            seen.itl_s += gaps[1:]


def _command(*arguments: str, directory: DataDir, env: dict[str, str] | None = None) -> str:
    flags = ("--data-dir", str(directory.root))
    done = subprocess.run(
        [*BATCHSVC, *arguments, *flags], env=os.environ | (env or {}), capture_output=True, text=True, timeout=START_S
    )
    if done.returncode:
        raise SystemExit(f"batchsvc {arguments[0]} failed: {done.stderr}")
    return done.stdout


@contextmanager
def running(directory: DataDir, options: argparse.Namespace, env: dict[str, str]) -> Iterator[Stack]:
    """A stack with a heartbeat a second, so that counts are fresh."""
    settings = {"BATCHSVC_RENEW_S": "1", "BATCHSVC_MAX_RUNNING": str(options.max_running), **env}
    _command("up", "--detach", "--port", "0", "--model", options.model, directory=directory, env=settings)
    try:
        yield Stack(directory, options.model, options.seed)
    finally:
        _command("down", directory=directory)


def _until_it_runs(stack: Stack) -> None:
    while stack.counts()[2] == 0:
        time.sleep(0.5)
    time.sleep(WARM_S)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory = DataDir(Path(folder) / "data")
        with running(directory, options, {}) as stack:
            stack.play([0.0, 1.0], seconds=10)
            alone = stack.play(itertools.count(0.0, ALONE_S), seconds=600, most=options.alone)
            rate = LOAD / (alone.busy_s / options.alone)
            without_batch = stack.play(poisson(rate, options.seed), seconds=options.seconds)
            stack.begin_batch(options.lines)
            _until_it_runs(stack)
            batch_alone = stack.play((), seconds=options.seconds)
            no_dial = stack.play(poisson(rate, options.seed), seconds=options.seconds)
        ttft_ms, itl_ms = (1000 * SLACK * quantile(values, 0.5) for values in (alone.ttft_s, alone.itl_s))
        targets = {"BATCHSVC_TTFT_TARGET_MS": f"{ttft_ms:.3f}", "BATCHSVC_ITL_TARGET_MS": f"{itl_ms:.3f}"}
        with running(directory, options, targets) as stack:
            _until_it_runs(stack)
            stack.play([0.0, 1.0], seconds=5)
            dial = stack.play(poisson(rate, options.seed), seconds=options.seconds)
            if not stack.counts()[2]:
                raise SystemExit("The batch ended before the last run did; give it more --lines.")
    return {"model": options.model, **table(rate, ttft_ms, itl_ms, alone, without_batch, batch_alone, no_dial, dial)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lanes_http", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each of the four measured runs")
    parser.add_argument("--alone", type=int, default=20, help="calls that have the engine to themselves")
    parser.add_argument("--lines", type=int, default=5_000, help="of the batch; more than the runs can answer")
    parser.add_argument("--seed", type=int, default=0)
    sys.stdout.write(json.dumps(measure(parser.parse_args(arguments))) + "\n")


if __name__ == "__main__":
    main()
