"""What was measured once, in the user's cache: by model, formats and version of the arithmetic; no torch."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import platformdirs

from engine.config import Formats
from engine.load.meta import ModelMeta
from engine.quality.figures import TAIL_SHARES, Quality

_VERSION = 5  # of the arithmetic and the text: a new one measures again
_UNFUSED_S = 86_400


def folder() -> Path:
    """Where it lies."""
    return platformdirs.user_cache_path("batchsvc", appauthor=False) / "quality"


def load(meta: ModelMeta, formats: Formats, against: str | None) -> Quality | None:
    """What these formats cost this model against the reference of that digest, or, without one, the reference that it
    was measured against last. None: it wasn't measured, or that can't be read, or a day ago without compiled kernels,
    which may be there by now."""
    path = _file(meta, formats)
    try:
        age_s, values = time.time() - path.stat().st_mtime, json.loads(path.read_text("utf-8"))
        found = Quality(**{**values, "tail": tuple(values["tail"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_meant = against in (None, found.against) and Formats(found.weight_format, found.kv_format) == formats
    is_whole = len(found.tail) == len(TAIL_SHARES) and (found.is_fused or age_s < _UNFUSED_S)
    return found if is_meant and is_whole else None


def store(meta: ModelMeta, quality: Quality) -> None:
    """Keep it, if the cache can be written to."""
    path = _file(meta, Formats(quality.weight_format, quality.kv_format))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".partial")
        scratch.write_text(json.dumps(asdict(quality)), "utf-8")
        scratch.replace(path)
    except OSError:  # a read-only cache only costs the next measurement
        return


def _file(meta: ModelMeta, formats: Formats) -> Path:
    return folder() / f"{meta.digest[:24]}-{formats.weights}-kv-{formats.kv}-v{_VERSION}.json"
