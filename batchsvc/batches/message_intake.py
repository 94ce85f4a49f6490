"""Takes the requests of a message batch out of a call's body as it comes, into an input file, in bounded memory.

Anthropic's clients may send 256 MB in one call; here one request is held at a time. A request of a wrong shape, or a
custom_id that is there twice, refuses the whole call and leaves nothing; what is wrong with the params of one costs it
alone, later.
"""

from __future__ import annotations

from functools import partial

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from batchsvc import ids
from batchsvc.batches.inputs import InlineInput, inline_lines
from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.message_schemas import MessageRequest
from batchsvc.batches.schemas import MOST_REQUESTS
from batchsvc.errors import InvalidRequestError, TooLargeError
from batchsvc.files.request_object import request_object
from batchsvc.http.deps import Context
from batchsvc.http.elements import Elements, ElementTooLargeError, NotAnArrayError
from batchsvc.http.uploads import StoreSink, check_length
from batchsvc.store import keys

MOST_BYTES = 256 * 1024 * 1024
_WHAT, _PARAM = "call", "requests"


async def received(request: Request, context: Context, project_id: str) -> tuple[InlineInput, int]:
    """The stored requests of a call, and how many they are. Raises a ServiceError for what refuses the call."""
    settings = context.settings
    most_bytes = min(MOST_BYTES, settings.max_input_bytes)
    check_length(request.headers.get("content-length"), most_bytes, _WHAT, _PARAM)
    file_id = ids.file_id()
    key = keys.input_file(project_id, file_id)
    sink = StoreSink(context.store, key, settings.max_input_bytes, _WHAT, _PARAM)
    lines = _Lines(most_bytes, min(settings.max_inline_bytes, settings.max_line_bytes))
    try:
        async for piece in request.stream():
            await sink.write(await run_in_threadpool(lines.take, piece))
        lines.finish()
        stored = await sink.finish()
    except BaseException:
        await sink.abandon()
        raise
    made = InlineInput(
        store=context.store,
        project_id=project_id,
        file_id=file_id,
        s3_key=key,
        stored=stored,
        setting_life_s=settings.file_ttl_s,
    )
    return made, lines.count


class _Lines:
    """The lines of the input file that the requests of a body become."""

    def __init__(self, most_bytes: int, most_request_bytes: int) -> None:
        self.count = 0
        self._elements = Elements(_PARAM, most_bytes=most_request_bytes)
        self._most_bytes, self._most_request_bytes = most_bytes, most_request_bytes
        self._num_bytes = 0
        self._seen: set[str] = set()

    def take(self, piece: bytes) -> bytes:
        """The lines of the requests that end with this piece."""
        self._num_bytes += len(piece)
        if self._num_bytes > self._most_bytes:
            raise TooLargeError(
                f"The call is over {self._most_bytes} bytes, the most that one may have: make several batches of it.",
                code="call_too_large",
                param=_PARAM,
            )
        try:
            return b"".join(map(self._line, self._elements.feed(piece)))
        except NotAnArrayError as error:
            raise _misshaped() from error
        except ElementTooLargeError as error:
            raise self._too_large(error.index) from error

    def finish(self) -> None:
        try:
            self._elements.finish()
        except NotAnArrayError as error:
            raise _misshaped() from error
        if not self.count:
            raise InvalidRequestError(
                "requests: a batch has at least one.", code="missing_required_parameter", param=_PARAM
            )

    def _line(self, data: bytes) -> bytes:
        index = self.count
        if index >= MOST_REQUESTS:
            raise InvalidRequestError(
                f"requests: a call has at most {MOST_REQUESTS}: make several batches of it.",
                code="invalid_value",
                param=_PARAM,
            )
        try:
            request = MessageRequest.model_validate(request_object(data, what=f"{_PARAM}.{index}"))
        except ValidationError as error:
            problems = error.errors(include_input=False, include_url=False)
            place = partial(_placed, index)
            raise RequestValidationError([{**problem, "loc": place(problem["loc"])} for problem in problems]) from error
        if request.custom_id in self._seen:
            raise InvalidRequestError(
                f"requests: the custom_id {request.custom_id} is used twice; each must be unique in its batch.",
                code="duplicate_custom_id",
                param=_PARAM,
            )
        line = b"".join(inline_lines([{"custom_id": request.custom_id, "body": request.params}], MESSAGES))
        if len(line) > self._most_request_bytes:  # the planner would find no custom_id in it
            raise self._too_large(index)
        self._seen.add(request.custom_id)
        self.count += 1
        return line

    def _too_large(self, index: int) -> TooLargeError:
        where = f"{_PARAM}.{index}"
        return TooLargeError(
            f"{where}: it is over {self._most_request_bytes} bytes, the most that one request may have.",
            code="request_too_large",
            param=where,
        )


def _placed(index: int, place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    return ("body", _PARAM, index, *place)


def _misshaped() -> InvalidRequestError:
    return InvalidRequestError(
        'The body must be {"requests": [{"custom_id": "1", "params": {...}}, ...]} and nothing else.',
        code="invalid_json",
        param=_PARAM,
    )
