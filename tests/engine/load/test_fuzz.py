"""Files of quantized models with bytes changed or cut off: each loads or costs one sentence, in little memory."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError, ModelError
from engine.load.gguf import GGUFFile
from engine.quant.__main__ import quantize
from tests.engine.load.test_weights import to_gguf
from tests.engine.stepping import make_runner
from tests.tiny import make_tiny_model

MIB = 1 << 20
FORMATS = {"model.gguf": "w4a16", "int4": "w4a16", "fp8": "fp8"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small model as GGUF, as int4 in compressed-tensors and as fp8."""
    folder = tmp_path_factory.mktemp("sound")
    model = make_tiny_model(folder / "plain", layers=1, vocab_size=300, mlp=64)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    to_gguf(model, folder / "model.gguf", quantized={f"blk.0.{part}.weight": Kind.Q4_1 for part in parts})
    options = {"method": "rtn", "group": 32, "layout": "compressed-tensors", "symmetric": False}
    quantize(str(model), folder / "int4", bits=4, **options)
    quantize(str(model), folder / "fp8", bits=8, is_float=True, **options | {"symmetric": True})
    for name in ("int4", "fp8"):  # the embedding would take most of the changes
        file = folder / name / "model.safetensors"
        tensors = load_file(file)
        save_file(dict(sorted(tensors.items(), key=lambda item: "embed" in item[0])), file)
    return folder


def refusal(model: Path, weight_format: str) -> str:
    """What the engine refuses the model with; nothing where it runs it."""
    try:
        make_runner(model, weight_format=weight_format, kv_format="bf16", num_blocks=2)
    except (ModelError, ConfigError) as error:  # also: what is no longer stored in that format
        return str(error)
    return ""


def undamaged(file: Path) -> bytes:
    """The file as it was when it was first asked for."""
    kept = file.with_suffix(".kept")
    if not kept.exists():
        kept.write_bytes(file.read_bytes())
    return kept.read_bytes()


changes = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.booleans(), st.integers(0, 255)), min_size=0, max_size=6
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(changes=changes, cut=st.one_of(st.none(), st.floats(0, 1, exclude_max=True)))
def test_a_damaged_model_loads_or_costs_one_sentence(
    name: str, changes: list[tuple[float, bool, int]], cut: float | None, sound: Path
) -> None:
    model = sound / name
    file = model if model.is_file() else model / "model.safetensors"
    data = bytearray(undamaged(file))
    for where, is_early, value in changes:
        data[int(where * len(data) * (0.1 if is_early else 1))] = value
    file.write_bytes(data if cut is None else data[: int(cut * len(data))])
    says = refusal(model, FORMATS[name])
    assert says.endswith(".") or not says
    assert "\n" not in says


@settings(max_examples=40, deadline=None)
@given(changes=changes)
def test_a_damaged_header_asks_for_no_memory(changes: list[tuple[float, bool, int]], sound: Path) -> None:
    """numpy tells tracemalloc of its arrays: a file of a few hundred KiB never makes some of a few MiB."""
    file = sound / "header.gguf"
    data = bytearray(undamaged(sound / "model.gguf"))
    for where, _, value in changes:
        data[int(where * 4096)] = value
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with suppress(ModelError):
            GGUFFile(file)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth"])
def test_a_pickle_is_not_even_opened_as_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK\3\4" + bytes(200))
    with pytest.raises(ModelError, match="pickles are never loaded: convert it to safetensors"):
        make_runner(tmp_path / name)
