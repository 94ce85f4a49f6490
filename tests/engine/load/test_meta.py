"""A model's files describe it: digest, ends of answer, chat template, and what is refused at the door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.load.meta import read_meta, weight_files
from tests.tiny import make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_same_files_have_the_same_digest_anywhere(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    assert read_meta(copy).digest == read_meta(model).digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_every_file_that_decides_answers_is_in_the_digest(model: Path, name: str) -> None:
    before = read_meta(model).digest
    with (model / name).open("ab") as file:
        file.write(b" ")
    assert read_meta(model).digest != before


def test_ends_of_answer_come_from_all_places_that_name_them(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    edit(model / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert read_meta(model).eos_ids == {0, 2, 5, 7}


def test_a_template_may_be_one_of_several_or_a_file(model: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    edit(model / "tokenizer_config.json", chat_template=several)
    assert read_meta(model).chat_template == "yes"
    (model / "chat_template.jinja").write_text("file")
    assert read_meta(model).chat_template == "file"


def test_the_default_model_describes_itself(default_model: Path) -> None:
    meta = read_meta(default_model)
    assert (meta.family, meta.context_tokens, meta.vocab_size) == ("llama", 8192, 49152)
    assert (meta.eos_ids, meta.eos_token, meta.bos_id) == ({2}, "<|im_end|>", 1)
    assert meta.digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def indexed(model: Path, *names: str) -> Path:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))
    return model


def test_an_index_says_which_files_are_the_weights(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert weight_files(indexed(model, "model.safetensors", "model.safetensors")) == [model / "model.safetensors"]


@pytest.mark.parametrize("name", ["other.safetensors", "../m.safetensors", "/etc/passwd", "model.bin", ""])
def test_an_index_may_name_only_weights_that_are_there(model: Path, name: str) -> None:
    with pytest.raises(ModelError, match="index"):
        read_meta(indexed(model, "model.safetensors", name))


def broken(model: Path, how: str) -> None:
    if how == "pickle":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    elif how == "no weights":
        (model / "model.safetensors").unlink()
    elif how == "another family":
        edit(model / "config.json", model_type="mamba")
    elif how == "no context":
        edit(model / "config.json", max_position_embeddings=None)
    elif how == "no JSON":
        (model / "config.json").write_text("{")
    elif how == "deep JSON":
        (model / "config.json").write_text("[" * 100_000)
    elif how == "a list":
        (model / "config.json").write_text("[]")
    elif how == "no config":
        (model / "config.json").unlink()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("pickle", "pickle"),
        ("no weights", "no .safetensors"),
        ("another family", "'mamba'"),
        ("no context", "max_position_embeddings"),
        ("no JSON", "config.json"),
        ("deep JSON", "config.json"),
        ("a list", "no JSON object"),
        ("no config", "config.json is missing"),
    ],
)
def test_what_is_no_usable_model_is_refused_by_name(model: Path, how: str, says: str) -> None:
    broken(model, how)
    with pytest.raises(ModelError, match=says):
        read_meta(model)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model at"):
        read_meta(tmp_path / "nowhere")
