"""What `.ci/gpu speed` found, as lines while it goes on and as figures for a file; and how far the aims are reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.ondevice.crew import Outcome
from engine.ondevice.loads import FEW, FORMATS, LOADS, SHARED, TOY_FEW, TOY_LOADS, TOY_SHARED

PEER = "transformers"
_HEADS = {
    "kernels": f"{'kernel':44} {'us':>9} {'GB/s':>8} {'of copy':>8} {'TFLOP/s':>8} {'of matmul':>9}",
    "engines": f"{'format':12} {'workload':56} {'s':>7} {'out tok/s':>10}",
}


class Report:
    """Of all steps so far."""

    def __init__(self) -> None:
        self.device: dict[str, Any] = {}
        self.num_measured = self.num_failed = self.num_late = 0
        self._rates: dict[str, float] = {}
        self._kernels: dict[str, dict[str, Any]] = {}
        self._engines: dict[tuple[str, str], dict[str, Any]] = {}
        self._missing: list[dict[str, Any]] = []
        self._headed: set[str] = set()

    def lines(self, outcome: Outcome) -> Iterator[str]:
        """Takes a step in; what is to be said of it."""
        step, figures = outcome.step, outcome.figures
        part = step.group if step.group in ("device", "compile", "kernels") else "engines"
        if part in _HEADS and part not in self._headed and step.name != "rates":
            self._headed.add(part)
            yield f"\n{_HEADS[part]}"
        if figures is None:
            yield self._lacking(outcome)
            return
        self.num_measured += part != "compile"
        if part == "device":
            self.device = figures
        elif step.name == "rates":
            self._rates = figures
            copied, multiplied = figures["copy_bytes"] / 1e9, figures["flops"] / 1e12
            yield f"{self.device['name']}: copies {copied:,.1f} GB/s, multiplies {multiplied:,.2f} TFLOP/s."
        elif part == "kernels":
            yield self._kernel(step.name, figures)
        elif part == "engines":
            figures["rate"] = figures["tokens"] / figures["seconds"]
            self._engines[step.group, step.name] = figures
            yield f"{step.group:12} {step.name:56} {figures['seconds']:7.2f} {figures['rate']:10,.0f}"

    def ending(self) -> Iterator[str]:
        """How far the aims are reached."""
        yield ""
        for aim in self.aims():
            reached = "not measured" if aim["reached"] is None else f"{aim['reached']:,.2f}"
            yield f"{aim['aim']:64} {reached:>12}  (aim: {aim['least']:,g})"

    def aims(self) -> list[dict[str, Any]]:
        """What issue G wants of one H200, and how our engine does beside transformers'."""
        is_toy = self.device.get("arch") == "toy"
        shared, few, long = (TOY_SHARED, TOY_FEW, TOY_LOADS[-1]) if is_toy else (SHARED, FEW, LOADS[-1])
        prefill = next((name for name in reversed(self._kernels) if name.startswith("matmul, bf16")), "")
        planned, unplanned = self._rate("bf16", shared.name), self._rate("bf16", f"{shared.name}, unplanned")
        ours, theirs = self._rate("bf16", few.name), self._rate(PEER, few.name)
        found = [
            ("decode attention, of what is copied", self._share("attend, KV bf16, decodes", "of_copy"), 0.8),
            ("prefill matmul, of what is multiplied", self._share(prefill, "of_matmul"), 0.75),
            (f"output tokens/s, bf16, {long.name}", self._rate("bf16", long.name), 16_000),
            ("shared prefix, planned over unplanned", _ratio(planned, unplanned), 3),
            (f"ours over transformers', {few.name}", _ratio(ours, theirs), 1),
        ]
        return [{"aim": aim, "reached": reached, "least": least} for aim, reached, least in found]

    def figures(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        return {
            "device": self.device,
            "formats": {label: {"weights": weights, "kv": kv} for label, (weights, kv) in FORMATS.items()},
            "rates": self._rates,
            "kernels": [{"kernel": name, **one} for name, one in self._kernels.items()],
            "engines": [{"format": label, "workload": name, **one} for (label, name), one in self._engines.items()],
            "missing": self._missing,
            "aims": self.aims(),
        }

    def _lacking(self, outcome: Outcome) -> str:
        name = f"{outcome.step.group}: {outcome.step.name}"
        self._missing.append({"step": name, "why": outcome.error, "is_late": outcome.is_late})
        # another engine that isn't there, or doesn't run, is no failure of ours
        self.num_late += outcome.is_late or outcome.step.group == PEER
        self.num_failed += not outcome.is_late and outcome.step.group != PEER
        return f"{name}: not measured: {outcome.error}"

    def _kernel(self, name: str, figures: dict[str, Any]) -> str:
        read, computed = figures["bytes"] / figures["seconds"], figures["flops"] / figures["seconds"]
        if self._rates:
            figures |= {"of_copy": read / self._rates["copy_bytes"], "of_matmul": computed / self._rates["flops"]}
        self._kernels[name] = figures
        shares = f"{figures.get('of_copy', 0):8.2f} {computed / 1e12:8.2f} {figures.get('of_matmul', 0):9.2f}"
        return f"{name:44} {figures['seconds'] * 1e6:9.1f} {read / 1e9:8.1f} {shares}"

    def _share(self, kernel: str, of: str) -> float | None:
        found: float | None = self._kernels.get(kernel, {}).get(of)
        return found

    def _rate(self, label: str, name: str) -> float | None:
        found: float | None = self._engines.get((label, name), {}).get("rate")
        return found


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
