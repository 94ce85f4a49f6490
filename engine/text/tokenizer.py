"""Text to token ids and back, by the `tokenizers` library, from tokenizer.json or from GGUF data.

Decoding goes through bytes: every token has a byte string of its own, so that text can be cut between any two
tokens. Special tokens have none (they are not part of an answer).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ModelError
from engine.load.fields import Fields
from engine.text import spm

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_ENCODE_BATCH = 256  # texts an inner call: an Encoding holds some 100 bytes a token until it is dropped


class Tokenizer:
    """Encodes and decodes for one model. Thread-safe; encoding releases the GIL and uses all cores."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._spelling = _Spelling.of(backend)
        self.strips_leading_space = self._spelling.strips_leading_space

    @classmethod
    def from_json(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json. Raises ModelError when it is missing, broken or decodes in an unknown way."""
        if not path.is_file():
            raise ModelError(f"{path.parent} has no tokenizer.json.")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except ModelError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{path} is no usable tokenizer: {error}.") from error

    @classmethod
    def from_gguf(cls, fields: dict[str, Any], path: Path) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes. Raises ModelError for a kind we don't know."""
        source = Fields(fields, path)
        kind = source.text("tokenizer.ggml.model", default="")
        if kind not in _GGUF_KINDS:
            known = ", ".join(_GGUF_KINDS)
            raise ModelError(f"{path} has a tokenizer of the kind {kind!r}; supported in GGUF are {known}.")
        tokens = source.texts("tokenizer.ggml.tokens")
        if tokens is None:
            raise ModelError(f"{path} carries no complete tokenizer (tokens are missing).")
        given = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
        kinds = [int(kind) for kind in given if isinstance(kind, int | np.integer)] if np.iterable(given) else []
        if len(kinds) != len(tokens):
            raise ModelError(f"{path} has {len(tokens)} tokens but {len(kinds)} token types.")
        backend = _GGUF_KINDS[kind](source, tokens, kinds)
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        _surround(backend, fields, tokens)
        return cls(backend)

    def save(self, path: Path) -> None:
        """Writes it as a tokenizer.json."""
        self._backend.save(str(path))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; the texts of special tokens become their ids, nothing is added around."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in order."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), _ENCODE_BATCH):
            batch = list(texts[start : start + _ENCODE_BATCH])
            ids += [encoding.ids for encoding in self._backend.encode_batch_fast(batch, add_special_tokens=False)]
        return ids

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of plain texts, in order, with what the model wants around one (such as its first token)."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), _ENCODE_BATCH):
            ids += [
                encoding.ids for encoding in self._backend.encode_batch_fast(list(texts[start : start + _ENCODE_BATCH]))
            ]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i in self._special or i >= len(table):
                continue
            table[i] = self._spelling.added_bytes(token) if i in self._added else self._spelling.to_bytes(token)
        return table

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes token `token_id` stands for; empty for special tokens and for ids outside the vocabulary."""
        return self._token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def spelled(self, token_id: int) -> bytes:
        """The bytes of token `token_id`; a special token, which stands for none, by its name."""
        return self.token_bytes(token_id) or (self._backend.id_to_token(token_id) or "").encode()

    def token_id(self, token: str) -> int | None:
        """The id of the vocabulary entry `token`."""
        found: int | None = self._backend.token_to_id(token)
        return found


def _byte_level_bpe(source: Fields, tokens: list[str], _kinds: list[int]) -> tokenizers.Tokenizer:
    path, merges = source.path, source.texts("tokenizer.ggml.merges")
    pre = source.text("tokenizer.ggml.pre", default="")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"{path} names the pre-tokenizer {pre!r}, which we don't know; known: {known}.")
    if merges is None:
        raise ModelError(f"{path} carries no complete tokenizer (merges are missing).")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    is_broken = any(" " not in merge or merge.replace(" ", "", 1) not in vocab for merge in merges)
    if is_broken or len(vocab) != len(tokens):
        raise ModelError(f"{path} has a broken tokenizer: a merge or a token doesn't fit its vocabulary.")
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} has a broken tokenizer: {error}.") from error
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_piece(source: Fields, tokens: list[str], kinds: list[int]) -> tokenizers.Tokenizer:
    scores = source.values.get("tokenizer.ggml.scores")
    unknown = source.values.get("tokenizer.ggml.unknown_token_id")
    return spm.backend_of(
        tokens,
        scores.tolist() if isinstance(scores, np.ndarray) and scores.dtype.kind == "f" else [],
        kinds,
        unknown_id=unknown if isinstance(unknown, int) else None,
        has_space_prefix=source.flag("tokenizer.ggml.add_space_prefix", default=True),
        path=source.path,
    )


_GGUF_KINDS = {"gpt2": _byte_level_bpe, "llama": _sentence_piece}


def _surround(backend: tokenizers.Tokenizer, fields: dict[str, Any], tokens: list[str]) -> None:
    """Has plain texts begin and end as the GGUF file says."""
    around = {}
    for name in ("bos", "eos"):
        token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
        if fields.get(f"tokenizer.ggml.add_{name}_token") is True and isinstance(token_id, int):
            if not 0 <= token_id < len(tokens):
                raise ModelError(f"tokenizer.ggml.{name}_token_id is {token_id}; there are {len(tokens)} tokens.")
            around[name] = (tokens[token_id], token_id)
    if around:
        pieces = [around.get("bos", ("",))[0], "$A", around.get("eos", ("",))[0]]
        backend.post_processor = processors.TemplateProcessing(
            single=[piece for piece in pieces if piece], special_tokens=list(dict(around.values()).items())
        )


class _Spelling:
    """How a vocabulary spells bytes: as GPT-2's printable stand-ins, or as text with ▁ for space and <0xNN>."""

    def __init__(self, *, is_byte_level: bool, strips_leading_space: bool) -> None:
        self._is_byte_level = is_byte_level
        self.strips_leading_space = strips_leading_space

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _Spelling:
        # the decoder alone: the text of a whole tokenizer may have half a million merges
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        parts = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder or {"type": None}]
        kinds = {part["type"] for part in parts}
        if kinds == {"ByteLevel"}:
            return cls(is_byte_level=True, strips_leading_space=False)
        replaces = [part for part in parts if part["type"] == "Replace"]
        spaces = all(part["pattern"] == {"String": "▁"} and part["content"] == " " for part in replaces)
        if replaces and spaces and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            return cls(is_byte_level=False, strips_leading_space="Strip" in kinds)
        raise ModelError(
            f"This tokenizer decodes by {', '.join(map(str, sorted(kinds, key=str)))}, which is not supported."
        )

    def added_bytes(self, token: str) -> bytes:
        """Of a token that is matched as it is, beside the vocabulary."""
        return token.encode() if self._is_byte_level else self.to_bytes(token)

    def to_bytes(self, token: str) -> bytes:
        if self._is_byte_level:
            stand_ins = _stand_ins()
            return b"".join(bytes([stand_ins[c]]) if c in stand_ins else c.encode() for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


@functools.cache
def _stand_ins() -> dict[str, int]:
    """GPT-2's printable character for each byte: printable Latin-1 stands for itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_then_bytes(words: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _digits_then_bytes,
    "starcoder": _digits_then_bytes,
    "gpt-2": _byte_level,
    "llama-bpe": functools.partial(_split_then_bytes, _LLAMA3_WORDS),
    "qwen2": functools.partial(_split_then_bytes, _QWEN2_WORDS),
}
