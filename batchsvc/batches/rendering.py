"""Where a checked chat meets its model: the prompt's text, and the form that calls of tools must have there.

Tools, reasoning effort and further variables go to the chat template if it knows them. If it doesn't, they cost the
line: an answer without them would look like an answer with them. Only where the answer must call a tool, a template
without tools does too: they are described in the system message, and the answer is held to a call in plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchsvc.batches.tools_body import ToolUse, calls_form
from engine.errors import RequestError
from engine.text import ChatTemplate, TextModel
from engine.text.calls import CallFormat

if TYPE_CHECKING:
    from batchsvc.batches.body import ChatCall

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def render_chat(call: ChatCall, text: TextModel) -> tuple[ChatCall, str]:
    """The prompt's text, and the call with what only the model could settle. Raises RequestError for what the model's
    template doesn't know."""
    template = text.template
    if template is None or call.asks_nothing_special:
        return call, text.render(call.messages)
    messages: Sequence[Mapping[str, Any]] = call.messages
    variables = _known_variables(call, template)
    params = call.params
    if any("tool_calls" in message or message["role"] == "tool" for message in messages) and not template.knows_calls:
        raise _unknown("calls of tools in messages", "messages")
    if call.tools is not None:
        call_format = template.call_format
        if call_format is not None:
            variables["tools"] = call.tools.tools
        elif call.tools.must_call:
            call_format = CallFormat.JSON
            messages = _told_of(messages, call.tools)
        else:
            raise _unknown("tools", "tools", '; with tool_choice "required", or the name of one, they can be used')
        params = {**params, "calls": str(call_format)}
        if call.tools.must_call:
            params["grammar"] = calls_form(call.tools, call_format)
    return replace(call, params=params), text.render(messages, **variables)


def _known_variables(call: ChatCall, template: ChatTemplate) -> dict[str, Any]:
    unknown = sorted(call.template_kwargs.keys() - template.variables)
    if unknown:
        raise _unknown(f"{unknown[0]} of chat_template_kwargs", "chat_template_kwargs")
    variables = dict(call.template_kwargs)
    effort = call.reasoning_effort
    if effort is None:
        return variables
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort, **variables}
    if "enable_thinking" in template.variables:
        return {"enable_thinking": effort != "none", **variables}
    if effort == "none":
        return variables  # a model that can't reason doesn't
    raise _unknown("reasoning_effort", "reasoning_effort")


def _told_of(messages: Sequence[Mapping[str, Any]], use: ToolUse) -> list[Mapping[str, Any]]:
    """The messages with the tools in front, in the system message if there is one."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in use.tools]
    told = "\n".join(["Answer with a call of one of these functions, as JSON with name and arguments:", *lines])
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": told}, *messages]
    content = messages[0]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return [{**messages[0], "content": [*parts, {"type": "text", "text": told}]}, *messages[1:]]


def _unknown(what: str, param: str, way_out: str = "") -> RequestError:
    return RequestError(
        f"This model's chat template doesn't know {what}{way_out or '; remove it from the body'}.",
        code="unsupported_parameter",
        param=param,
    )
