"""The parameters of a body that say how tokens are chosen: what the engine runs, and what costs the line.

A parameter that isn't supported is refused by name, never dropped silently; null always asks for nothing.
"""

from __future__ import annotations

from typing import Any

from batchsvc.batches.body_values import boolean, integer, number, wrong
from engine.errors import RequestError

MAX_STOPS = 4
_SEEDS = 2**63

# field -> values that ask for nothing special; null always does
REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "n": (1,),
}


def parse_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters as a unit row carries them, all but `max_tokens`."""
    return {
        "min_tokens": integer(body, "min_tokens", 0, low=0),
        "temperature": number(body, "temperature", 1.0, low=0.0, high=2.0),
        "top_k": _top_k(body),
        "top_p": _top_p(body),
        "seed": _seed(body),
        "stop": _stop(body),
        "stop_token_ids": _stop_token_ids(body),
        "ignore_eos": boolean(body, "ignore_eos"),
    }


def parse_max_tokens(body: dict[str, Any]) -> int | None:
    """The most tokens of an answer, by either of its two names; None: not given."""
    given = {
        name: integer(body, name, 0, low=1)
        for name in ("max_completion_tokens", "max_tokens")
        if body.get(name) is not None
    }
    if len(set(given.values())) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; give one of them.", code="invalid_value", param="max_tokens"
        )
    return next(iter(given.values()), None)


def _top_k(body: dict[str, Any]) -> int:
    return max(0, integer(body, "top_k", 0, low=-1))  # vLLM writes "no limit" as -1


def _top_p(body: dict[str, Any]) -> float:
    top_p = number(body, "top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0:
        raise wrong("top_p", "above 0 and at most 1", body["top_p"])
    return top_p


def _seed(body: dict[str, Any]) -> int | None:
    if body.get("seed") is None:
        return None
    return integer(body, "seed", 0, low=-_SEEDS, high=2 * _SEEDS - 1) % _SEEDS


def _stop(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop")
    if stop is None:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    is_fine = isinstance(stops, list) and len(stops) <= MAX_STOPS and all(isinstance(s, str) and s for s in stops)
    if not is_fine:
        raise wrong("stop", f"a string or a list of at most {MAX_STOPS} strings, none empty", stop)
    return list(stops)


def _stop_token_ids(body: dict[str, Any]) -> list[int]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise wrong("stop_token_ids", "a list of token ids", ids)
    return sorted(set(ids))
