"""The student before its first lesson: layers of the teacher, in float32, and what its config.json says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.distill.errors import DistillError
from engine.errors import ModelError
from engine.load.families import fields_of_config
from engine.load.hf_config import config_json
from engine.load.meta import read_json
from engine.load.weights import open_model
from engine.model.config import ModelConfig, config_from_directory

Parameters = dict[str, Tensor]

_FREE = {"num_layers", "mlp", "windows", "context_tokens"}
"""Fields in which a student may differ; all others decide what its layers can be copied from."""
_SPELLED = {
    "hidden": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "is_tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "family": "model_type",
}
_WIDE = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Student:
    """`layers` are the numbers of the teacher's layers that it begins with; `values` its config.json, ids of tokens
    aside; `embedding.weight` and, where it has one, `head.weight` are the teacher's."""

    config: ModelConfig
    values: dict[str, Any]
    layers: tuple[int, ...]
    parameters: Parameters


def begin(teacher: Path, spec: str) -> Student:
    """The student that `spec` asks for: `layers:N`, or the path of a config.json. Raises DistillError or ModelError."""
    config, source = open_model(teacher)
    if spec.startswith("layers:"):
        wanted, values = _cut(config, _count(spec.removeprefix("layers:"), config), teacher)
    else:
        wanted, values = _configured(config, Path(spec).expanduser(), teacher)
    layers = spread(wanted.num_layers, config.num_layers)
    parameters: Parameters = {}
    for name in _names(source.names, layers):
        place, _, part = name.partition(".")
        stored = source.load(name).float()
        if name.endswith("norm.weight"):
            stored = stored + config.norm_shift
        spelled = f"{layers.index(int(place))}.{part}" if place.isdecimal() else name
        parameters[spelled] = stored.contiguous()
    if config.is_tied:
        parameters.pop("head.weight", None)
    if wanted.mlp < config.mlp:
        for index in range(wanted.num_layers):
            _narrow(parameters, index, wanted.mlp)
    return Student(wanted, values, layers, parameters)


def spread(count: int, total: int) -> tuple[int, ...]:
    """`count` of `total` layers, evenly spread; the first and the last are among them where there are two or more."""
    if count == 1:
        return (0,)
    return tuple(round(place * (total - 1) / (count - 1)) for place in range(count))


def _count(text: str, config: ModelConfig) -> int:
    count = int(text) if text.isdecimal() and len(text) < 6 else 0
    if not 1 <= count <= config.num_layers:
        raise DistillError(
            f"--student layers:{text} can't be: the teacher has {config.num_layers} layers, so N is between 1 and that."
        )
    return count


def _cut(config: ModelConfig, count: int, teacher: Path) -> tuple[ModelConfig, dict[str, Any]]:
    layers = spread(count, config.num_layers)
    windows = tuple(config.windows[layer] for layer in layers) if config.windows else ()
    wanted = replace(config, num_layers=count, windows=windows)
    return wanted, _values(wanted, teacher)


def _values(wanted: ModelConfig, teacher: Path) -> dict[str, Any]:
    """The config.json of a student that differs from its teacher in layers and width."""
    if not teacher.is_dir():
        return config_json(wanted, teacher)
    outer = read_json(teacher / "config.json")
    family, fields = fields_of_config(outer, teacher)
    values = dict(fields.values) | {"model_type": family, "tie_word_embeddings": wanted.is_tied}
    for name in (
        "quantization_config",
        "dtype",
        "max_window_layers",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    ):
        values.pop(name, None)
    values |= {"num_hidden_layers": wanted.num_layers, "intermediate_size": wanted.mlp}
    values.setdefault("architectures", outer.get("architectures"))
    if any(wanted.windows):
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in wanted.windows]
    elif family != "llama":
        values.pop("layer_types", None)
        values |= {"sliding_window": None, "use_sliding_window": False}
    return values


def _configured(config: ModelConfig, path: Path, teacher: Path) -> tuple[ModelConfig, dict[str, Any]]:
    if not path.is_file():
        raise DistillError(f"--student is {str(path)!r}: give layers:N, or the path of a config.json.")
    if path.name != "config.json":
        raise DistillError(f"--student {path} must be called config.json.")
    try:
        given = config_from_directory(path.parent)
    except ModelError as error:
        raise DistillError(f"--student {path} can't be used: {error}") from error
    for name in config.__dataclass_fields__:
        if name not in _FREE and getattr(given, name) != getattr(config, name) and name != "norm_shift":
            raise DistillError(
                f"{path} has {_SPELLED.get(name, name)} {getattr(given, name)}, the teacher {getattr(config, name)}: a "
                "student begins with the teacher's layers and tokens, so it may have fewer layers and a smaller "
                "intermediate_size, all else is the same."
            )
    for spelled, mine, most in (
        ("num_hidden_layers", given.num_layers, config.num_layers),
        ("intermediate_size", given.mlp, config.mlp),
        ("max_position_embeddings", given.context_tokens, config.context_tokens),
    ):
        if mine > most:
            raise DistillError(f"{path} has {spelled} {mine}, more than the teacher's {most}.")
    windows = (
        tuple(config.windows[layer] for layer in spread(given.num_layers, config.num_layers)) if config.windows else ()
    )
    wanted = replace(
        config, num_layers=given.num_layers, mlp=given.mlp, context_tokens=given.context_tokens, windows=windows
    )
    return wanted, _values(wanted, teacher) | {"max_position_embeddings": wanted.context_tokens}


def _names(names: set[str], layers: Sequence[int]) -> list[str]:
    def is_wanted(name: str) -> bool:
        place = name.partition(".")[0]
        return not place.isdecimal() or int(place) in layers

    return sorted(name for name in names if is_wanted(name))


def _narrow(parameters: Parameters, index: int, width: int) -> None:
    """Keeps the channels of a layer's MLP that weigh most: the norm of what goes in times that of what comes out."""
    gate, up, down = (f"{index}.{part}.weight" for part in _WIDE)
    strength = parameters[gate].norm(dim=1) * parameters[up].norm(dim=1) * parameters[down].norm(dim=0)
    kept = strength.topk(width).indices.sort().values
    parameters[down] = parameters[down][:, kept].contiguous()
    for part in ("gate", "up"):
        for name in (f"{index}.{part}.weight", f"{index}.{part}.bias"):
            if name in parameters:
                parameters[name] = parameters[name][kept].contiguous()


def trainable(student: Student, *, embeddings: bool) -> Parameters:
    """What the student learns: all, or all but the embedding and the head, which stay the teacher's."""
    fixed = () if embeddings else ("embedding.weight", "head.weight")
    return {name: tensor for name, tensor in student.parameters.items() if name not in fixed}


def head_of(parameters: Mapping[str, Tensor], config: ModelConfig, ids: Tensor | None) -> Tensor:
    """The matrix of the logits, or its rows for these tokens."""
    head = parameters["embedding.weight" if config.is_tied else "head.weight"]
    return head if ids is None else head.index_select(0, ids)


def columns_of(ids: Tensor | None, vocab_size: int) -> Tensor:
    """Of each token its column in the head: int64 [vocab], -1 for those that it lacks."""
    if ids is None:
        return torch.arange(vocab_size)
    columns = torch.full((vocab_size,), -1, dtype=torch.int64)
    columns[ids] = torch.arange(len(ids))
    return columns
