"""`python -m engine.bench_forms`: what forms cost, as a ratio of step times with and without them.

The same prompts are answered twice by one engine, all at once: freely, and each in a form of its own (objects, arrays,
enums, patterns, by turns). No answer ends before the last step that is timed, so both do the same work but for the
masks. Prints one JSON line:

free_ms, formed_ms   the median step of decodes in each, in the best of three rounds
ratio                formed_ms / free_ms
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
from engine.quality import resolve_formats
from engine.request import Request, SamplingParams
from engine.structure.grammar import spec_of
from engine.structure.matchers import Grammars
from engine.text import TextModel, load_text

_WARM_STEPS = 8
_ROUNDS = 3


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


def measure(config: EngineConfig, num_rows: int, num_steps: int, temperature: float) -> dict[str, Any]:
    """The figures described above."""
    text = load_text(config.model)
    engine = Engine(config, text=text)
    prompts = [  # different ones: equal answers to equal prompts would share their memory
        text.prompt_ids([{"role": "user", "content": f"Queue {index}: describe the tickets of this week as JSON."}])
        for index in range(num_rows)
    ]

    def requests(name: str, forms: Sequence[str]) -> list[Request]:
        params = [
            SamplingParams(max_tokens=num_steps, temperature=temperature, seed=index, ignore_eos=True, grammar=form)
            for index, form in enumerate(forms)
        ]
        return [
            Request(id=f"{name} {i}", prompt_ids=prompt, params=mine)
            for i, (prompt, mine) in enumerate(zip(prompts, params, strict=True))
        ]

    forms = [mixed_form(index) for index in range(num_rows)]
    free_ms = formed_ms = float("inf")
    answers: list[tuple[int, ...]] = []
    for no in range(_ROUNDS):  # by turns, as machines have better and worse moments
        free_ms = min(free_ms, _run(engine, requests(f"free {no}", [""] * num_rows))[0])
        step_ms, answers = _run(engine, requests(f"formed {no}", forms))
        formed_ms = min(formed_ms, step_ms)
    compile_ms, masks_ms = _replay(text, forms, answers)
    return {
        "rows": num_rows,
        "temperature": temperature,
        "free_ms": round(free_ms, 2),
        "formed_ms": round(formed_ms, 2),
        "ratio": round(formed_ms / free_ms, 4),
        "masks_ms": round(masks_ms, 3),
        "compile_ms": round(compile_ms, 2),
    }


def _run(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[tuple[int, ...]]]:
    """The median step in which all took part, and the answers."""
    for request in requests:
        engine.add(request)
    times = []
    answers: dict[str, tuple[int, ...]] = {}
    while engine.has_work():
        start = time.perf_counter()
        output = engine.step()
        if len(output.new_tokens) == len(requests):
            times.append(time.perf_counter() - start)
        answers |= {completion.request_id: completion.token_ids for completion in output.completions}
    return statistics.median(times[_WARM_STEPS:]) * 1e3, [answers[request.id] for request in requests]


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
    parser.add_argument("--steps", type=int, default=64, help="tokens of each")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args(argv)
    path = str(locate(args.model))
    formats, _ = resolve_formats(path, "auto", "auto", lambda sentence: None)
    config = EngineConfig(model=path, weight_format=formats.weights, kv_format=formats.kv, max_running=args.rows)
    sys.stdout.write(json.dumps(measure(config, args.rows, args.steps, args.temperature)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
