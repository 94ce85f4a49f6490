"""Writes a model as a Hugging Face directory: shards, config.json, tokenizer, chat template; quantized or plain.

Everything goes to a directory beside the target, which gets its name when all is written.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError, ModelError
from engine.load.families import norm_shift
from engine.load.hf_config import config_json
from engine.load.meta import ModelMeta, read_json
from engine.load.names import to_hf
from engine.load.origin import FILE as ORIGIN
from engine.load.pooling import pooling_files
from engine.load.tensor_file import write_tensors
from engine.model.config import ModelConfig
from engine.quant.fp8 import Fp8Weight
from engine.quant.groups import GroupedWeight, Scheme
from engine.quant.layouts import FP8_CONFIG, LAYOUTS, Layout
from engine.quant.recipe import Parameter, QuantizedWeight
from engine.text import load_text

SHARD_BYTES = 2 << 30
DTYPES = {"gptq": torch.float16, "awq": torch.float16, "compressed-tensors": torch.bfloat16}
"""What is not quantized has this type, and so have scales: what readers of the layout expect."""

_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("generation_config.json", "chat_template.jinja"),
)
_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


def save(
    target: Path,
    meta: ModelMeta,
    model: ModelConfig,
    scheme: Scheme,
    layout: str,
    parameters: Iterable[Parameter],
    origin: Mapping[str, Any],
) -> None:
    """Writes the model to `target`, which must not exist, and beside it what it was made from (load/origin.py).

    Raises ModelError or ConfigError; nothing is left then.
    """
    with _made(target) as scratch:
        config = _config(meta, model)
        config["torch_dtype"] = _NAMES[scheme.scale_dtype]
        config["quantization_config"] = FP8_CONFIG if scheme.is_float else LAYOUTS[layout].config(scheme)
        _write_weights(scratch, LAYOUTS[layout], scheme.scale_dtype, _as_named(model, parameters))
        _write_json(scratch / "config.json", config)
        _write_json(scratch / ORIGIN, origin)
        _write_text_side(scratch, meta)


def save_plain(
    target: Path,
    meta: ModelMeta,
    model: ModelConfig,
    config: Mapping[str, Any],
    parameters: Iterable[Parameter],
    origin: Mapping[str, Any],
    more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Likewise a model of the shape `model` whose weights aren't quantized, as bf16, with the tokenizer of `meta`.

    `config` is its config.json without the ids of tokens, `more` writes what else belongs to it.
    """
    dtype = torch.bfloat16
    with _made(target) as scratch:
        _write_weights(scratch, LAYOUTS["compressed-tensors"], dtype, _as_named(model, parameters))
        _write_json(scratch / "config.json", {**config, **_token_ids(meta), "torch_dtype": _NAMES[dtype]})
        _write_json(scratch / ORIGIN, origin)
        _write_text_side(scratch, meta)
        more(scratch)


@contextmanager
def _made(target: Path) -> Iterator[Path]:
    """A new directory that becomes `target` at the end; nothing is left of it where that isn't reached."""
    if target.exists():
        raise ConfigError(f"{target} exists already; name another place, or remove it.")
    folder: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        scratch = folder / "model"  # the folder itself is closed to others
        scratch.mkdir()
        yield scratch
        scratch.replace(target)
    except OSError as error:
        raise ModelError(f"The model can't be written to {target}: {error.strerror or error}.") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _as_named(model: ModelConfig, parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """The parameters as Hugging Face calls them, and norms as its files keep them."""
    shift = norm_shift(model.family)
    for name, value in parameters:
        stored = value - shift if isinstance(value, Tensor) and name.endswith("norm.weight") else value
        yield to_hf(name, has_post_norms=model.has_post_norms), stored


def _write_weights(directory: Path, layout: Layout, dtype: torch.dtype, parameters: Iterable[Parameter]) -> None:
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        write_tensors(shard, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard, size = {}, 0

    for name, value in parameters:
        for key, tensor in _tensors(name, value, layout, dtype).items():
            shard[key] = tensor
            size += tensor.nbytes
            total += tensor.nbytes
        if size >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, keys in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{index}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(keys, file)
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _tensors(key: str, value: Tensor | QuantizedWeight, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    if isinstance(value, Fp8Weight):
        return {key: value.values.contiguous(), f"{key}_scale": value.scale.to(dtype).contiguous()}
    if isinstance(value, GroupedWeight):
        module = key.removesuffix(".weight")
        return {f"{module}.{part}": tensor.contiguous() for part, tensor in layout.write(value, dtype).items()}
    stored = value.to(dtype).contiguous()
    if not stored.isfinite().all():
        raise ModelError(f"The tensor {key} doesn't fit into {_NAMES[dtype]}; save as compressed-tensors instead.")
    return {key: stored.clone()}


def _config(meta: ModelMeta, model: ModelConfig) -> dict[str, Any]:
    """The config.json without quantization: the model's own, or made from what a GGUF file says."""
    if meta.path.is_dir():
        config = read_json(meta.path / "config.json")
        return {name: value for name, value in config.items() if name not in ("quantization_config", "dtype")}
    return config_json(model, meta.path) | _token_ids(meta)


def _token_ids(meta: ModelMeta) -> dict[str, Any]:
    ends = sorted(meta.eos_ids)
    return {"bos_token_id": meta.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends}


def _write_text_side(directory: Path, meta: ModelMeta) -> None:
    if meta.path.is_dir():
        files = [meta.path / name for name in _COPIED if (meta.path / name).is_file()]
        for file in (*files, *pooling_files(meta.path)):
            copy = directory / file.relative_to(meta.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        return
    load_text(meta.path).tokenizer.save(directory / "tokenizer.json")
    names = {"bos_token": meta.bos_token, "eos_token": meta.eos_token, "chat_template": meta.chat_template}
    said: dict[str, Any] = {name: value for name, value in names.items() if value}
    said |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": meta.context_tokens}
    _write_json(directory / "tokenizer_config.json", said)
    _write_json(directory / "generation_config.json", _token_ids(meta))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
