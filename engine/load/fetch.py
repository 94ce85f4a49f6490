"""Finds a model by name, path or hub name, and pulls the known ones on first use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from engine.errors import ModelError
from engine.load.wheels import KNOWN_MODELS, Accept, is_kept, pull, target_of

__all__ = ["KNOWN_MODELS", "cached_path", "locate", "locate_shape"]

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_COPIES = ["*/*", "consolidated*"]  # a second copy of the weights in another layout


def locate(
    model: str, *, cache_dir: Path | None = None, say: Callable[[str], None] | None = None, accept: Accept | None = None
) -> Path:
    """The path of `model`: a known name (pulled on first use), an existing path, or `hf:owner/name`.

    `say` gets one sentence before a slow phase. `accept` is asked before a model is pulled whose licence binds its
    users; without it such a model has to be there. Raises ModelError that names the way out.
    """
    say = say or (lambda _: None)
    if model in KNOWN_MODELS:
        return pull(model, KNOWN_MODELS[model], cache_dir or _cache_dir(), say, accept)
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
    known, folder = KNOWN_MODELS[name], cache_dir or _cache_dir()
    return target_of(known, folder) if is_kept(known, folder) else None


def _cache_dir() -> Path:
    return user_cache_path("batchsvc") / "models"


def _from_hub(name: str, say: Callable[[str], None], files: list[str] = _HUB_FILES) -> Path:
    """A snapshot of the `files` of a hub model; HF_HOME and HF_TOKEN are honoured by the hub's own client."""
    from huggingface_hub import snapshot_download

    say(f"Fetching {name} from the Hugging Face hub.")
    try:
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=_HUB_COPIES))
    except Exception as error:  # the client raises many kinds, of three libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"hf:{name} can't be fetched: {reason.rstrip('.')}.") from error
