"""Answers to one prompt that wait for the first of them to compute it; they then begin with its blocks."""

from __future__ import annotations

from engine.cache.sequence import Sequence, SequenceState


class Forks:
    """Waiting sequences by the one they wait for. Those that end meanwhile are skipped when they are taken."""

    def __init__(self) -> None:
        self._held: dict[str, list[Sequence]] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return any(seq in held for held in self._held.values())

    def hold(self, parent: Sequence, child: Sequence) -> bool:
        """Lets `child` wait for `parent`. False: that one has computed its prompt, or it is another one."""
        if has_prompt(parent) or not are_siblings(parent, child):
            return False
        self._held.setdefault(parent.id, []).append(child)
        return True

    def take(self, parent_id: str) -> list[Sequence]:
        """Those that wait for this one; they no longer do."""
        held = self._held.pop(parent_id, []) if self._held else []
        return [child for child in held if child.state is SequenceState.WAITING]


def has_prompt(seq: Sequence) -> bool:
    """Whether its blocks hold its whole prompt."""
    return seq.state is SequenceState.RUNNING and seq.committed_tokens >= seq.num_prompt_tokens


def are_siblings(parent: Sequence, child: Sequence) -> bool:
    """Whether `child` has the prompt of `parent` to compute, and nothing else."""
    ours, theirs = child.request, parent.request
    is_same_scope = (ours.salt, ours.adapter) == (theirs.salt, theirs.adapter)
    return is_same_scope and child.tokens == list(theirs.prompt_ids)
