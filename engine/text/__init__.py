"""Everything about a model that deals with text, loaded without torch: metadata, tokenizer, chat template.

The libraries behind tokenizers and templates are loaded with the first model (PEP 562): an engine that is given token
ids needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import RequestError
from engine.load.meta import ModelMeta, read_meta
from engine.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from engine.text.chat import ChatTemplate
    from engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "TextModel", "Tokenizer", "load_text"]

_HOME = {"ChatTemplate": "engine.text.chat", "Tokenizer": "engine.text.tokenizer"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine.text' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's text side. Thread-safe."""

    meta: ModelMeta
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a chat, `variables` given to the template. Raises RequestError when the template refuses
        it or the model has none."""
        if self.template is None:
            raise RequestError(
                f"The model {self.meta.name} has no chat template.", code="no_chat_template", param="model"
            )
        return self.template.render(messages, **variables)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a chat as token ids."""
        return self.tokenizer.encode(self.render(messages))

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts, in order; on all cores, without the GIL."""
        return self.tokenizer.encode_batch(texts)


def load_text(path: str | Path) -> TextModel:
    """Loads the text side of the model at `path`. Raises ModelError in one sentence."""
    from engine.text.chat import ChatTemplate
    from engine.text.tokenizer import Tokenizer

    meta = read_meta(path)
    if meta.path.is_dir():
        tokenizer = Tokenizer.from_json(meta.path / "tokenizer.json")
    else:
        from engine.load.gguf import GGUFFile

        tokenizer = Tokenizer.from_gguf(GGUFFile(meta.path).fields, meta.path)
    template = None
    if meta.chat_template is not None:
        template = ChatTemplate(meta.chat_template, bos_token=meta.bos_token, eos_token=meta.eos_token)
    return TextModel(meta, tokenizer, template)
