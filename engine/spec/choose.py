"""Which speculation a configuration asks for; loads the draft model or the heads, if it names some that can draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import PLAIN_FORMATS, EngineConfig
from engine.errors import ConfigError
from engine.load.meta import HEADS_FILE
from engine.memory.formats import weight_format
from engine.spec.ngram import NgramProposer
from engine.spec.proposer import Proposer
from engine.spec.speculation import Speculation
from engine.text import TextModel, load_text

if TYPE_CHECKING:
    from engine.runner import ModelRunner
    from engine.spec.draft_model import DraftProposer
    from engine.spec.heads import HeadsProposer

_WAY_TO_HEADS = "`batchsvc models distill --student heads:4` trains some for a model"


def speculation_for(
    config: EngineConfig, runner: object, text: TextModel | None, say: Callable[[str], None]
) -> Speculation | None:
    """None: nothing is proposed. Raises ConfigError or ModelError for a draft that can't be used."""
    if config.spec == "off":
        return None
    if config.spec == "ngram":
        return Speculation(NgramProposer())
    if config.draft is None and heads_directory(config) is None:
        return Speculation(NgramProposer())
    from engine.runner import ModelRunner

    assert isinstance(runner, ModelRunner), "a draft needs a model to draft for"
    assert text is not None, "a draft model is compared by its vocabulary"
    return Speculation(drafting(config, runner, text, say), salt=config.draft_salt)


def drafting(
    config: EngineConfig,
    runner: ModelRunner,
    text: TextModel,
    say: Callable[[str], None],
    *,
    reads_all: bool = False,
) -> Proposer:
    """The draft model or the heads that a configuration names, on the memory of `runner`. A draft model that
    `reads_all` reads any text for any answer (to measure it)."""
    heads = heads_directory(config)
    if heads is not None:
        return heads_on(runner, heads, config.model)
    return draft_model(config, runner, text, say, reads_all=reads_all)


def heads_directory(config: EngineConfig) -> Path | None:
    """Where the heads are that are to propose; None: nothing asks for heads. Raises ConfigError where some are asked
    for that aren't there, or where a draft is neither model nor heads."""
    given = Path(config.draft) if config.draft is not None else None
    if given is not None:
        is_heads, is_model = (given / HEADS_FILE).is_file(), (given / "config.json").is_file() or given.is_file()
        if config.spec == "heads" and not is_heads:
            raise ConfigError(f"{given} has no {HEADS_FILE}: {_WAY_TO_HEADS}.")
        if config.spec == "draft" and is_heads and not is_model:
            raise ConfigError(f"{given} holds heads and no model; use it with spec heads, or auto.")
        return given if is_heads and (config.spec == "heads" or not is_model) else None
    own = Path(config.model)
    if config.model and config.spec in ("auto", "heads") and (own / HEADS_FILE).is_file():
        return own
    if config.spec == "heads":
        raise ConfigError(f"{config.model} has no heads beside its weights, and draft names none: {_WAY_TO_HEADS}.")
    return None


def draft_directory(config: EngineConfig) -> Path | None:
    """Where what is to propose lies: a draft model, or heads, which may be among the model's own files; None: nothing
    but the look-up proposes. Raises ConfigError as `heads_directory` does."""
    if config.spec in ("off", "ngram"):
        return None
    return heads_directory(config) or (None if config.draft is None else Path(config.draft))


def draft_bytes_of(config: EngineConfig) -> int:
    """What the weights of the draft will take that a configuration names, to plan memory for them. Raises ConfigError
    or ModelError for one that can't be used."""
    if config.spec in ("off", "ngram"):
        return 0
    heads, form = heads_directory(config), weight_format(config.weight_format)
    if heads is None and config.draft is None:
        return 0
    from engine.memory.drafting import heads_bytes, model_bytes  # reads files, which a bare GPU image cannot

    return heads_bytes(heads, form) if heads is not None else model_bytes(Path(config.draft or ""), form)


def draft_format(config: EngineConfig) -> str:
    """What the weights of a draft model are in: as the model's, where any model can be."""
    return config.weight_format if config.weight_format in PLAIN_FORMATS else "bf16"


def heads_on(runner: ModelRunner, directory: Path, model: str) -> HeadsProposer:
    """The heads in a directory, on the model that `runner` runs and the user calls `model`."""
    from engine.spec.heads import HeadsProposer
    from engine.spec.heads_file import read_heads
    from engine.spec.heads_model import PackedHeads

    shape = runner.model_config
    heads = read_heads(
        directory, model_digest=runner.digest, model=model, hidden=shape.hidden, vocab_size=shape.vocab_size
    )
    runner.keeps_states = True
    return HeadsProposer(PackedHeads(heads, shape, runner.kernels, runner.embedding))


def draft_model(
    config: EngineConfig,
    runner: ModelRunner,
    text: TextModel,
    say: Callable[[str], None],
    *,
    reads_all: bool = False,
) -> DraftProposer:
    """The draft model that a configuration names, in the memory of `runner`."""
    from engine.loaded import from_files
    from engine.runner import ModelRunner
    from engine.spec.draft_model import DraftProposer

    assert config.draft is not None, "there is a draft model"
    if not _has_same_vocabulary(text, load_text(config.draft)):
        raise ConfigError(f"{config.draft} has another vocabulary than {config.model}; a draft model must share it.")
    own = replace(
        config,
        model=config.draft,
        weight_format=draft_format(config),
        num_blocks=runner.num_blocks,
        spec="off",
        draft=None,
        poison=False,
        overlap=False,
    )
    drafter = ModelRunner(own, say, loaded=from_files(own, drafts=True), pool=runner.pool)
    return DraftProposer(drafter, config.block_tokens, reads_all=reads_all)


def _has_same_vocabulary(text: TextModel, other: TextModel) -> bool:
    size = text.meta.vocab_size
    return other.meta.vocab_size == size and all(
        text.tokenizer.token_bytes(token_id) == other.tokenizer.token_bytes(token_id) for token_id in range(size)
    )
