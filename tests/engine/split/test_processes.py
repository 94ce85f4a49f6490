"""Two processes give what one gives, over each transport; whichever is killed, and however often, nothing is lost, and
nothing is answered twice."""

from __future__ import annotations

import random
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.engine.split.processes import Sides, answers_in, ended_with, free_address, kill, until, write_workload

LINES = 40


def unified(sides: Sides, workload: Path) -> dict[str, list[int]]:
    alone = sides.folder / "alone.jsonl"
    process = sides.decode(workload, alone, is_alone=True)
    with ended_with(process):
        process.join(60)
    found = dict(answers_in(alone))
    assert len(found) == LINES, sides.said("decode")
    return found


@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_two_processes_answer_as_one(tmp_path: Path, fused_model: Path, kind: str) -> None:
    sides = Sides(tmp_path, fused_model, free_address(kind, tmp_path))
    if kind == "gloo":
        sides.share_key()
    workload = write_workload(tmp_path / "w.jsonl", LINES, max_tokens=12)
    expected = unified(sides, workload)
    prefill, decode = sides.prefill(), sides.decode(workload, tmp_path / "a.jsonl")
    with ended_with(prefill, decode):
        decode.join(60)
    assert decode.exitcode == 0, sides.said("decode")
    answered = answers_in(tmp_path / "a.jsonl")
    assert len(answered) == LINES
    assert dict(answered) == expected
    report = sides.report()
    assert report["handed_over"] == LINES - int(str(report["spared_prompts"]))
    assert report["received_bytes"] == int(str(report["received_blocks"])) * int(str(report["block_bytes"])) > 0


def test_a_prefill_engine_of_another_model_is_refused_by_name(
    tmp_path: Path, fused_model: Path, tiny_model: Path
) -> None:
    """The requests wait, and the process says why."""
    address = free_address("shm", tmp_path)
    other = Sides(tmp_path, tiny_model, address)
    sides = Sides(tmp_path, fused_model, address)
    workload = write_workload(tmp_path / "w.jsonl", 4, max_tokens=4)
    prefill, decode = other.prefill(), sides.decode(workload, tmp_path / "a.jsonl")
    with ended_with(prefill, decode):
        until(lambda: "Its model is" in sides.said("decode"), 60, "it never says why")
        assert decode.is_alive()
    assert "No prefill engine is connected, and 4 requests wait for one: shm://" in sides.said("decode")
    assert not answers_in(tmp_path / "a.jsonl")


def gets_on(decode: BaseProcess, answers: Path, sides: Sides) -> None:
    """Waits for one more answer, or the end."""
    seen = len(answers_in(answers))
    until(
        lambda: len(answers_in(answers)) > seen or not decode.is_alive(),
        60,
        f"nothing goes on: {sides.said('decode')[-500:]} {sides.said('prefill')[-500:]}",
    )


def kill_often(sides: Sides, workload: Path, expected: dict[str, list[int]], kills: int, seed: int) -> Counter[str]:
    """Kills each side `kills` times, at any moment, also while it loads or connects, and starts it again. Each round of
    all lines must end with each answered once, as one process alone answers it."""
    rng, killed, rounds = random.Random(seed), Counter[str](), 0
    lost = twice = 0
    prefill = sides.prefill()

    def victims() -> list[str]:
        return [role for role in ("prefill", "decode") if killed[role] < kills]

    try:
        while victims():
            answers = sides.folder / f"after{rounds}.jsonl"
            decode = sides.decode(workload, answers)
            try:
                while decode.is_alive():
                    if rng.random() < 0.7 or not victims():
                        gets_on(decode, answers, sides)
                    decode.join(rng.uniform(0.0, 0.3))
                    if not decode.is_alive() or not victims():
                        continue
                    if rng.choice(victims()) == "prefill":
                        killed["prefill"] += kill(prefill)
                        prefill = sides.prefill()
                    else:
                        killed["decode"] += kill(decode)
                        decode = sides.decode(workload, answers)
                assert decode.exitcode == 0, sides.said("decode")[-2000:]
            finally:
                kill(decode)
            answered = answers_in(answers)
            times = Counter(name for name, _ in answered)
            rounds += 1
            lost += len(expected.keys() - times.keys())
            twice += sum(count > 1 for count in times.values())
            print(f"{rounds} rounds, killed {dict(killed)}: {lost} lost, {twice} twice")
            assert (lost, twice, len(times)) == (0, 0, len(expected))
            assert dict(answered) == expected
    finally:
        kill(prefill)
    return killed


def test_kills_of_either_side_lose_nothing_and_repeat_nothing(tmp_path: Path, fused_model: Path) -> None:
    sides = Sides(tmp_path, fused_model, free_address("shm", tmp_path))
    workload = write_workload(tmp_path / "w.jsonl", LINES, max_tokens=40)
    killed = kill_often(sides, workload, unified(sides, workload), kills=1, seed=1)
    assert killed == {"prefill": 1, "decode": 1}


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["gloo", "shm"])
def test_a_hundred_kills_of_each_side(tmp_path: Path, fused_model: Path, kind: str) -> None:
    sides = Sides(tmp_path, fused_model, free_address(kind, tmp_path))
    if kind == "gloo":
        sides.share_key()
    workload = write_workload(tmp_path / "w.jsonl", LINES, max_tokens=60)
    killed = kill_often(sides, workload, unified(sides, workload), kills=100, seed=7)
    assert killed == {"prefill": 100, "decode": 100}
