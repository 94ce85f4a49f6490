"""The text that formats are measured on, as windows of token ids: our own, or a file of the user's; no torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from engine.errors import ConfigError, ModelError
from engine.text import TextModel

WINDOW_TOKENS = 2048
LEAST_TOKENS = 256
"""Fewer say nothing about a tail, and little about a mean."""
_MOST_BYTES = 64 << 20

Windows = tuple[tuple[int, ...], ...]


def read_windows(text: TextModel, file: Path | None, most_tokens: int) -> Windows:
    """Token ids of the text, in windows that fit the model's context; each begins as the model wants a text to begin.

    Raises ConfigError for a file that can't be read, or is too short.
    """
    ids = text.tokenizer.encode(_read(file))[:most_tokens]
    if len(ids) < LEAST_TOKENS:
        name = "the held-out text" if file is None else str(file)
        raise ConfigError(
            f"Of {name}, {len(ids):,} tokens can be read; quality is measured on {LEAST_TOKENS} at least."
        )
    begin = _begin(text)
    room = min(WINDOW_TOKENS, text.meta.context_tokens) - len(begin)
    windows = [tuple(begin + ids[start : start + room]) for start in range(0, len(ids), room)]
    return tuple(window for window in windows if len(window) > 1)  # a single token predicts nothing that is known


def check_same(one: TextModel, other: TextModel, windows: Windows, others: Windows) -> None:
    """Raises ModelError where two models don't read the text as the same tokens, of as many."""
    if one.meta.vocab_size != other.meta.vocab_size:
        raise ModelError(
            f"{one.meta.name} has {one.meta.vocab_size:,} tokens and {other.meta.name} {other.meta.vocab_size:,}: "
            "what they predict can't be compared; name the model that the one was made from as the other."
        )
    if windows != others:
        raise ModelError(
            f"{one.meta.name} and {other.meta.name} read the same text as different tokens: what they predict can't be "
            "compared; name the model that the one was made from as the other."
        )


def _read(file: Path | None) -> str:
    if file is None:
        return resources.files("engine").joinpath("heldout.txt").read_text("utf-8")
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{file} is larger than {_MOST_BYTES >> 20} MiB; a part of it is enough.")
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8: byte {error.start} can't be read.") from error
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror or error}.") from error


def _begin(text: TextModel) -> list[int]:
    """The token that stands before every text of this model, if one does."""
    around = text.tokenizer.encode_texts([""])[0]
    return around[:1] if around and around[0] == text.meta.bos_id else []
