"""The training loop: bounds, the learning rate, and a resumed run that ends with the bits of one that never stopped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.distill import checkpoint, train
from engine.distill.checkpoint import Progress
from engine.distill.errors import DistillError, StoppedError
from engine.distill.train import LEAST_SHARE, Settings, learning_rate


def parameters() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"matrix": torch.randn(6, 6, generator=draw), "vector": torch.randn(6, generator=draw)}


def batch(number: int) -> Tensor:
    return torch.randn(9, 6, generator=torch.Generator().manual_seed(number))


def loss_of(mine: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda rows: (rows @ mine["matrix"] + mine["vector"] - rows.flip(0)).square().mean()


def run(folder: Path, mine: dict[str, Tensor], steps: int = 20, **options: Any) -> Progress:
    settings = Settings(steps=steps, checkpoint_steps=4)
    return train.train(mine, loss_of(mine), batch, settings, folder, **options)


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole, stopped, killed = ({}, {}, {})
    for name, mine in (("whole", whole), ("stopped", stopped), ("killed", killed)):
        (tmp_path / name).mkdir()
        mine |= parameters()
    end = run(tmp_path / "whole", whole)
    assert end.losses[-1] < end.losses[0]

    told: list[dict[str, Any]] = []
    with pytest.raises(StoppedError):
        run(tmp_path / "stopped", stopped, tell=told.append, is_stopped=lambda: len(told) == 7)
    again = parameters()
    rest: list[dict[str, Any]] = []
    assert run(tmp_path / "stopped", again, tell=rest.append).losses == end.losses
    assert [line["done"] for line in (*told, *rest)] == list(range(1, 21)), "no step was lost"

    def die(line: dict[str, Any]) -> None:
        if line["done"] == 11:
            raise SystemExit(9)

    with pytest.raises(SystemExit):
        run(tmp_path / "killed", killed, tell=die)
    after, steps = parameters(), list[int]()
    run(tmp_path / "killed", after, tell=lambda line: steps.append(line["done"]))
    assert steps[0] == 9, "it goes on from the checkpoint of step 8"
    for mine in (again, after):
        assert all(torch.equal(mine[name], whole[name]) for name in whole)


def test_a_checkpoint_that_was_being_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, Progress(step=3, losses=[1.0, 2.0, 3.0]), {"a": torch.ones(4)})

    def torn(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, Progress(step=4), {"a": torch.zeros(4)})
    found = checkpoint.load(tmp_path)
    assert found is not None and found[0].step == 3 and bool((found[1]["a"] == 1).all())


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / checkpoint.FILE).write_bytes(b"nonsense")
    with pytest.raises(DistillError, match="no usable checkpoint"):
        run(tmp_path, parameters())
    checkpoint.save(tmp_path, Progress(), {"matrix": torch.ones(2, 2), "vector": torch.ones(6)})
    with pytest.raises(DistillError, match="of another student"):
        run(tmp_path, parameters())


def test_minutes_bound_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, ticks = parameters(), itertools.count(0.0, 5.0)  # 5 s a step
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    told: list[dict[str, Any]] = []
    end = train.train(mine, loss_of(mine), batch, Settings(minutes=1), tmp_path, tell=told.append)
    assert (end.step, end.steps, end.seconds) == (12, 12, 60.0)
    assert [line["total"] for line in told] == [None] * train.PACE_STEPS + [12] * 6
    assert [line["eta_s"] for line in told] == [55.0 - 5 * step for step in range(12)]
    with pytest.raises(DistillError, match="needs a bound"):
        train.train(mine, loss_of(mine), batch, Settings(), tmp_path)


def test_what_can_go_wrong_is_a_sentence(tmp_path: Path) -> None:
    mine = parameters()
    with pytest.raises(DistillError, match="lower --lr"):
        train.train(mine, lambda rows: loss_of(mine)(rows) * math.nan, batch, Settings(steps=3), tmp_path)

    def greedy(number: int) -> Tensor:
        return torch.empty(1 << 58)

    with pytest.raises(DistillError, match="smaller --pack-tokens"):
        train.train(mine, loss_of(mine), greedy, Settings(steps=3), tmp_path)


@given(steps=st.integers(1, 3000), share=st.floats(0, 0.5))
def test_the_rate_rises_then_falls_to_a_share(steps: int, share: float) -> None:
    settings = Settings(steps=steps, rate=1.0, warmup_share=share)
    rates = [learning_rate(step, steps, settings) for step in range(steps)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0 < rate <= 1 for rate in rates) and min(rates[top:]) >= LEAST_SHARE - 1e-9
