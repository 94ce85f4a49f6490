"""Routes of interactive calls: one prompt, one answer, at once, as the official client makes them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from batchsvc.accounts.caller import CallerDep
from batchsvc.accounts.service import Caller
from batchsvc.batches.endpoints import CHAT, COMPLETIONS, RESPONSES
from batchsvc.errors import InvalidRequestError
from batchsvc.http.deps import Context, ContextDep
from batchsvc.interactive import service
from batchsvc.interactive.call_response import CallResponse
from batchsvc.interactive.switchboard import Switchboard

router = APIRouter()


def _switchboard(request: Request) -> Switchboard:
    return cast(Switchboard, request.app.state.switchboard)


SwitchboardDep = Annotated[Switchboard, Depends(_switchboard)]

_BUSY = "More calls than are taken at once (`Retry-After` says when to try again), or more than the project may spend."
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, as events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}}},
    },
    429: {
        "description": _BUSY,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    },
}


def _takes(**required: dict[str, Any]) -> dict[str, Any]:
    """What the description says of a body: its other fields are those of a line."""
    properties = {"model": {"type": "string"}, "stream": {"type": ["boolean", "null"]}, **required}
    schema = {"type": "object", "required": ["model", *required], "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_TEXT_OR_LIST: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]}


@router.post(
    CHAT,
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_takes(messages={"type": "array", "minItems": 1, "items": {"type": "object"}}),
)
async def create_chat_completion(
    request: Request, caller: CallerDep, context: ContextDep, switchboard: SwitchboardDep
) -> Response:
    """Answers a chat."""
    return await _answer(CHAT, request, caller, context, switchboard)


@router.post(COMPLETIONS, response_class=Response, responses=_ANSWERS, openapi_extra=_takes(prompt=_TEXT_OR_LIST))
async def create_completion(
    request: Request, caller: CallerDep, context: ContextDep, switchboard: SwitchboardDep
) -> Response:
    """Goes on with a text."""
    return await _answer(COMPLETIONS, request, caller, context, switchboard)


@router.post(RESPONSES, response_class=Response, responses=_ANSWERS, openapi_extra=_takes(input=_TEXT_OR_LIST))
async def create_response(
    request: Request, caller: CallerDep, context: ContextDep, switchboard: SwitchboardDep
) -> Response:
    """Answers a text, or messages of text."""
    return await _answer(RESPONSES, request, caller, context, switchboard)


async def _answer(
    endpoint: str, request: Request, caller: Caller, context: Context, switchboard: Switchboard
) -> Response:
    settings = context.settings
    with ExitStack() as slot:
        slot.enter_context(switchboard.slot())  # before the body: what waits for a slot would fill the memory
        try:
            async with asyncio.timeout(settings.interactive_stall_s):
                data = await request.body()
        except TimeoutError as error:
            says = f"The request's body didn't come within {settings.interactive_stall_s:g} s."
            raise InvalidRequestError(says, code="body_timeout") from error
        call = await run_in_threadpool(service.prepare, context.db, settings, caller, endpoint, data)
        return CallResponse(switchboard, context.db, settings, call, slot.pop_all())
    raise AssertionError("unreachable: a slot swallows no exception")
