"""The masks of a window are those that reading its draft token by token gives, and leave the answer where it was."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.structure.grammar import spec_of
from engine.structure.matchers import Grammars, Matcher
from engine.text import TextModel, load_text

SPECS = [
    spec_of("regex", "([a-c]{2} ){2,6}end"),
    spec_of("choice", ["late", "lost parcel", "lost"]),
    spec_of("json", {"type": "object", "properties": {"kind": {"enum": ["late", "lost"]}}, "required": ["kind"]}),
]


@pytest.fixture(scope="module")
def text(tiny_model: Path) -> TextModel:
    return load_text(tiny_model)


def allowed(mask: NDArray[np.int32]) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return found


def test_each_row_is_the_mask_after_the_tokens_before_it(text: TextModel) -> None:
    grammars = Grammars(text.tokenizer, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)
    rng = random.Random(1)
    ended = 0
    for trial in range(60):
        matchers = [grammars.start(spec) for spec in SPECS]
        for matcher in matchers[: trial % 2 * 3]:
            grammars.push([matcher], [rng.choice(allowed(grammars.masks([matcher])[0]))])
        before = [grammars.masks([matcher])[0] for matcher in matchers]
        drafts: list[list[int]] = []
        expected: list[list[NDArray[np.int32]]] = []
        for matcher in matchers:
            ahead, draft, rows = Matcher(matcher.state.deep_copy()), [], []
            for _ in range(rng.randint(1, 6)):
                rows.append(grammars.masks([ahead])[0])
                draft.append(rng.choice(allowed(rows[-1])))
                grammars.push([ahead], [draft[-1]])
                if ahead.is_ended:
                    ended += 1
                    break
            drafts.append([*draft, *text.tokenizer.encode("?")])  # what may not come, last
            expected.append(rows)
        found = grammars.window_masks(matchers, drafts)
        for window, draft, rows in zip(found, drafts, expected, strict=True):
            assert len(window) == len(draft) + 1
            assert all((mask == row).all() for mask, row in zip(window, rows, strict=False))
        assert all((grammars.masks([m])[0] == row).all() for m, row in zip(matchers, before, strict=True))
        assert not any(matcher.state.is_stopped() for matcher in matchers)
    assert ended > 10, "forms come to their end inside a window, too"


def test_a_draft_that_comes_to_a_dead_end_leaves_the_answer_its_form(text: TextModel) -> None:
    """Behind x nothing can follow: with a rule that never ends, and with one that grows without reading anything."""
    grammars = Grammars(text.tokenizer, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)
    for dead in ('dead "a"', '"a" dead'):
        matcher = grammars.start(spec_of("lark", f'start: "ok" | "x" dead\ndead: {dead}'))
        before = grammars.masks([matcher])[0]
        ahead = Matcher(matcher.state.deep_copy())
        draft = text.tokenizer.encode("x" + "a" * 9)
        for token_id in draft:
            grammars.masks([ahead])
            grammars.push([ahead], [token_id])
        assert ahead.error is not None
        grammars.window_masks([matcher], [draft])
        assert (grammars.masks([matcher])[0] == before).all()
        for token_id in text.tokenizer.encode("ok"):
            grammars.push([matcher], [token_id])
        assert matcher.error is None and matcher.complete_at == matcher.num_tokens


def test_it_is_known_after_which_token_a_form_is_complete(text: TextModel) -> None:
    grammars = Grammars(text.tokenizer, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)
    matcher = grammars.start(spec_of("choice", ["late"]))
    token_ids = text.tokenizer.encode("late")
    for count, token_id in enumerate(token_ids, 1):
        grammars.push([matcher], [token_id])
        assert matcher.num_tokens == count
        assert matcher.complete_at == (count if count == len(token_ids) else None)
