"""Which service a command talks to: flags before environment, and never a key without its server."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from batchsvc.batches import models
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.target import Target, absolute_model, opened, select, stack_options
from batchsvc.db.session import Database
from batchsvc.stack.children import EngineHooks, Secrets, specs, worker_names
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import (
    ALL,
    DEFAULT_MODEL,
    STATE,
    Drafting,
    ProcessState,
    StackOptions,
    StackState,
    own_identity,
)
from batchsvc.stack.prepare import prepare_database
from batchsvc.stack.services import WEED_PORTS

NOTHING = Drafting()
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


def running(directory: DataDir, *, force_format: bool = False, drafting: Drafting = NOTHING) -> None:
    """The state of a stack that this process might be the supervisor of."""
    pid, created = os.getpid(), own_identity(os.getpid())
    state = StackState(
        pid=pid,
        created=created,
        purpose="up",
        url="http://127.0.0.1:1/v1",
        model=DEFAULT_MODEL,
        roles=ALL,
        phase="ready",
        force_format=force_format,
        drafting=drafting,
        is_ready=True,
        processes=(ProcessState(name="api", pid=pid, created=created, state="ready"),),
    )
    directory.write_json(STATE, state.to_json())


@pytest.mark.parametrize(("is_forced", "is_asked"), [(False, True), (False, False), (True, True)])
def test_a_running_stack_serves_the_formats_it_was_started_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_forced: bool, is_asked: bool
) -> None:
    directory = DataDir(tmp_path)
    directory.create()
    directory.api_key.write_text("sk-1\n")
    running(directory, force_format=is_forced)
    target = Target(directory=directory)
    with opened(target, Console(as_json=False), roles=ALL, purpose="run", force_format=is_asked) as session:
        assert not session.is_own
    said = capsys.readouterr().err
    is_told = is_asked and not is_forced
    assert ("--force-format has no effect" in said) == is_told
    assert (f"batchsvc down --data-dir {tmp_path}" in said) == is_told


def test_a_server_decides_which_formats_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(url="http://127.0.0.1:1/v1", api_key="sk-1")
    with opened(target, Console(as_json=False), roles=ALL, purpose="run", force_format=True):
        assert "--force-format has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("has_it", [False, True])
def test_a_running_stack_drafts_as_it_was_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_it: bool
) -> None:
    directory, wish = DataDir(tmp_path), Drafting(spec="draft", draft="/models/small")
    directory.create()
    directory.api_key.write_text("sk-1\n")
    running(directory, drafting=wish if has_it else NOTHING)
    target = Target(directory=directory)
    for asked in (NOTHING, wish):
        with opened(target, Console(as_json=False), roles=ALL, purpose="run", drafting=asked):
            said = capsys.readouterr().err
            assert ("--draft have no effect" in said) == (asked is wish and not has_it)
    with opened(Target(url="http://127.0.0.1:1/v1", api_key="k"), Console(as_json=False), roles=ALL, purpose="run",
                drafting=wish):  # fmt: skip
        assert "up to the server" in capsys.readouterr().err


def test_what_drafts_goes_to_the_engine_of_the_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    directory = DataDir(tmp_path / "d")
    wish = Drafting(spec="heads", draft="small")
    options = stack_options(directory, roles=ALL, purpose="up", model="a", more_models=["b"], drafting=wish)
    assert StackOptions.from_json(options.to_json()) == options
    ports = dict.fromkeys(("valkey", "s3", "api", *worker_names(options), *WEED_PORTS), 1)
    keys = Secrets(valkey="v", s3_key="k", s3_secret="s", jwt="j", sealing="0")
    hooks = EngineHooks(is_alive=lambda pid: True, free_leases=lambda pid: None)
    first, second = (one.command.env for one in specs(directory, options, ports, keys, hooks) if one.role == "engine")
    assert (first["BATCHSVC_SPEC"], first["BATCHSVC_DRAFT"]) == ("heads", str(tmp_path / "small"))
    assert not {"BATCHSVC_SPEC", "BATCHSVC_DRAFT"} & second.keys()


def test_one_engine_serves_all_models_in_turn(tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "d")
    options = stack_options(
        directory, roles=ALL, purpose="up", model="a", more_models=["b", "c"], one_engine=True, drafting=NOTHING
    )
    assert StackOptions.from_json(options.to_json()) == options
    ports = dict.fromkeys(("valkey", "s3", "api", *worker_names(options), *WEED_PORTS), 1)
    keys = Secrets(valkey="v", s3_key="k", s3_secret="s", jwt="j", sealing="0")
    hooks = EngineHooks(is_alive=lambda pid: True, free_leases=lambda pid: None)
    (engine,) = (one for one in specs(directory, options, ports, keys, hooks) if one.role == "engine")
    env = engine.command.env
    assert (env["BATCHSVC_MODEL"], env["BATCHSVC_MODELS"], env["BATCHSVC_WORKER_NAME"]) == ("a", "b,c", "engine")
    apart = replace(options, one_engine=False)
    each = specs(directory, apart, ports | dict.fromkeys(worker_names(apart), 1), keys, hooks)
    envs = [one.command.env for one in each if one.role == "engine"]
    named = {env["BATCHSVC_WORKER_NAME"]: env["BATCHSVC_MODELS"] for env in envs}
    assert named == {"engine": "", "engine-2": "", "engine-3": ""}, "a shell's BATCHSVC_MODELS reaches none of them"
