"""Tools as Anthropic's clients write them: as the tools and messages of the chat that they mean, and its calls back.

A message may hold text, calls (`tool_use`) and results of calls (`tool_result`) in one list of blocks. In a chat, the
calls stand beside the text of the assistant's message, and each result is a message of its own. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from batchsvc.batches.body_values import boolean, same, wrong
from batchsvc.files.lines import shown
from engine.errors import RequestError

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# fields of a tool -> values that ask for nothing special; null always does
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "type": ("custom",),
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_KNOWN = {"name", "description", "input_schema", "strict"}
_IGNORED = {"cache_control", "eager_input_streaming"}  # they don't change the answer


def tools_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """`tools` and what goes with them, in the words of a chat. Raises RequestError."""
    tools, choice = params.get("tools"), params.get("tool_choice")
    asked: dict[str, Any] = {}
    if tools is not None:
        if not isinstance(tools, list):
            raise wrong("tools", "a list of tools", tools)
        asked["tools"] = [_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]
    if choice is not None:
        asked |= _choice(choice)
    return asked


def assistant_message(blocks: Sequence[Any], where: str) -> dict[str, Any]:
    """A message of the assistant: its text, and the calls that it made."""
    calls = [_call_of(block, f"{where}.{index}") for index, block in enumerate(blocks) if kind_of(block) == "tool_use"]
    texts = [text_of(block, f"{where}.{index}") for index, block in enumerate(blocks) if kind_of(block) != "tool_use"]
    message: dict[str, Any] = {"role": "assistant", "content": texts or None}
    return message | ({"tool_calls": calls} if calls else {})


def user_messages(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    """The results of calls, each as a message, and then the text that the user adds."""
    texts = []
    for index, block in enumerate(blocks):
        at = f"{where}.{index}"
        if kind_of(block) != "tool_result":
            texts.append(text_of(block, at))
            continue
        if texts:
            raise RequestError(f"{at}: results of tools come before text.", code="invalid_value", param=at)
        if not isinstance(block.get("tool_use_id"), str):
            raise wrong(f"{at}.tool_use_id", "the id of the call that it answers", block.get("tool_use_id"))
        if block.get("is_error"):
            raise RequestError(
                f"{at}.is_error is not supported here: say in the result's content that the call failed.",
                code="unsupported_parameter",
                param=at,
            )
        content = block.get("content", "")
        if isinstance(content, list):
            content = [text_of(one, f"{at}.content.{number}") for number, one in enumerate(content)] or ""
        elif not isinstance(content, str):
            raise wrong(f"{at}.content", "a string or a list of text blocks", content)
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    if texts:
        yield {"role": "user", "content": texts}


def kind_of(block: Any) -> Any:
    """The type of a block of content."""
    return block.get("type") if isinstance(block, dict) else None


def text_of(block: Any, where: str) -> dict[str, str]:
    """A block that must be text, as a chat's. Raises RequestError."""
    if kind_of(block) != "text":
        raise RequestError(
            f"{where}: a block of type {shown(kind_of(block))} is not supported here; the model reads text only.",
            code="unsupported_parameter",
            param=where,
        )
    if not isinstance(block.get("text"), str):
        raise wrong(f"{where}.text", "a string", block.get("text"))
    return {"type": "text", "text": block["text"]}


def blocks_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The answer of a chat as blocks: its text, and its calls."""
    calls = message.get("tool_calls") or []
    text = message["content"] or ""
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        function = call["function"]
        ident = "toolu_" + call["id"].removeprefix("call_")
        made = {"id": ident, "name": function["name"], "input": orjson.loads(function["arguments"])}
        blocks.append({"type": "tool_use", **made})
    return blocks


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong(where, "an object with name and input_schema", tool)
    for name in sorted(tool.keys() - _KNOWN - _IGNORED):
        value = tool[name]
        if value is not None and not any(same(value, harmless) for harmless in _HARMLESS.get(name, ())):
            raise RequestError(
                f"{where}.{shown(name)[1:-1]}: it is not supported here; tools are functions of your own.",
                code="unsupported_parameter",
                param=where,
            )
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong(f"{where}.input_schema", "a JSON schema of type object", tool.get("input_schema"))
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> dict[str, Any]:
    kind = kind_of(choice)
    asked: dict[str, Any] = {}
    if kind == "tool" and isinstance(choice.get("name"), str):
        asked["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in _CHOICES:
        asked["tool_choice"] = _CHOICES[kind]
    else:
        raise wrong("tool_choice", "an object of type auto, any, none, or tool with the name of one", choice)
    if boolean(choice, "disable_parallel_tool_use"):
        asked["parallel_tool_calls"] = False
    return asked


def _call_of(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str):
        raise wrong(where, "a tool_use with id and name", block)
    if not isinstance(block.get("input"), dict):
        raise wrong(f"{where}.input", "an object", block.get("input"))
    function = {"name": block["name"], "arguments": orjson.dumps(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}
