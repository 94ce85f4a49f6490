"""`python -m engine.bench_forms`: what forms cost, as a ratio of step times with and without them.

Two engines of the same model answer the same prompts: one freely, one each in a form of its own (objects, arrays,
enums, patterns, by turns). They take turns of some steps each, as machines have better and worse moments, and no answer
ends before the last step that is timed: both do the same work but for the masks. Prints one JSON line:

free_ms, formed_ms   a step of decodes in each, the median over all turns
ratio                the median over all pairs of turns of formed / free
spread               the pairs' lower and upper quartile
masks_ms             making the masks of one step, alone; the engine does so between one step and the next
compile_ms           compiling one form, on average
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.load.fetch import locate
from engine.quality.serving import resolve_formats
from engine.request import Request, SamplingParams
from engine.structure.grammar import spec_of
from engine.structure.matchers import Grammars
from engine.text import TextModel, load_text

_WARM_STEPS = 8
_TURN_STEPS = 12  # the masks that a turn leaves to be made while the other engine goes on weigh little beside so many


def mixed_form(index: int) -> str:
    """A form whose answers are long; each index has one of its own."""
    text = {"type": "string", "minLength": 2000}
    item = {
        "type": "object",
        "properties": {
            f"id{index}": {"type": "integer", "minimum": index},
            "label": {"enum": [f"kind {index}", "gut", "schlecht", "не знаю"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "code": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}$"},
        },
        "required": [f"id{index}", "label", "score", "code"],
        "additionalProperties": False,
    }
    many = {"type": "array", "items": item, "minItems": 500}
    shapes: list[dict[str, Any]] = [
        {"type": "object", "properties": {f"summary{index}": text}, "required": [f"summary{index}"]},
        {"type": "object", "properties": {"rows": many}, "required": ["rows"], "additionalProperties": False},
        many,
        {"type": "array", "items": {"anyOf": [item, {"type": "string"}, {"type": "null"}]}, "minItems": 500},
    ]
    return spec_of("json", shapes[index % len(shapes)])


def measure(config: EngineConfig, num_rows: int, num_turns: int, temperature: float) -> dict[str, Any]:
    """The figures described above."""
    text = load_text(config.model)
    prompts = [  # different ones: equal answers to equal prompts would share their memory
        text.prompt_ids([{"role": "user", "content": f"Queue {index}: describe the tickets of this week as JSON."}])
        for index in range(num_rows)
    ]
    forms = [mixed_form(index) for index in range(num_rows)]
    num_steps = _WARM_STEPS + num_turns * _TURN_STEPS + 32  # those admitted first are ahead of the last

    def started(forms: Sequence[str]) -> _Answers:
        params = [
            SamplingParams(max_tokens=num_steps, temperature=temperature, seed=index, ignore_eos=True, grammar=form)
            for index, form in enumerate(forms)
        ]
        return _Answers(Engine(config, text=text), prompts, params)

    free, formed = started([""] * num_rows), started(forms)
    times = [(free.turn_s(), formed.turn_s()) for _ in range(num_turns)]
    ratios = [formed_s / free_s for free_s, formed_s in times]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    compile_ms, masks_ms = _replay(text, forms, formed.token_ids())
    return {
        "rows": num_rows,
        "temperature": temperature,
        "free_ms": round(statistics.median(free_s for free_s, _ in times) / _TURN_STEPS * 1e3, 2),
        "formed_ms": round(statistics.median(formed_s for _, formed_s in times) / _TURN_STEPS * 1e3, 2),
        "ratio": round(middle, 4),
        "spread": [round(low, 4), round(high, 4)],
        "masks_ms": round(masks_ms, 3),
        "compile_ms": round(compile_ms, 2),
    }


class _Answers:
    """Answers under way in an engine of their own, all past their first steps."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        self._engine = engine
        self._ids = [f"{i}" for i in range(len(prompts))]
        for name, prompt, mine in zip(self._ids, prompts, params, strict=True):
            engine.add(Request(id=name, prompt_ids=list(prompt), params=mine))
        while len(engine.step().new_tokens) < len(prompts):
            pass
        for _ in range(_WARM_STEPS):
            engine.step()

    def turn_s(self) -> float:
        """The time of the next steps."""
        start = time.perf_counter()
        for _ in range(_TURN_STEPS):
            if len(self._engine.step().new_tokens) != len(self._ids):
                raise RuntimeError("an answer ended before all steps were timed")
        return time.perf_counter() - start

    def token_ids(self) -> list[tuple[int, ...]]:
        """The whole answers, once they ended."""
        answers: dict[str, tuple[int, ...]] = {}
        while self._engine.has_work():
            answers |= {done.request_id: done.token_ids for done in self._engine.step().completions}
        return [answers[name] for name in self._ids]


def _replay(text: TextModel, forms: Sequence[str], answers: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Compiles the forms anew, follows the answers through them: the time of one form, and of the masks of a step."""
    grammars = Grammars(text.tokenizer, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)
    start = time.perf_counter()
    matchers = [grammars.start(form) for form in forms]
    compile_s = (time.perf_counter() - start) / len(forms)
    times = []
    for token_ids in zip(*answers, strict=True):
        start = time.perf_counter()
        grammars.masks(matchers)
        times.append(time.perf_counter() - start)
        grammars.push(matchers, token_ids)
    return compile_s * 1e3, statistics.median(times[_WARM_STEPS:]) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench_forms", description="Time forms of answers.")
    parser.add_argument("--model", default="smollm2-135m", help="name, path or hf:owner/name")
    parser.add_argument("--rows", type=int, default=64, help="answers at once, each in a form of its own")
    parser.add_argument("--turns", type=int, default=12, help=f"of {_TURN_STEPS} steps, for each of both")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    path = str(locate(args.model))
    formats, _ = resolve_formats(path, "auto", "auto", lambda sentence: None)
    config = EngineConfig(model=path, weight_format=formats.weights, kv_format=formats.kv, max_running=args.rows)
    sys.stdout.write(json.dumps(measure(config, args.rows, args.turns, args.temperature)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
