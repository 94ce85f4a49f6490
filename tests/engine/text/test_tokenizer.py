"""Tokenizing is exact: the ids of the shared workloads, the pre-tokenizer the file names, bytes there and back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from engine.errors import ModelError
from engine.load.gguf import GGUFFile
from engine.text import TextModel, Tokenizer, load_text
from tests.tiny import make_tiny_model

PROMPTS = [json.loads(line) for line in (Path(__file__).parents[2] / "data/prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def real(default_model: Path) -> TextModel:
    return load_text(default_model)


@pytest.fixture(scope="module")
def real_fields(default_model: Path) -> dict[str, Any]:
    return GGUFFile(default_model).fields


def test_template_and_tokenizer_reproduce_the_workloads(real: TextModel) -> None:
    assert [real.prompt_ids(prompt["messages"]) for prompt in PROMPTS] == [prompt["ids"] for prompt in PROMPTS]


def test_many_prompts_at_once_are_the_same(real: TextModel) -> None:
    texts = [real.render(prompt["messages"]) for prompt in PROMPTS]
    assert real.encode_prompts(texts * 7) == [prompt["ids"] for prompt in PROMPTS] * 7
    assert real.encode_prompts([]) == []


def test_digits_are_single_tokens(real: TextModel) -> None:
    assert [real.tokenizer.decode([i]) for i in real.tokenizer.encode("12345")] == list("12345")


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_survives(real: TextModel, text: str) -> None:
    """Except for bytes that the model's vocabulary lacks (some control characters, planes nobody uses)."""
    known = {real.tokenizer.token_bytes(i) for i in range(real.tokenizer.vocab_size)}
    text = "".join(c for c in text.replace("<|", "") if all(bytes([byte]) in known for byte in c.encode()))
    assert real.tokenizer.decode(real.tokenizer.encode(text)) == text


def test_decoding_agrees_with_the_library(real: TextModel, real_fields: dict[str, Any]) -> None:
    oracle = tokenizers.Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(real_fields["tokenizer.ggml.tokens"])}, merges=[])
    )
    oracle.decoder = decoders.ByteLevel()
    oracle.add_special_tokens([AddedToken(t, special=True) for t in real_fields["tokenizer.ggml.tokens"][:17]])
    for prompt in PROMPTS:
        assert real.tokenizer.decode(prompt["ids"]) == oracle.decode(prompt["ids"])


def test_special_tokens_have_no_text(real: TextModel) -> None:
    assert real.tokenizer.token_bytes(2) == b""
    assert real.tokenizer.token_bytes(10**9) == b""


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġapples", "!!", "Ċ", "Ċ", "I", "'m"]),
        ("gpt-2", ["1234", "Ġapples", "!!", "Ċ", "Ċ", "I", "'m"]),
        ("llama-bpe", ["123", "4", "Ġapples", "!!ĊĊ", "I", "'m"]),
        ("qwen2", ["1", "2", "3", "4", "Ġapples", "!!ĊĊ", "I", "'m"]),
    ],
)
def test_the_named_pre_tokenizer_splits_as_its_models_expect(
    real_fields: dict[str, Any], pre: str, pieces: list[str]
) -> None:
    tokenizer = Tokenizer.from_gguf(real_fields | {"tokenizer.ggml.pre": pre}, Path("x.gguf"))
    found = tokenizer._backend.pre_tokenizer.pre_tokenize_str("1234 apples!!\n\nI'm")
    assert [piece for piece, _ in found] == pieces


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer.ggml.pre": "poro-chat"}, "pre-tokenizer 'poro-chat'"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer ''"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "tokens and scores"),
        ({"tokenizer.ggml.merges": None}, "merges are missing"),
        ({"tokenizer.ggml.merges": ["xx yy"]}, "doesn't fit"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "doesn't fit"),
        ({"tokenizer.ggml.token_type": [1]}, "token types"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**9}, "bos_token_id is 1000000000"),
        ({"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": -1}, "eos_token_id is -1"),
    ],
)
def test_a_tokenizer_we_do_not_know_is_refused(real_fields: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        Tokenizer.from_gguf(real_fields | changes, Path("x.gguf"))


def test_sentencepiece_spelling_keeps_inner_spaces_and_bytes() -> None:
    words = ["<unk>", "<s>", "▁Hello", "▁wor", "ld", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 2]
    assert tokenizer.decode(ids) == backend.decode(ids) == "Hello world😀 Hello"


def test_an_unknown_way_of_decoding_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m") / "tokenizer.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {"decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": True}}
        )
    )
    with pytest.raises(ModelError, match="CTC"):
        load_text(tmp_path / "m")


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"model": {"type": "Nothing"}}'])
def test_a_broken_tokenizer_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = make_tiny_model(tmp_path / "m") / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match="tokenizer"):
        load_text(tmp_path / "m")


def test_truncation_stored_in_the_file_is_switched_off(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m") / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": cut}))
    assert len(load_text(tmp_path / "m").tokenizer.encode("a b c d e f g h")) > 4


def test_the_text_side_loads_no_torch(tiny_model: Path) -> None:
    code = "import sys; from engine.text import load_text; load_text(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tiny_model)], check=False).returncode == 0
