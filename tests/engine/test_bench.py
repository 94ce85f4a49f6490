"""The bench prints one JSON object with the agreed fields, and its arithmetic of least work is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.bench import Rates, Work, least_seconds, least_work, main
from engine.model.config import config_from_directory

FIELDS = {
    *("model", "format", "kl", "workload", "wall_s", "load_s", "requests", "prompt_tokens", "cached_tokens"),
    *("output_tokens", "output_tps", "total_tps", "decode_tps", "peak_rss_mib", "steps", "mean_running"),
    *("roofline_ratio", "spec", "drafted_tokens", "accepted_tokens", "accepted_per_verify"),
}


def workload(path: Path) -> Path:
    system = {"role": "system", "content": "You read tickets and answer in one short sentence. " * 4}
    asks = ["late parcel", "refund?", "refund?", "thank you", "wrong order", "refund?"]
    bodies = [
        {
            "messages": [system, {"role": "user", "content": ask}],
            "max_tokens": 6 + i,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i, ask in enumerate(asks)
    ]
    bodies[5] = bodies[2]  # the same request twice: computed once, counted twice
    path.write_text("".join(json.dumps({"custom_id": str(i), "body": body}) + "\n" for i, body in enumerate(bodies)))
    return path


def test_one_json_line_comes_last_with_all_fields(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.bench", "--workload", str(workload(tmp_path / "w.jsonl"))]
    command += ["--model", str(tiny_model), "--quant", "float32", "--kv", "float32", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) >= FIELDS
    assert (report["requests"], report["output_tokens"]) == (6, 6 + 7 + 8 + 9 + 10 + 8)
    assert report["kl"] is None
    assert report["format"] == "float32"
    assert 0 < report["trie_tokens"] <= report["prompt_tokens"] - report["cached_tokens"]
    assert report["cached_tokens"] > report["prompt_tokens"] / 2
    assert 0 < report["roofline_ratio"] < 1
    assert report["output_tps"] == pytest.approx(report["output_tokens"] / report["wall_s"], rel=0.02)


def test_it_tells_what_was_drafted_and_accepted(tiny_model: Path, tmp_path: Path) -> None:
    """A tiny model soon says the same over and over, so the look-up is right often, and wrong before."""
    body = {"messages": [{"role": "user", "content": "late " * 20}], "max_tokens": 200, "temperature": 0}
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps({"custom_id": "0", "body": body | {"ignore_eos": True}}) + "\n")
    command = [sys.executable, "-m", "engine.bench", "--workload", str(path), "--model", str(tiny_model), "--json"]
    command += ["--quant", "float32", "--kv", "float32", "--threads", "1", "--spec", "ngram", "--max-running", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    accepted, steps = report["accepted_tokens"], report["steps"]
    assert report["spec"] == "ngram" and 0 < accepted <= report["drafted_tokens"]
    assert steps + accepted == report["output_tokens"] == 200, "each step says a token beside"
    windows = round(accepted / report["accepted_per_verify"])
    assert 0 < windows < steps and report["accepted_per_verify"] == round(accepted / windows, 2)


def test_what_cannot_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workload", str(tmp_path / "none.jsonl"), "--model", str(tmp_path / "none")]) == 1
    assert "can't run" in capsys.readouterr().err


def prompt(*ids: int) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()


def test_least_work_counts_shared_positions_once() -> None:
    prompts = [prompt(1, 2, 3, 4), prompt(9, 9), prompt(1, 2, 3, 7, 7), prompt(1, 2)]
    work = least_work(prompts, [2, 1, 3, 4], max_running=2)
    # the tree has 1 2 | 3 | 4 and 7 7, and 9 9: 8 positions, of which 1 2 3 are shared
    assert (work.trie_tokens, work.shared_tokens) == (8, 3)
    # private: 1, 2, 2 and 0 positions, read at each step, and the answers so far
    assert work.private_reads == 2 * 1 + 1 + 1 * 2 + 0 + 3 * 2 + 3 + 4 * 0 + 6
    assert (work.output_tokens, work.fewest_steps) == (10, 5)


def test_least_time_is_arithmetic_plus_reads(tiny_model: Path) -> None:
    model = config_from_directory(tiny_model)
    layers = model.num_parameters - 384 * 64
    work = Work(trie_tokens=100, shared_tokens=10, private_reads=1000, output_tokens=50, fewest_steps=20)
    kv = 2 * 2 * 2 * 16 * 4  # K and V, layers, kv heads, dim, float32
    expected = (2 * layers * 150 + 2 * 384 * 64 * 50) / 1e9 + (1000 + 10 * 20) * kv / 1e6
    assert least_seconds(work, Rates(1e9, 1e6), model, "float32") == pytest.approx(expected)
