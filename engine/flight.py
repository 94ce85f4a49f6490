"""A step that was started: where its ids are on the device, and what it brought once they are read.

A sequence that failed in the step before and has a chunk in this one, planned before that was known, fails again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.device import errors_told
from engine.request import TokenLogprobs
from engine.sched.plan import PLACEHOLDER, Chunk, LastState, StepResult
from engine.spec.verify import verified
from engine.staging import Fetch

NOT_FINITE = "The model's output for this request is not a number."


class Flight:
    """`ids` [R] on the device, -1 for none; `places` says which are whose. `pooled` are sums of states, `states`
    [R, hidden] the rows of which ids were sampled."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        before: Flight | None,
        failed: Mapping[str, str],
        ids: Tensor | None = None,
        fetch: Fetch | None = None,
        places: Mapping[str, range] | None = None,
        logprobs: Mapping[int, TokenLogprobs] | None = None,
        pooled: Mapping[str, Fetch] | None = None,
        states: Fetch | None = None,
    ) -> None:
        self.ids = ids
        self.places = places or {}
        self._chunks = chunks
        self._before = before
        self._failed = failed
        self._fetch = fetch
        self._logprobs = logprobs or {}
        self._pooled = pooled or {}
        self._states = states
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        return self._result is not None

    def result(self) -> StepResult:
        """What the step brought; waits for it."""
        if self._result is None:
            with errors_told():  # a GPU tells what went wrong in a step when it is waited for
                self._result = self._read()
            self._before = None
        return self._result

    def _read(self) -> StepResult:
        earlier = self._before.result().failed if self._before is not None else {}
        ids = self._fetch.ids() if self._fetch is not None else []
        failed = dict(self._failed)
        sampled: dict[str, tuple[int, ...]] = {}
        states: dict[str, LastState] = {}
        logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        rows = self._states.tensor().numpy() if self._states is not None else None
        for chunk in self._chunks:
            name, places = chunk.seq_id, self.places.get(chunk.seq_id, range(0))
            known = verified(chunk.draft, [token if token >= 0 else None for token in ids[places.start : places.stop]])
            if name in earlier and PLACEHOLDER in chunk.token_ids:
                failed[name] = earlier[name]
            elif known:
                sampled[name] = known
                if rows is not None:
                    states[name] = LastState(chunk.sample_position + len(known), rows[places[len(known) - 1]])
                if chunk.params.logprobs is not None:
                    logprobs[name] = tuple(self._logprobs[place] for place in places[: len(known)])
            elif places:
                failed[name] = NOT_FINITE
        pooled: dict[str, bytes] = {}
        for name, total in self._pooled.items():
            numbers = total.tensor()
            if torch.isfinite(numbers).all():
                pooled[name] = numbers.numpy().astype("<f4").tobytes()
            else:
                failed[name] = NOT_FINITE
        return StepResult(sampled, failed, pooled=pooled, logprobs=logprobs, states=states)
