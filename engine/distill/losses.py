"""The losses of a student: how far its distribution is from a teacher's, how likely it finds what was said; pure."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.distill.targets import Targets

NOTHING = -1
"""In place of a column that a student's head doesn't have."""


def divergence(logits: Tensor, targets: Targets, *, temperature: float, direction: str) -> Tensor:
    """Of each row, in nats: logits [R, V] against the teacher's `targets`, which were drawn at this temperature -> [R].

    Times the temperature squared, so that gradients keep their size. An estimate without bias, as its gradient is.
    """
    log_q = (logits.float() / temperature).log_softmax(-1).gather(1, targets.ids)
    found = log_q.new_zeros(len(log_q))
    if direction in ("forward", "both"):
        found = found - targets.entropy - (targets.weights * targets.log_p.exp() * log_q).sum(-1)
    if direction in ("reverse", "both"):
        found = found + (targets.weights * log_q.exp() * (log_q - targets.log_p)).sum(-1)
    return found * (temperature**2 / (2 if direction == "both" else 1))


def surprise(logits: Tensor, columns: Tensor) -> Tensor:
    """-log of the probability of what came, the mean over the rows whose column int64 [R] the head has -> a scalar."""
    if not bool((columns != NOTHING).any()):
        return logits.sum() * 0.0
    return cross_entropy(logits.float(), columns, ignore_index=NOTHING)
