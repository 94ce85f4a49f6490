"""Which speculation a configuration asks for; loads the draft model, if it names one that can draft for the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.config import PLAIN_FORMATS, EngineConfig
from engine.errors import ConfigError
from engine.spec.ngram import NgramProposer
from engine.spec.speculation import Speculation
from engine.text import TextModel, load_text


def speculation_for(
    config: EngineConfig, runner: object, text: TextModel | None, say: Callable[[str], None]
) -> Speculation | None:
    """None: nothing is proposed. Raises ConfigError or ModelError for a draft model that can't be used."""
    if config.spec == "off":
        return None
    if config.draft is None or config.spec == "ngram":
        return Speculation(NgramProposer())
    from engine.runner import ModelRunner
    from engine.spec.draft_model import DraftProposer

    assert isinstance(runner, ModelRunner), "a draft model needs a model to draft for"
    assert text is not None, "a draft model is compared by its vocabulary"
    if not _has_same_vocabulary(text, load_text(config.draft)):
        raise ConfigError(f"{config.draft} has another vocabulary than {config.model}; a draft model must share it.")
    weight_format = config.weight_format if config.weight_format in PLAIN_FORMATS else "bf16"
    own = replace(
        config,
        model=config.draft,
        weight_format=weight_format,
        num_blocks=runner.num_blocks,
        poison=False,
        overlap=False,
    )
    return Speculation(DraftProposer(ModelRunner(own, say, pool=runner.pool), config.block_tokens))


def _has_same_vocabulary(text: TextModel, other: TextModel) -> bool:
    size = text.meta.vocab_size
    return other.meta.vocab_size == size and all(
        text.tokenizer.token_bytes(token_id) == other.tokenizer.token_bytes(token_id) for token_id in range(size)
    )
