"""What a model is served in: `auto` follows the limits, what is over one is refused, and each is measured once."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from engine.config import Formats
from engine.errors import QualityError
from engine.kernels.int8 import Int8Error
from engine.load.origin import FILE
from engine.quality import judge
from engine.quality.measure import Reference
from engine.quality.serving import resolve_formats
from engine.quant.__main__ import quantize
from tests.engine.quality.conftest import Pretend
from tests.tiny import make_tiny_model

INT8, BF16 = Formats("int8", "int8"), Formats("bf16", "bf16")
OVER: dict[str, object] = {"kl": 0.0612}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in 4 bits, beside what it was made from."""
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny_model(folder / "large")
    options = {"method": "rtn", "bits": 4, "group": 32, "layout": "compressed-tensors", "symmetric": True}
    quantize(str(model), folder / "small", **options)
    return folder / "small"


def test_auto_measures_weights_and_kv_once(tiny_model: Path, cache: Path, pretend: Pretend) -> None:
    measured, said = pretend(), list[str]()
    for _ in range(2):
        formats, verdict = resolve_formats(str(tiny_model), "auto", "auto", said.append)
        assert (formats, verdict.word) == (INT8, "within")
    assert measured == [("tiny", "int8", "bf16"), ("tiny", "bf16", "int8")]
    assert [sentence.split(" costs ")[0] for sentence in said] == [
        "Measuring once what int8",
        "Measuring once what KV in int8",
    ]
    for file in (cache / "quality").iterdir():
        file.write_text("{}")
    resolve_formats(str(tiny_model), "auto", "auto", said.append)
    assert len(measured) == 4, "damaged figures are measured again"


AUTO = [
    ({"int8": OVER}, BF16, "tiny runs in bf16, not in int8, where its mean KL is 0.0612 (at most 0.01)"),
    ({"int8": {"perplexity": 1.02}}, BF16, "its perplexity +2 % (at most +1 %)"),
    ({"int8": {"is_fused": False}}, BF16, "tiny runs in bf16: int8 isn't faster here"),
    ({"kv_int8": OVER}, Formats("int8", "bf16"), "tiny runs with KV in bf16, not with KV in int8, where"),
    ({"kv_int8": {"is_fused": False}}, Formats("int8", "bf16"), "tiny runs with KV in bf16: int8 isn't faster here"),
]


@pytest.mark.parametrize(("costs", "formats", "says"), AUTO)
def test_auto_is_bf16_where_int8_costs_too_much_or_brings_nothing(
    tiny_model: Path, pretend: Pretend, costs: dict[str, dict[str, object]], formats: Formats, says: str
) -> None:
    pretend(**costs)
    said: list[str] = []
    found, verdict = resolve_formats(str(tiny_model), "auto", "auto", said.append)
    assert found == formats
    assert verdict.word == ("unquantized" if formats == BF16 else "within")
    assert says in said[-1]


REFUSED = [
    (("int8", "auto"), {"int8": OVER}, "in int8, where its mean KL is 0.0612 (at most 0.01)", "WEIGHT_FORMAT=bf16"),
    (("int8", "auto"), {"int8": {"perplexity": 1.02}}, r"perplexity +2 % (at most +1 %)", "WEIGHT_FORMAT=bf16"),
    (("fp8", "auto"), {"fp8": OVER}, "in fp8, where its mean KL is 0.0612 (at most 0.02)", "WEIGHT_FORMAT=bf16"),
    (("bf16", "int8"), {"kv_int8": OVER}, "with KV in int8, where its mean KL is 0.0612 (at most 0.005)", "KV_FORMAT"),
    (("auto", "int8"), {"kv_int8": OVER}, "with KV in int8", "KV_FORMAT=bf16"),
    (("int8", "int8"), {"int8": OVER, "kv_int8": OVER}, "and with KV in int8, where", "WEIGHT_FORMAT=bf16"),
]


@pytest.mark.parametrize(("asked", "costs", "says", "way_out"), REFUSED)
def test_what_is_over_its_limit_is_refused_unless_forced(
    tiny_model: Path,
    pretend: Pretend,
    asked: tuple[str, str],
    costs: dict[str, dict[str, object]],
    says: str,
    way_out: str,
) -> None:
    pretend(**costs)
    with pytest.raises(QualityError) as caught:
        resolve_formats(str(tiny_model), *asked, lambda _: None)
    sentence = str(caught.value)
    assert sentence.startswith("tiny isn't served ")
    assert says in sentence
    assert way_out in sentence
    assert "--force-format or BATCHSVC_FORCE_FORMAT=true" in sentence
    said: list[str] = []
    formats, verdict = resolve_formats(str(tiny_model), *asked, said.append, force=True)
    assert verdict.word == "over"
    assert "int8" in formats or "fp8" in formats
    assert said[-1].endswith("that was forced.")


