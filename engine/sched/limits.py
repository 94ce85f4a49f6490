"""How large a step may be: as configured, until memory runs short; then half of what failed, and slowly back up."""

from __future__ import annotations

_PATIENCE = 256  # steps that have to do before the next ones may be a quarter larger


class StepLimits:
    """Most tokens of a step, and most sequences that decode in it."""

    def __init__(self, *, step_tokens: int, max_running: int) -> None:
        self.step_tokens = self._most_tokens = step_tokens
        self.max_running = self._most_running = max_running
        self._good_steps = 0

    def lower(self, num_tokens: int, num_sequences: int) -> bool:
        """A step of this size didn't fit. False: there is no smaller one."""
        if num_tokens <= 1:
            return False
        self.step_tokens = num_tokens // 2
        if num_sequences > 1:
            self.max_running = min(self.max_running, num_sequences // 2)
        self._good_steps = 0
        return True

    def observe_step(self) -> bool:
        """A step did fit. True: the next ones may be larger than it."""
        if self.step_tokens == self._most_tokens and self.max_running == self._most_running:
            return False
        self._good_steps += 1
        if self._good_steps < _PATIENCE:
            return False
        self._good_steps = 0
        self.step_tokens = min(self._most_tokens, self.step_tokens * 5 // 4 + 1)
        self.max_running = min(self._most_running, self.max_running * 5 // 4 + 1)
        return True
