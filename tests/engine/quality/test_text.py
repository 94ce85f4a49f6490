"""The text becomes windows of tokens, and what can't be measured on is refused in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ConfigError, ModelError
from engine.quality.text import LEAST_TOKENS, check_same, read_windows
from engine.text import TextModel, load_text
from tests.tiny import make_tiny_model

WORDS = "The customer asks for a refund of order 1234567 that was late. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def test_windows_are_the_text_and_fit_the_context(text: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(WORDS * 100, "utf-8")
    ids = text.tokenizer.encode(WORDS * 100)
    windows = read_windows(text, file, 10**6)
    assert [token for window in windows for token in window] == ids
    assert [len(window) for window in windows[:-1]] == [512] * (len(windows) - 1)
    assert sum(map(len, read_windows(text, file, 600))) == 600
    assert len(read_windows(text, file, 513)) == 1, "one token alone predicts nothing"


def test_ours_is_long_enough_for_anybody(text: TextModel) -> None:
    assert sum(map(len, read_windows(text, None, 10**6))) > 1000


def test_each_window_begins_as_the_model_wants(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text.tokenizer, "encode_texts", lambda texts: [[1, 2] for _ in texts])
    windows = read_windows(text, None, 10**6)
    assert all(window[0] == text.meta.bos_id == 1 for window in windows)
    assert max(map(len, windows)) == 512
    monkeypatch.setattr(text.tokenizer, "encode_texts", lambda texts: [[2] for _ in texts])
    assert read_windows(text, None, 10**6)[0][0] != 2, "what stands behind a text isn't put before it"


def test_short_missing_and_binary_files_are_named(text: TextModel, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    with pytest.raises(ConfigError, match=r"text\.txt can't be read: No such file"):
        read_windows(text, file, 10**6)
    file.write_text("A short one.", "utf-8")
    with pytest.raises(ConfigError, match=rf"text\.txt, \d+ tokens can be read; .* {LEAST_TOKENS} at least"):
        read_windows(text, file, 10**6)
    file.write_bytes(b"half a \xff word" * 1000)
    with pytest.raises(ConfigError, match=r"text\.txt is no text in UTF-8: byte 7"):
        read_windows(text, file, 10**6)


def test_models_that_read_other_tokens_are_no_pair(text: TextModel) -> None:
    wider = replace(text, meta=replace(text.meta, vocab_size=400, name="wider"))
    with pytest.raises(ModelError, match="wider has 400 tokens and tiny 384"):
        check_same(wider, text, ((1, 2),), ((1, 2),))
    with pytest.raises(ModelError, match="read the same text as different tokens"):
        check_same(text, text, ((1, 2),), ((1, 3),))
    check_same(text, text, ((1, 2),), ((1, 2),))
