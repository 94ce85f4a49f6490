"""The parameters of a body that say how tokens are chosen: what the engine runs, and what costs the line.

A parameter that isn't supported is refused by name, never dropped silently; null always asks for nothing.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from batchsvc.batches.body_values import boolean, integer, number, wrong
from engine.errors import RequestError
from engine.request import MAX_LOGPROBS, SamplingParams

MAX_STOPS = 4
MAX_CHOICES = 128
_SEEDS = 2**63

# of the parameters that few lines have: what they are without asking for anything
_NOTHING: dict[str, Any] = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": [],
    "logprobs": None,
    "n": 1,
}
_ENGINE_NAMES = {field.name for field in fields(SamplingParams)}

KNOWN = frozenset(
    {
        *("model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p"),
        *("n", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "logprobs", "top_logprobs"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "service_tier", "prompt_cache_key"),
    }
)
"""The fields of a body that are read wherever tokens are chosen."""

# field -> values that ask for nothing special; null always does
HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}


def parse_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters as a unit row carries them, all but `max_tokens`; those of the last group only where they
    ask for something."""
    rare = {
        "min_p": number(body, "min_p", 0.0, low=0.0, high=1.0),
        "presence_penalty": number(body, "presence_penalty", 0.0, low=-2.0, high=2.0),
        "frequency_penalty": number(body, "frequency_penalty", 0.0, low=-2.0, high=2.0),
        "repetition_penalty": number(body, "repetition_penalty", 1.0, low=0.01, high=100.0),
        "logit_bias": _logit_bias(body),
        "logprobs": _logprobs(body),
        "n": _n(body),
    }
    return {
        "min_tokens": integer(body, "min_tokens", 0, low=0),
        "temperature": number(body, "temperature", 1.0, low=0.0, high=2.0),
        "top_k": _top_k(body),
        "top_p": _top_p(body),
        "seed": _seed(body),
        "stop": _stop(body),
        "stop_token_ids": _stop_token_ids(body),
        "ignore_eos": boolean(body, "ignore_eos"),
        **{name: value for name, value in rare.items() if value != _NOTHING[name]},
    }


def sampling_params(params: dict[str, Any], seed: int) -> SamplingParams:
    """What the engine is told, of the parameters of a unit row. Raises RequestError if it can't run them."""
    own = {name: params[name] for name in _ENGINE_NAMES & params.keys()}
    lists = {name: tuple(params.get(name, ())) for name in ("stop", "stop_token_ids")}
    bias = tuple((int(token), float(bias)) for token, bias in params.get("logit_bias", ()))
    given: dict[str, Any] = {**own, **lists, "logit_bias": bias, "seed": seed}
    return SamplingParams(**given)


def check_bias(params: dict[str, Any], vocab_size: int) -> None:
    """Raises RequestError for a bias of a token that the model doesn't have."""
    for token, _ in params.get("logit_bias", ()):
        if token >= vocab_size:
            says = f"logit_bias names token {token}, which is outside of the model's vocabulary of {vocab_size}."
            raise RequestError(says, code="invalid_value", param="logit_bias")


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


def _n(body: dict[str, Any]) -> int:
    if body.get("n") is None:
        return 1
    if type(body["n"]) is not int or not 1 <= body["n"] <= MAX_CHOICES:
        raise wrong("n", f"an integer between 1 and {MAX_CHOICES}", body["n"])
    return int(body["n"])


def _logit_bias(body: dict[str, Any]) -> list[tuple[int, float]]:
    bias = body.get("logit_bias")
    if bias is None:
        return []
    if not isinstance(bias, dict):
        raise wrong("logit_bias", "an object of token ids and numbers", bias)
    found: dict[int, float] = {}
    for name in bias:
        if not (name.isascii() and name.isdigit() and len(name) < 11):
            raise wrong("logit_bias", "an object whose names are token ids", name)
        found[int(name)] = number({"logit_bias": bias[name]}, "logit_bias", 0.0, low=-100.0, high=100.0)
    return sorted((token, value) for token, value in found.items() if value)


def _logprobs(body: dict[str, Any]) -> int | None:
    """How many likely tokens come with each one; None: no logprobs."""
    top = body.get("top_logprobs")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_LOGPROBS):
        raise wrong("top_logprobs", f"an integer between 0 and {MAX_LOGPROBS}", top)
    if not boolean(body, "logprobs"):
        if top:
            raise RequestError("top_logprobs needs logprobs: true.", code="invalid_value", param="top_logprobs")
        return None
    return top or 0


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
