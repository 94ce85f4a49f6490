"""What a model's files say about it, read without torch: digest, family, sizes, special tokens, chat template."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.load.families import fields_of_config, fields_of_gguf
from engine.load.pooling import directory_pooling, gguf_pooling, pooling_files
from engine.request import Pooling

_HASHED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HEADS_FILE = "heads.safetensors"
"""May lie beside a model's weights and is none of them (engine/spec/heads_file.py)."""
_TURN_ENDS = {"gemma3": "<end_of_turn>"}
"""What ends an answer too, though converters don't write it down."""

_MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMeta:
    """A model as its files describe it.

    `digest` is a sha256 over the weight, tokenizer and configuration files: two models with the same digest give the
    same answers. `eos_ids` end an answer; `bos_token` and `eos_token` are their texts, for the chat template. Vectors
    of texts have `hidden` numbers and are made as `pooling` says (engine/load/pooling.py).
    """

    path: Path
    digest: str
    family: str
    name: str
    context_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    bos_id: int | None
    bos_token: str
    eos_token: str
    chat_template: str | None
    weight_bytes: int
    hidden: int
    pooling: Pooling | None


def read_meta(path: str | Path) -> ModelMeta:
    """Reads a GGUF file or a Hugging Face directory. Raises ModelError in one sentence."""
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        return _from_gguf(path)
    raise ModelError(f"There is no model at {path}.")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError when it is missing, too large or no object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} is no model directory: {path.name} is missing.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.")
    return value


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, in order: those the index names, if there is one (some repositories hold
    a second copy of the weights beside them). Raises ModelError when there are none."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    files = sorted(file for file in path.glob("*.safetensors") if file.name != HEADS_FILE)
    if files:
        return files
    if any(path.glob("*.bin")) or any(path.glob("*.pt*")):
        raise ModelError(f"{path} has only pickle checkpoints, which are never loaded; convert it to safetensors.")
    raise ModelError(f"{path} is no model directory: it has no .safetensors file.")


def _indexed_files(index: Path) -> list[Path]:
    places = read_json(index).get("weight_map")
    names = sorted({str(name) for name in places.values()}) if isinstance(places, dict) else []
    files = [index.parent / name for name in names if Path(name).name == name and name.endswith(".safetensors")]
    if not files or len(files) < len(names):
        raise ModelError(f"{index} names no usable safetensors files.")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{index.parent} lacks {missing[0]}, which its index names.")
    return files


def _from_directory(path: Path) -> ModelMeta:
    config = read_json(path / "config.json")
    family, source = fields_of_config(config, path)
    weights = weight_files(path)
    tokens = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    ids = _TokenIds(path / "tokenizer.json")
    eos_token, bos_token = _token_text(tokens.get("eos_token")), _token_text(tokens.get("bos_token"))
    said = [found.get("eos_token_id") for found in (config, source.values, generation)]
    eos_ids = {*ids.of(eos_token), *(known for value in said for known in _as_ids(value))}
    bos_ids = [*ids.of(bos_token), *_as_ids(source.values.get("bos_token_id"))]
    hashed = [path / name for name in _HASHED if (path / name).exists()] + weights
    parts = [f"{file.name}:{_sha256(file)}" for file in hashed]
    parts += [f"{file.relative_to(path)}:{_sha256(file)}" for file in pooling_files(path)]
    return ModelMeta(
        path=path,
        digest=hashlib.sha256("\n".join(parts).encode()).hexdigest(),
        family=family,
        name=path.resolve().name,
        context_tokens=source.count("max_position_embeddings"),
        vocab_size=source.count("vocab_size"),
        eos_ids=frozenset(eos_ids),
        bos_id=bos_ids[0] if bos_ids else None,
        bos_token=bos_token,
        eos_token=eos_token,
        chat_template=_directory_template(path, tokens),
        weight_bytes=sum(file.stat().st_size for file in weights),
        hidden=source.count("hidden_size"),
        pooling=directory_pooling(path),
    )


def _from_gguf(path: Path) -> ModelMeta:
    from engine.load.gguf import GGUFFile

    file = GGUFFile(path)
    fields = file.fields
    family, source = fields_of_gguf(fields, path)
    vocab = source.texts("tokenizer.ggml.tokens")
    if vocab is None:
        raise ModelError(f"{path} carries no tokenizer (tokenizer.ggml.tokens is missing).")
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos_ids = [i for i in _as_ids(ends) if i < len(vocab)]
    if (turn_end := _TURN_ENDS.get(family)) in vocab:
        eos_ids.append(vocab.index(turn_end))
    bos_id = next((i for i in _as_ids(fields.get("tokenizer.ggml.bos_token_id")) if i < len(vocab)), None)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path} has no tensor token_embd.weight.")
    template = fields.get("tokenizer.chat_template")
    return ModelMeta(
        path=path,
        digest=_sha256(path),
        family=family,
        name=str(fields.get("general.name") or path.stem),
        context_tokens=source.count("context_length"),
        vocab_size=embedding.shape[0],
        eos_ids=frozenset(eos_ids),
        bos_id=bos_id,
        bos_token="" if bos_id is None else vocab[bos_id],
        eos_token=vocab[eos_ids[0]] if eos_ids else "",
        chat_template=template if isinstance(template, str) else None,
        weight_bytes=sum(info.num_bytes for info in file.tensors.values()),
        hidden=embedding.shape[-1],
        pooling=gguf_pooling(fields, family),
    )


def _sha256(path: Path) -> str:
    state = path.stat()
    return _sha256_of(path, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _sha256_of(path: Path, _size_bytes: int, _mtime_ns: int) -> str:
    """Remembered while size and time of the file stay, because large models take seconds to hash."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _directory_template(path: Path, tokens: dict[str, Any]) -> str | None:
    if (path / "chat_template.jinja").exists():
        try:
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path / 'chat_template.jinja'} can't be read: {error}.") from error
    template = tokens.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template if isinstance(template, str) else None


class _TokenIds:
    """Ids of special tokens by text, from the `added_tokens` of tokenizer.json; read at first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids: dict[str, int] | None = None

    def of(self, text: str) -> list[int]:
        if not text:
            return []
        if self._ids is None:
            added = read_json(self._path).get("added_tokens") or []
            entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
            ids = {str(entry.get("content")): entry.get("id") for entry in entries}
            self._ids = {content: known for content, id_ in ids.items() for known in _as_ids(id_)}
        return [self._ids[text]] if text in self._ids else []
