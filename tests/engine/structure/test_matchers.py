"""A grammar is compiled once however many answers follow it, and kept while there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLMatcher

from engine.structure import matchers
from engine.structure.grammar import spec_of
from engine.structure.matchers import Grammars
from engine.text import load_text


class Counted(Grammars):
    """Remembers what it compiled."""

    def __init__(self, model: Path) -> None:
        text = load_text(str(model))
        super().__init__(text.tokenizer, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)
        self.compiled: list[str] = []

    def _compile(self, spec: str) -> LLMatcher:
        self.compiled.append(spec)
        return super()._compile(spec)


def specs(count: int) -> list[str]:
    return [spec_of("regex", f"[a-z]{{{n + 1}}}") for n in range(count)]


def test_each_distinct_schema_is_compiled_once(tiny_model: Path) -> None:
    grammars, three = Counted(tiny_model), specs(3)
    started = [grammars.start(three[n % 3]) for n in range(64)]
    assert grammars.compiled == three
    grammars.push(started[:1], [grammars._tokenizer.tokenize_str("a")[0]])
    assert [matcher.num_tokens for matcher in started[:4]] == [1, 0, 0, 0], "each answer goes its own way"


def test_those_that_were_asked_for_last_are_kept(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, (a, b, c) = Counted(tiny_model), specs(3)
    monkeypatch.setattr(matchers, "KEPT_CHARS", len(a) + len(b))
    for spec in (a, b, a, c, a, b):
        grammars.start(spec)
    assert grammars.compiled == [a, b, c, b], "b had to go for c"
    monkeypatch.setattr(matchers, "KEPT_CHARS", 1)
    for spec in (c, c):
        grammars.start(spec)
    assert grammars.compiled[4:] == [c], "the last one always stays"
