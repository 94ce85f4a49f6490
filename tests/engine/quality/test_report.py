"""The report of a command: which rows there are, what they decide, and the files that are written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from engine.errors import ConfigError, ModelError
from engine.load.origin import FILE
from engine.quality import report as reporting
from engine.quality.__main__ import main
from engine.quality.plot import svg
from engine.quality.report import evaluate
from engine.quality.serving import resolve_formats
from engine.quality.table import COLUMNS, cells, markdown
from engine.quant.__main__ import quantize
from tests.engine.quality.conftest import Pretend
from tests.tiny import make_tiny_model

BOTH = ("bf16", "int8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its copy in 4 bits."""
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny_model(folder / "large")
    options = {"method": "rtn", "bits": 4, "group": 32, "layout": "compressed-tensors", "symmetric": True}
    quantize(str(model), folder / "small", **options)
    return model, folder / "small"


def report_on(*models: Path, **options: Any) -> dict[str, Any]:
    return evaluate([str(model) for model in models], **({"against": None} | _FORMATS | options))


_FORMATS = {"weight_formats": BOTH, "kv_formats": BOTH}


def test_rows_are_formats_of_weights_and_of_kv(models: tuple[Path, Path], pretend: Pretend) -> None:
    measured = pretend(w4a16={"kl": 0.2}, kv_int8={"kl": 0.004})
    rows = report_on(*models)["rows"]
    shown = [(row["model"], row["weight_format"], row["kv_format"], row["against"], row["of"]) for row in rows]
    assert shown == [
        ("large", "bf16", "bf16", "large", "weights"),
        ("large", "int8", "bf16", "large", "weights"),
        ("large", "bf16", "int8", "large", "kv"),
        ("small", "w4a16", "bf16", "large", "weights"),
        ("small", "w4a16", "int8", "small", "kv"),
    ]
    words = [row["verdict"] for row in rows]
    assert words == ["unquantized", "within", "within", "over", "within"]
    assert rows[0]["limit"] is None
    assert rows[3]["limit"] == {"kl": 0.05, "perplexity": 1.04}
    assert [base for base, _, _ in measured] == ["large"] * 4 + ["small"], "a reference reads the text once"


def test_serving_goes_by_what_was_reported_on_our_text(
    models: tuple[Path, Path], tmp_path: Path, pretend: Pretend
) -> None:
    large, small = models
    public = shutil.copytree(small, tmp_path / "public")
    (public / FILE).unlink()
    measured = pretend(w4a16={"kl": 0.04})
    text = tmp_path / "text.txt"
    text.write_text("The parcel was late. " * 200, "utf-8")
    report_on(public, against=str(large), file=text)
    assert resolve_formats(str(public), "auto", "auto", lambda _: None)[1].word == "unmeasured", "another text"
    report_on(public, against=str(large))
    count = len(measured)
    verdict = resolve_formats(str(public), "auto", "int8", pytest.fail)[1]
    assert (verdict.weights.word, verdict.kv.word) == ("within", "within")
    assert len(measured) == count


def test_a_report_against_another_base_decides_nothing(
    models: tuple[Path, Path], tmp_path: Path, pretend: Pretend
) -> None:
    """Neither of a copy that names its own, nor of a model that is its own."""
    measured = pretend()
    other = make_tiny_model(tmp_path / "other", seed=3)
    report_on(*models, against=str(other))
    measured.clear()
    for model in models:
        resolve_formats(str(model), "auto", "auto", lambda _: None)
    assert ("large", "int8", "bf16") in measured
    assert ("large", "w4a16", "bf16") in measured


def test_a_quantized_model_needs_another_as_measure(models: tuple[Path, Path], tmp_path: Path) -> None:
    public = shutil.copytree(models[1], tmp_path / "public")
    (public / FILE).unlink()
    for against in (None, str(public)):
        with pytest.raises(ModelError, match=r"public is quantized, so it is no measure of itself: .* --against"):
            report_on(public, against=against)


