"""A GGUF file is believed only as far as it holds what it announces; broken ones cost one sentence."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.load.gguf import GGUFFile


def write(path: Path) -> Path:
    """A small sound file, made by the `gguf` package."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_float32("llama.eps", 1e-5)
    writer.add_array("words", ["one", "zwei", "三"])
    writer.add_array("numbers", [1, 2, 3])
    random = np.random.default_rng(0)
    writer.add_tensor("plain", random.standard_normal((3, 64)).astype(np.float32))
    for kind in (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16):
        values = random.standard_normal((4, 64)).astype(np.float32)
        writer.add_tensor(kind.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "sound.gguf")


def test_fields_and_tensors_are_those_the_package_reads(sound: Path) -> None:
    file, oracle = GGUFFile(sound), gguf.GGUFReader(sound)
    assert file.fields["llama.context_length"] == 512
    assert file.fields["words"] == ["one", "zwei", "三"]
    assert list(file.fields["numbers"]) == [1, 2, 3]
    assert set(file.tensors) == {tensor.name for tensor in oracle.tensors}
    for tensor in oracle.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        np.testing.assert_array_equal(file.load(tensor.name), expected.reshape(file.tensors[tensor.name].shape))


def test_a_file_cut_anywhere_is_refused(sound: Path, tmp_path: Path) -> None:
    data, cut = sound.read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(600), *range(600, len(data), 97), len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ModelError):
            GGUFFile(cut)


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.integers(0, 700), st.integers(0, 255), min_size=1, max_size=8))
def test_changed_bytes_are_read_or_refused_but_never_crash(changes: dict[int, int], tmp_path_factory) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    folder.mkdir(exist_ok=True)
    data = bytearray(write(folder / "base.gguf").read_bytes())
    for offset, value in changes.items():
        data[offset] = value
    (folder / "changed.gguf").write_bytes(data)
    with suppress(ModelError):
        file = GGUFFile(folder / "changed.gguf")
        for name in file.tensors:
            file.load(name)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(num_tensors: int, num_fields: int, rest: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + rest


def tensor(dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text("t") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = (1 << 64) - 1
NESTED = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 6 + struct.pack("<IQ", 0, 1) + b"\0"
BROKEN = {
    "nothing": b"",
    "not a GGUF": b"PK\3\4" + bytes(60),
    "a big-endian or future version": header(0, 0, bytes(64), version=0x03000000),
    "2**64 fields in 43 bytes": header(0, HUGE, bytes(19)),
    "2**64 tensors": header(HUGE, 0, bytes(64)),
    "a string longer than the file": header(0, 1, struct.pack("<Q", 1 << 40) + bytes(64)),
    "an array longer than the file": header(0, 1, text("a") + struct.pack("<IIQ", 9, 0, 1 << 50) + bytes(64)),
    "arrays nested without end": header(0, 1, text("a") + NESTED + bytes(64)),
    "an unknown value type": header(0, 1, text("a") + struct.pack("<I", 99) + bytes(64)),
    "the same key twice": header(0, 2, (text("a") + struct.pack("<IB", 0, 1)) * 2 + bytes(64)),
    "an alignment of 3": header(0, 1, text("general.alignment") + struct.pack("<II", 4, 3) + bytes(64)),
    "an alignment of 2 GiB": header(0, 1, text("general.alignment") + struct.pack("<II", 4, 1 << 31) + bytes(64)),
    "a tensor of 99 dimensions": header(1, 0, tensor([1] * 99) + bytes(64)),
    "sizes whose product overflows": header(1, 0, tensor([1 << 32, 1 << 32, 4]) + bytes(64)),
    "an empty tensor": header(1, 0, tensor([0, 4]) + bytes(64)),
    "an unknown tensor format": header(1, 0, tensor([4], kind=999) + bytes(64)),
    "rows that are no whole quantization block": header(1, 0, tensor([33], kind=8) + bytes(640)),
    "a tensor past the end": header(1, 0, tensor([4], offset=1 << 40) + bytes(64)),
    "a tensor at an odd offset": header(1, 0, tensor([4], offset=1) + bytes(640)),
    "the same tensor twice": header(2, 0, tensor([4]) * 2 + bytes(640)),
    "pieces that are no number": header(0, 1, text("split.count") + struct.pack("<I", 8) + text("three") + bytes(64)),
    "an alignment that is no number": header(
        0, 1, text("general.alignment") + struct.pack("<I", 8) + text("wide") + bytes(64)
    ),
    "one piece of several": header(0, 1, text("split.count") + struct.pack("<IH", 2, 3) + bytes(64)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_in_one_sentence(what: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(BROKEN[what])
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")