def test_without_compiled_kernels_figures_count_for_a_day(tiny_model: Path, cache: Path, pretend: Pretend) -> None:
    """They may have failed to compile once; what was measured with them is kept."""
    measured = pretend(int8={"is_fused": False})
    for age_s, times in ((0, 1), (80_000, 1), (90_000, 2)):
        for file in (cache / "quality").glob("*.json"):
            os.utime(file, (time.time() - age_s, time.time() - age_s))
        assert resolve_formats(str(tiny_model), "int8", "auto", lambda _: None)[1].word == "within"
        assert len(measured) == times
    measured = pretend()
    for file in (cache / "quality").glob("*.json"):
        file.unlink()
    for _ in range(2):
        resolve_formats(str(tiny_model), "int8", "auto", lambda _: None)
        for file in (cache / "quality").glob("*.json"):
            os.utime(file, (1, 1))
    assert len(measured) == 1


def test_what_is_not_quantized_is_not_measured(tiny_model: Path, pretend: Pretend) -> None:
    measured = pretend()
    for weights, kv in (("bf16", "bf16"), ("float32", "float32")):
        found, verdict = resolve_formats(str(tiny_model), weights, "auto", pytest.fail)
        assert (found, verdict.word) == (Formats(weights, kv), "unquantized")
    assert not measured


def test_a_quantized_copy_is_held_against_what_it_was_made_from(small: Path, pretend: Pretend) -> None:
    measured = pretend(w4a16={"kl": 0.2121, "perplexity": 1.27})
    with pytest.raises(QualityError) as caught:
        resolve_formats(str(small), "auto", "auto", lambda _: None)
    assert str(caught.value) == (
        "small isn't served in w4a16, where its mean KL is 0.2121 (at most 0.05) and its perplexity +27 % "
        f"(at most +4 %): run {small.parent / 'large'}, or quantize that in 8 bits, "
        "or force it with --force-format or BATCHSVC_FORCE_FORMAT=true."
    )
    formats, verdict = resolve_formats(str(small), "auto", "int8", lambda _: None, force=True)
    assert formats == Formats("w4a16", "int8")
    assert (verdict.weights.word, verdict.kv.word) == ("over", "within")
    assert measured == [("large", "w4a16", "bf16"), ("small", "w4a16", "int8")], "KV against the copy itself"


def test_in_other_formats_its_weights_are_still_of_four_bits(small: Path, pretend: Pretend) -> None:
    measured = pretend(bf16={"kl": 0.2})
    with pytest.raises(QualityError, match=r"small isn't served in bf16, where its mean KL is 0\.2000 \(at most 0\.05"):
        resolve_formats(str(small), "bf16", "auto", lambda _: None)
    assert measured == [("large", "bf16", "bf16")]


def test_without_what_it_was_made_from_its_quality_is_unknown(small: Path, tmp_path: Path, pretend: Pretend) -> None:
    measured, said = pretend(), list[str]()
    copy = shutil.copytree(small, tmp_path / "public")
    (copy / FILE).unlink()
    assert resolve_formats(str(copy), "auto", "auto", said.append)[1].word == "unmeasured"
    assert "isn't known: nobody says which model it was made from; `batchsvc models eval" in said[-1]
    gone = {"made_from": {"model": str(tmp_path / "gone"), "digest": "00" * 32}}
    (copy / FILE).write_text(json.dumps(gone))
    assert resolve_formats(str(copy), "auto", "auto", said.append)[1].word == "unmeasured"
    assert "There is no model" in said[-1]
    gone["made_from"]["model"] = str(small.parent / "large")
    (copy / FILE).write_text(json.dumps(gone))
    assert resolve_formats(str(copy), "auto", "auto", said.append)[1].word == "unmeasured"
    assert "isn't the same model any more" in said[-1]
    assert not measured


def test_where_memory_is_short_nothing_is_measured_or_fetched(
    tiny_model: Path, small: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend()
    said: list[str] = []
    monkeypatch.setattr(judge, "available_bytes", lambda: 1000)
    assert resolve_formats(str(tiny_model), "auto", "auto", said.append)[0] == BF16
    assert "too little memory" in said[-1]
    assert resolve_formats(str(tiny_model), "int8", "auto", said.append)[1].word == "unmeasured"
    monkeypatch.setattr(judge, "found_origin", lambda *_: pytest.fail("the base was looked for in vain"))
    assert resolve_formats(str(small), "auto", "auto", said.append)[1].word == "unmeasured"


def test_auto_is_bf16_where_int8_cannot_run(tiny_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise Int8Error("torch multiplies wrongly.")

    monkeypatch.setattr(Reference, "compare", broken)
    said: list[str] = []
    assert resolve_formats(str(tiny_model), "auto", "auto", said.append)[0] == BF16
    assert said[-1].endswith("torch multiplies wrongly.")


def test_figures_against_another_model_do_not_count(small: Path, tmp_path: Path, pretend: Pretend) -> None:
    """A copy that says what it was made from is judged by that alone."""
    measured = pretend()
    resolve_formats(str(small), "auto", "auto", lambda _: None)
    copy = shutil.copytree(small, tmp_path / "copy")
    other = make_tiny_model(tmp_path / "other", seed=5)
    said = json.loads((copy / FILE).read_text())
    assert resolve_formats(str(copy), "auto", "auto", pytest.fail)[1].word == "within", "the same bytes, known already"
    said["made_from"] = {"model": str(other), "digest": judge.read_meta(other).digest}
    (copy / FILE).write_text(json.dumps(said))
    resolve_formats(str(copy), "auto", "auto", lambda _: None)
    assert [base for base, _, _ in measured] == ["large", "other"]
