"""The tools of a body, the calls in its messages, and the form that answers have which must call a tool.

Tools are functions. With `tool_choice` "none" the model isn't told of them; with "auto" it may call; with "required" or
the name of one its answer is held to a call, argument schemas included.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import orjson

from batchsvc.batches.body_values import boolean, wrong
from batchsvc.batches.structure_body import NAME, checked_spec, closed
from engine.errors import RequestError
from engine.structure.grammar import JSON_FORM
from engine.text.calls import CallFormat

MAX_TOOLS = 128
_MAX_CALLS = 16  # of one answer that must call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools as templates take them. `must_call` are the names that the answer must call one of; () if it may be text;
    `max_calls` bounds the calls of an answer that must call."""

    tools: list[dict[str, Any]]
    must_call: tuple[str, ...] = ()
    max_calls: int = _MAX_CALLS


def parse_tools(body: dict[str, Any]) -> ToolUse | None:
    """The tools that the model is told of; None: none. Raises RequestError for what isn't a function."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    tools = [] if tools is None else tools
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise wrong("tools", f"a list of at most {MAX_TOOLS} tools", tools)
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise RequestError(f"tools has two functions named {twice}.", code="invalid_value", param="tools")
    is_parallel = body.get("parallel_tool_calls") is None or boolean(body, "parallel_tool_calls")
    must_call = _must_call(choice, names)
    if not functions or choice == "none":
        return None
    is_named = isinstance(choice, dict)
    return ToolUse(
        tools=[{"type": "function", "function": function} for function in functions],
        must_call=must_call,
        max_calls=_MAX_CALLS if is_parallel and not is_named else 1,
    )


def calls_form(use: ToolUse, call_format: CallFormat) -> str:
    """The spec of answers that call what they must, as the model's template writes calls."""
    key = "parameters" if call_format is CallFormat.LLAMA3 else "arguments"
    rules, names = [], []
    for index, tool in enumerate(use.tools):
        function = tool["function"]
        if function["name"] not in use.must_call:
            continue
        schema = closed(function["parameters"])  # a function takes the arguments it names
        param = f"tools[{index}].function.parameters"
        checked_spec("json", schema, param)  # names the tool at fault
        schema = {**schema, "x-guidance": JSON_FORM}
        head = json.dumps(json.dumps({"name": function["name"]})[:-1] + f', "{key}": ')
        rules.append(f'call{index}: {head} %json {json.dumps(schema, ensure_ascii=False)} "}}"')
        names.append(f"call{index}")
    one, more = "call", "call"
    if call_format is CallFormat.HERMES:
        one = '"<tool_call>\\n" call "\\n</tool_call>"'
        more = f'"\\n" {one}'
    elif call_format is CallFormat.LLAMA3:
        more = '"; " call'
    repeats = "" if use.max_calls == 1 or call_format is CallFormat.JSON else f" ({more}){{0,{use.max_calls - 1}}}"
    lark = "\n".join([f"start: {one}{repeats}", f"call: {' | '.join(names)}", *rules])
    return checked_spec("lark", lark, "tools")


def parse_message_calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message as templates take them, arguments as an object; [] without any."""
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return []
    if not isinstance(calls, list) or message.get("role") != "assistant":
        raise wrong(f"{where}.tool_calls", "a list of calls in a message of the assistant", calls)
    return [_message_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _message_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, "an object with id, type and function", call)
    try:
        arguments = orjson.loads(function.get("arguments") or "{}")  # as strict as the body around it
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(f"{where}.function.arguments", "the JSON text of an object", function.get("arguments"))
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _function(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(function, dict):
        raise wrong(where, "an object of type function with a function", tool)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", "1 to 64 letters, digits, underscores or dashes", name)
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise wrong(f"{where}.function.description", "a string", function["description"])
    boolean(function, "strict")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise wrong(f"{where}.function.parameters", "a JSON schema of type object", parameters)
    return {**function, "parameters": {"type": "object", **parameters}}


def _must_call(choice: Any, names: list[str]) -> tuple[str, ...]:
    if choice in (None, "none", "auto"):
        return ()
    if not names:
        raise RequestError(
            "tool_choice asks for a call, but there are no tools.", code="invalid_value", param="tool_choice"
        )
    if choice == "required":
        return tuple(names)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong("tool_choice", "none, auto, required, or an object that names a function", choice)
    if function["name"] not in names:
        raise RequestError(
            f"tool_choice names {function['name']}, which is none of the tools.",
            code="invalid_value",
            param="tool_choice",
        )
    return (function["name"],)