def test_another_tokenizer_is_no_base(models: tuple[Path, Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(ModelError, match="large has 384 tokens and other 300"):
        report_on(models[0], against=str(other))


def test_too_little_memory_is_said_with_numbers(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"takes 0\.0 GB of memory, and 0\.0 GB are free"):
        report_on(models[0])


def test_the_command_writes_table_and_plot(
    models: tuple[Path, Path], tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With real passes of a tiny model."""
    argv = [*map(str, models), "--formats", "int8", "--kv", "bf16", "--out", str(tmp_path / "out")]
    assert main([*argv, "--threads", "2"]) == 0
    *said, last = map(json.loads, capsys.readouterr().out.splitlines())
    steps = [word for line in said if (word := line["say"].split(" ")[0]) in ("Reading", "Measuring")]
    assert steps == ["Reading", "Measuring", "Measuring"]
    assert json.loads((tmp_path / "out" / "quality.json").read_text())["rows"] == last["rows"]
    assert last["files"] == [str(tmp_path / "out" / f"quality.{kind}") for kind in ("json", "md", "svg")]
    table = (tmp_path / "out" / "quality.md").read_text().splitlines()
    assert table[0] == f"| {' | '.join(COLUMNS)} |"
    assert [line.split(" | ")[:4] for line in table[2:4]] == [
        ["| large", "int8", "bf16", "large"],
        ["| small", "w4a16", "bf16", "large"],
    ]
    assert last["rows"][1]["kl"] > last["rows"][0]["kl"] > 0
    assert len(list((cache / "quality").glob("*.json"))) == 2
    picture = ElementTree.parse(tmp_path / "out" / "quality.svg").getroot()
    assert len(picture.findall("{*}polyline")) == 2


def test_wrong_formats_and_places_are_named(
    models: tuple[Path, Path], tmp_path: Path, pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend()
    (tmp_path / "file").touch()
    for argv, says in (
        (["--formats", "int9"], "--formats can't be 'int9': it takes float32, bf16, int8"),
        (["--kv", ","], "--kv names no format"),
        (["--text", str(tmp_path / "none")], "none can't be read"),
        (["--out", str(tmp_path / "file" / "x")], "The report can't be written to"),
    ):
        assert main([str(models[0]), *argv]) == 1
        assert says in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


def a_row(**changes: Any) -> dict[str, Any]:
    tail = [{"share": share, "kl": kl} for share, kl in ((0.5, 1e-7), (0.01, 0.02), (0.001, 0.3), (0.0, 1.5))]
    row = {"model": "a|<b>", "weight_format": "int8", "kv_format": "bf16", "of": "weights", "against": "base"}
    row |= {"tokens": 1500, "kl": 0.00432, "kl_error": 0.00012, "kl_tail": tail, "top1": 0.9523, "verdict": "within"}
    row |= {"perplexity": 20.056, "reference_perplexity": 20.0, "perplexity_ratio": 1.0028, "perplexity_error": 0.0011}
    return {**row, "limit": {"kl": 0.01, "perplexity": 1.01}, **changes}


def test_cells_are_readable() -> None:
    assert list(cells(a_row()).values()) == [
        *("a|<b>", "int8", "bf16", "base", "0.0043 ± 0.00012", "0.0200", "0.3000", "1.50"),
        *("95.2 %", "20.06, +0.28 % ± 0.11", "0.01, +1 %", "within"),
    ]
    unknown = a_row(kl=None, top1=None, perplexity=None, perplexity_ratio=None, limit=None, verdict="unquantized")
    assert list(cells(unknown).values())[4] == "not a number ± 0.00012"
    assert list(cells(unknown).values())[8:] == ["not a number", "not a number", "", "not quantized"]
    assert "| a\\|<b> |" in markdown({"text": "held-out text", "rows": [a_row()]})


def test_a_plot_is_xml_whatever_the_figures_are() -> None:
    rows = [
        a_row(),
        a_row(kl=None, kl_tail=[{"share": 0.0, "kl": None}], verdict="over"),
        a_row(kl=0.0, kl_tail=[{"share": 0.5, "kl": 0.0}], limit=None, verdict="unquantized"),
        *(a_row(model=f"model number {number} of a very long name that is cut") for number in range(12)),
    ]
    picture = ElementTree.fromstring(svg({"rows": rows}))
    assert len(picture.findall("{*}polyline")) == len(rows)
    words = [text.text for text in picture.findall("{*}text")]
    assert "a|<b>: int8, KV bf16" in words
    assert "not a number over" in words
