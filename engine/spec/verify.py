"""Which tokens a window yields; pure."""

from __future__ import annotations

from collections.abc import Sequence


def verified(draft: Sequence[int], sampled: Sequence[int | None]) -> tuple[int, ...]:
    """`sampled` are the model's own tokens, one for each place of the draft and one behind it, each right if the draft
    is right before it. So they count up to the first that differs from the draft, which is included: it stands in the
    place of the wrong draft token. None, where there is no token to sample, ends them too."""
    known: list[int] = []
    for place, token in enumerate(sampled):
        if token is None:
            break
        known.append(token)
        if place == len(draft) or token != draft[place]:
            break
    return tuple(known)
