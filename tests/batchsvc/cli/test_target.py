"""Which service a command talks to: flags before environment, and never a key without its server."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsvc.batches import models
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.target import absolute_model, select, stack_options
from batchsvc.db.session import Database
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import ALL, DEFAULT_MODEL
from batchsvc.stack.prepare import prepare_database

ENV = {"OPENAI_BASE_URL": "https://batch.example/v1/", "OPENAI_API_KEY": "sk-env"}


def test_both_variables_name_a_server() -> None:
    target = select(None, None, None, ENV)
    assert (target.url, target.api_key, target.directory) == ("https://batch.example/v1", "sk-env", None)


@pytest.mark.parametrize("missing", list(ENV))
def test_one_variable_alone_names_nothing(missing: str) -> None:
    env = {name: value for name, value in ENV.items() if name != missing}
    target = select(None, None, None, env)
    assert target.directory == DataDir.at(None)
    assert not target.api_key


def test_flags_win(tmp_path: Path) -> None:
    assert select(tmp_path, None, None, ENV).directory == DataDir(tmp_path)
    target = select(None, "http://127.0.0.1:1", "sk-flag", ENV)
    assert (target.url, target.api_key) == ("http://127.0.0.1:1/v1", "sk-flag")


@pytest.mark.parametrize(
    ("data_dir", "url", "key"),
    [(None, "http://x", None), (None, None, "sk"), (Path("d"), "http://x", "sk"), (None, "ftp://x", "sk")],
)
def test_a_half_named_target_is_wrong_usage(data_dir: Path | None, url: str | None, key: str | None) -> None:
    with pytest.raises(CommandError) as refused:
        select(data_dir, url, key, ENV)  # the key of the environment must not complete a --url
    assert refused.value.code == Exit.USAGE


def test_a_model_by_path_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute_model("tiny") == str(tmp_path / "tiny")
    assert absolute_model("smollm2-135m") == "smollm2-135m"
    assert absolute_model("hf:owner/name") == "hf:owner/name"


def test_a_registered_name_or_alias_is_served_by_its_model(tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "d")
    directory.create()

    def served(name: str | None) -> str:
        return stack_options(directory, roles=ALL, purpose="run", model=name).model

    assert (served(None), served("gpt-x")) == (DEFAULT_MODEL, "gpt-x")
    database = Database(directory.database_url)
    prepare_database(directory, database)
    with database.transaction() as session:
        for name, path in ((DEFAULT_MODEL, DEFAULT_MODEL), ("mine", "/models/mine.gguf")):
            models.register(session, name, path, digest="ab" * 32, context_tokens=8)
        models.alias(session, "gpt-x", "mine")
        models.alias(session, "gpt-y", DEFAULT_MODEL)
    database.dispose()
    assert (served("gpt-x"), served("mine")) == ("/models/mine.gguf", "/models/mine.gguf")
    assert (served("gpt-y"), served("nobody"), served("hf:a/b")) == (DEFAULT_MODEL, "nobody", "hf:a/b")
