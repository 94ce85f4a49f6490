"""Lets the teacher answer the lines that have no answer yet, with the engine; what it said is kept line by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.distill.errors import DistillError
from engine.distill.lines import Line
from engine.engine import Engine
from engine.request import FinishReason, Request

FILE = "answers.jsonl"


def drawn(lines: Sequence[Line], samples: int) -> list[Line]:
    """So many further lines for each, whose answers are to be drawn at temperature 1, as long as its own is."""

    def again(line: Line, sample: int) -> Line:
        most = max(len(line.answer or ()), 1)
        found = line._replace(answer=None, sample=sample)
        return found._replace(params=replace(line.params, max_tokens=most, temperature=1.0, top_p=1.0, seed=found.key))

    return [again(line, sample) for sample in range(1, samples + 1) for line in lines]


def answered(
    lines: Sequence[Line],
    config: EngineConfig,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Line], int]:
    """The lines with all their answers, but for those that the teacher couldn't answer; how many these are.

    What an earlier run had said is read from `folder`.
    """
    missing = [line for line in lines if line.answer is None]
    if not missing:
        return list(lines), 0
    kept = folder / FILE
    said = _read(kept)
    left = [line for line in missing if line.key not in said]
    if left:
        engine = Engine(config)
        requests = (Request(id=str(line.key), prompt_ids=line.prompt, params=line.params) for line in left)
        _end_line(kept)
        try:
            with kept.open("a", encoding="utf-8") as file:
                for completion in engine.run(requests):
                    failed = completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
                    key, ids = int(completion.request_id), () if failed else completion.token_ids
                    said[key] = ids
                    file.write(json.dumps({"key": key, "answer": ids}) + "\n")
                    file.flush()
                    progress(len(missing) - len(left) + sum(line.key in said for line in left), len(missing))
        except OSError as error:
            raise DistillError(
                f"The teacher's answers can't be written to {kept}: {error.strerror or error}."
            ) from error
    found = [line if line.answer is not None else line._replace(answer=said[line.key]) for line in lines]
    usable = [line for line in found if line.answer]
    return usable, len(found) - len(usable)


def _read(path: Path) -> dict[int, tuple[int, ...]]:
    """What was said before, by key; a line that a killed run has begun counts for nothing."""
    said: dict[int, tuple[int, ...]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            said[int(value["key"])] = tuple(value["answer"])
    return said


def _end_line(path: Path) -> None:
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
