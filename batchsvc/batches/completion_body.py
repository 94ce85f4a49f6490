"""The body of a text completion: one prompt as text or token ids, and the sampling parameters of a chat.

Several prompts in one line would be one answer that is billed as one and fails as one, so a line has one: the file is
the list. `logprobs` is a number here and becomes what a chat says in two fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchsvc.batches.body import ChatCall
from batchsvc.batches.body_values import allow, wrong
from batchsvc.batches.line_prompt import ChatLine, Fitting, LinePrompt, check_ids, prompts_of, renamed
from batchsvc.batches.sampling_body import HARMLESS, KNOWN, parse_max_tokens, parse_sampling
from batchsvc.batches.structure_body import FIELDS, parse_form
from engine.errors import RequestError
from engine.text import TextModel

ENDPOINT = "/v1/completions"
_MOST_LOGPROBS = 5

_KNOWN = frozenset({*KNOWN, *FIELDS, "prompt"})
# field -> values that ask for nothing special; null always does
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **HARMLESS,
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A checked body: endpoints.Call."""

    given: LinePrompt
    params: dict[str, Any]
    max_tokens: int | None
    messages: None = None

    def prepare(self, _text: TextModel) -> tuple[CompletionCall, LinePrompt]:
        return self, self.given

    def fit(self, lengths: Sequence[int], fitting: Fitting) -> dict[str, Any]:
        check_ids(self.given, fitting.meta, "prompt")
        if lengths[0] == 0:
            raise RequestError("The prompt has no tokens: write something.", code="invalid_value", param="prompt")
        line = ChatLine(ChatCall(messages=[], params=self.params, max_tokens=self.max_tokens))
        try:
            return {**line.fit(lengths, fitting), "endpoint": ENDPOINT}
        except RequestError as error:
            raise renamed(error, {"messages": "prompt"}) from error


def parse_completion(body: dict[str, Any]) -> CompletionCall:
    """What a body asks for. Raises RequestError."""
    allow(body, _KNOWN, _HARMLESS)
    given = prompts_of(body, "prompt")
    if max(len(given.texts), len(given.ids)) > 1:
        raise RequestError(
            "prompt holds several prompts; a line of a batch has one: write a line for each.",
            code="unsupported_parameter",
            param="prompt",
        )
    form = parse_form(body)
    params = parse_sampling(_with_chat_logprobs(body)) | ({"grammar": form} if form else {})
    return CompletionCall(given=given, params=params, max_tokens=parse_max_tokens(body))


def _with_chat_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    wanted = body.get("logprobs")
    body = {name: value for name, value in body.items() if name not in ("logprobs", "top_logprobs")}
    if wanted is None:
        return body
    if type(wanted) is not int or not 0 <= wanted <= _MOST_LOGPROBS:
        raise wrong("logprobs", f"an integer between 0 and {_MOST_LOGPROBS}", wanted)
    return {**body, "logprobs": True, "top_logprobs": wanted}
