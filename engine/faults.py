"""How the fake engine misbehaves when a test asks for it: `BATCHSVC_FAKE_FAULTS="oom:8;nan:WORD;die:WORD;hang:500"`.

    oom:N      memory doesn't suffice for a step of more than N sequences
    nan:WORD   a request whose prompt has this word comes out as no number
    die:WORD   the process ends by a segmentation fault when such a request has begun
    hang:N     after N tokens in all no more come, and no step returns
    gpu:N      after N tokens in all the GPU fails

A WORD of digits alone is a token id.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import ConfigError, DeviceError


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong; by default nothing."""

    oom: int | None = None
    nan: str | None = None
    die: str | None = None
    hang: int | None = None
    gpu: int | None = None

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Raises ConfigError: a misspelt fault would test nothing."""
        numbers: dict[str, int] = {}
        words: dict[str, str] = {}
        for item in filter(None, text.split(";")):
            name, _, value = item.strip().partition(":")
            if name in ("oom", "hang", "gpu") and value.isdigit():
                numbers[name] = int(value)
            elif name in ("nan", "die") and value:
                words[name] = value
            else:
                raise ConfigError(
                    f"The fake engine knows no fault {item!r}, but oom:N, hang:N, gpu:N, nan:WORD and die:WORD."
                )
        oom, hang, gpu = (numbers.get(name) for name in ("oom", "hang", "gpu"))
        return cls(oom=oom, hang=hang, gpu=gpu, nan=words.get("nan"), die=words.get("die"))

    def has_room(self, num_sequences: int) -> bool:
        return self.oom is None or num_sequences <= self.oom

    def spoils(self, prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None) -> bool:
        """Whether a request comes out as no number."""
        return _has(self.nan, prompt_ids, decode)

    def strike(self, prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None) -> None:
        """A request begins."""
        if _has(self.die, prompt_ids, decode):
            os.kill(os.getpid(), signal.SIGSEGV)

    def hold(self, num_tokens: int) -> None:
        """So many tokens were generated."""
        if self.hang is not None and num_tokens >= self.hang:
            threading.Event().wait()
        if self.gpu is not None and num_tokens >= self.gpu:
            raise DeviceError("The GPU failed in the middle of a step: CUDA error: an illegal memory access.")


def _has(word: str | None, prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None) -> bool:
    if word is None:
        return False
    if word.isdigit():
        return int(word) in prompt_ids
    return decode is not None and word in decode(prompt_ids)
