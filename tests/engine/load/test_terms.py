"""Under which licence a model comes: by our list, by what its files say, or unknown."""

from __future__ import annotations

import json
from pathlib import Path

from engine.load.origin import FILE
from engine.load.terms import Terms, terms_of
from tests.tiny import make_tiny_model


def test_what_files_say(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    assert terms_of(str(model), model) == Terms()
    (model / "README.md").write_text("---\ntags: [x]\nlicense: 'apache-2.0'\n---\nlicense: mit\n")
    assert terms_of(str(model), model).name == "apache-2.0"
    (model / "LICENSE.txt").write_text("Be kind.")
    assert terms_of(str(model), model) == Terms("apache-2.0", None, "Be kind.")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"license": "kind"}))
    assert terms_of(str(model), model).name == "kind"
    (model / FILE).write_text(json.dumps({"licence": "as its teacher"}))
    assert terms_of(str(model), model).name == "as its teacher"


def test_a_model_that_we_ship(default_model: Path, tmp_path: Path) -> None:
    assert terms_of("smollm2-135m", default_model).name == "apache-2.0"
    known = terms_of("gemma3-270m", tmp_path)
    assert known.name == "Gemma Terms of Use" and known.url == "https://ai.google.dev/gemma/terms"
