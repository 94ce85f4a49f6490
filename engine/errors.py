"""What can go wrong in the engine, as one tree.

EngineError
├── ConfigError          a setting that can't work; names the setting and what it allows
├── ModelError           a model that can't be found, read or served; the worker stops with this sentence
├── QualityError         a format that costs a model more quality than it may; the worker stops with this sentence
├── MemoryShortageError  a step needs more memory than there is; a smaller one may do
├── DeviceError          a GPU can't be used, or failed under way; the worker stops, and another one takes over
├── PeerError            another engine can't be reached, or must not be worked with
├── GrammarError         a form that no answer can be given
└── RequestError         a request that can't be run; costs that line alone
"""

from __future__ import annotations


class EngineError(Exception):
    """Something the engine refuses; the message is one sentence that a user can act on."""


class ConfigError(EngineError):
    """A setting has a value that can't work."""


class ModelError(EngineError):
    """A model can't be found, read or served."""


class QualityError(EngineError):
    """A format costs a model more quality than it may, and nobody forces it."""


class MemoryShortageError(EngineError):
    """A step needs more memory than there is."""


class DeviceError(EngineError):
    """A GPU can't be used, or failed in the middle of a step: this process can't go on with it."""


class PeerError(EngineError):
    """Another engine can't be reached, went away, or must not be worked with."""


class GrammarError(EngineError):
    """A form that no answer can be given; the message is a reason without a full stop."""


class RequestError(EngineError):
    """A request can't be run. `code` and `param` are those of OpenAI's error envelope."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
