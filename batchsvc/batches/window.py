"""One window of a file before it is planned: its lines checked, rendered and tokenized. No database, no store.

`collect` takes checked records until the window is full. A line ends up in one of three places: among the requests,
among the rejected lines (finished rows of the error file), or, with `is_strict` and a broken envelope, among the
problems that fail the batch. After the first such problem lines are only checked, as nothing will run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from batchsvc.batches import endpoints
from batchsvc.batches.body import parse_chat
from batchsvc.batches.endpoints import Call, Parsed
from batchsvc.batches.line_prompt import Fitting, LinePrompt, tokenized
from batchsvc.batches.part_file import PartLine, error_row
from batchsvc.files.envelope import CheckedRecord, Line
from batchsvc.files.lines import Problem, UnreadableFileError
from batchsvc.json_bytes import compact_json
from engine.errors import RequestError
from engine.text import TextModel

_TOKENIZE_LINES = 256
_LONGEST_KEY = 512  # bytes
_TOKENIZE_CHARS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a window ends. `lines_left` is what the batch may still hold, `max_problems` what may still be listed."""

    window_lines: int
    window_tokens: int
    lines_left: int
    max_problems: int
    default_max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A line that will run. `prompt` is big-endian uint32 token ids; equal params share one dict."""

    line_no: int
    custom_id: str
    model_id: str = ""
    prompt: bytes
    params: dict[str, Any]
    fold_key: bytes | None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


@dataclass(slots=True)
class WindowDraft:
    """What was read. `next_offset` is where the next window starts; `is_last`: there is no more to read.

    `unreadable` says why the file breaks after these lines.
    """

    next_offset: int
    line_nos: list[int] = field(default_factory=list)
    custom_ids: list[str | None] = field(default_factory=list)
    requests: list[PlannedRequest] = field(default_factory=list)
    chats: list[list[dict[str, Any]]] = field(default_factory=list)  # messages of the first requests, if they are kept
    rejected: list[PartLine] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_problems: int = 0
    notes: list[Problem] = field(default_factory=list)  # what was passed over in reading lines: the first ones
    input_tokens: int = 0
    num_prompts: int = 0  # of the requests
    has_too_many: bool = False
    unreadable: Problem | None = None
    is_last: bool = False


class UnusableModelError(Exception):
    """A line names a model that no line can run on here."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def on(self, record: CheckedRecord) -> CheckedRecord:
        """The record of a line that names it: nothing else need be wrong with it."""
        problem = Problem(line=record.line_no, code=self.code, message=str(self), param="body.model")
        return replace(record, line=None, problems=[problem])


class _Waiting(NamedTuple):
    """A line between rendering and tokenizing; without `call` it is rejected for `error` or its own problems."""

    record: CheckedRecord
    call: Call | None = None
    prompt: LinePrompt = LinePrompt()
    error: RequestError | None = None


def collect(
    records: Iterable[CheckedRecord],
    *,
    batch_id: str,
    limits: Limits,
    offset: int,
    text_model: Callable[[str], TextModel],
    is_strict: bool,
    is_failing: bool,
    keeps_chats: int = 0,
    parse: Callable[[dict[str, Any]], Parsed] = parse_chat,
    more_params: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> WindowDraft:
    """Reads one window. `text_model` gives the text side of a line's model; `is_failing`: check only;
    `keeps_chats`: the messages of the first requests are kept, of so many tokens in all; `more_params` gives what a
    body's parameters get in addition."""
    collector = _Collector(batch_id, limits, offset, text_model, is_strict, is_failing, keeps_chats, parse)
    collector.more_params = more_params
    return collector.collect(records)


class _Collector:
    def __init__(
        self,
        batch_id: str,
        limits: Limits,
        offset: int,
        text_model: Callable[[str], TextModel],
        is_strict: bool,
        is_failing: bool,
        keeps_chats: int,
        parse: Callable[[dict[str, Any]], Parsed],
    ) -> None:
        self.more_params: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self._parse = parse
        self._batch_id = batch_id
        self._limits = limits
        self._text_model = text_model
        self._is_strict = is_strict
        self._is_failing = is_failing
        self._keeps_chats = keeps_chats
        self._draft = WindowDraft(next_offset=offset)
        self._params: dict[bytes, dict[str, Any]] = {}  # equal parameters once

    def collect(self, records: Iterable[CheckedRecord]) -> WindowDraft:
        draft = self._draft
        waiting: list[_Waiting] = []
        try:
            return self._fill(records, waiting)
        except UnreadableFileError as error:
            if self._take(waiting):  # else the next window meets it again
                draft.unreadable = error.problem
            return draft

    def _fill(self, records: Iterable[CheckedRecord], waiting: list[_Waiting]) -> WindowDraft:
        """`waiting` holds the lines that were read and not added yet, at every moment."""
        draft, limits = self._draft, self._limits
        chars = 0
        for num_lines, record in enumerate(records, start=1):
            if num_lines > limits.lines_left:
                draft.has_too_many = self._take(waiting)
                return draft
            waiting.append(self._prepare(record))
            chars += waiting[-1].prompt.num_chars
            if num_lines == limits.window_lines:
                self._take(waiting)
                return draft
            if len(waiting) == _TOKENIZE_LINES or chars >= _TOKENIZE_CHARS:
                if not self._take(waiting):
                    return draft
                waiting.clear()
                chars = 0
        draft.is_last = self._take(waiting)
        return draft

    def _prepare(self, record: CheckedRecord) -> _Waiting:
        if record.problems and self._is_strict:
            self._is_failing = True
        if record.line is None or self._is_failing:
            return _Waiting(record)
        try:
            _refuse_flaw(record.line)
            call = self._parse(record.line.body)
            return _Waiting(record, *endpoints.prepare(call, self._text_model(record.line.model_id)))
        except RequestError as error:
            return _Waiting(record, error=error)
        except UnusableModelError as error:
            return _Waiting(error.on(record))

    def _take(self, waiting: list[_Waiting]) -> bool:
        """Adds lines to the window. False when it is full before the last of them."""
        draft = self._draft
        prompts = self._prompts(waiting)
        for item in waiting:
            if item.call is None or self._is_failing:
                self._reject(item.record, item.error)
            else:
                line_prompts = next(prompts[_model_of(item)])
                is_full = draft.input_tokens + sum(map(len, line_prompts)) > self._limits.window_tokens
                if is_full and draft.requests:
                    return False
                try:
                    self._accept(item, item.call, line_prompts)
                except RequestError as error:
                    self._reject(item.record, error)
            draft.line_nos.append(item.record.line_no)
            draft.custom_ids.append(item.record.custom_id)
            draft.next_offset = item.record.next_offset
            if item.record.note is not None and len(draft.notes) < self._limits.max_problems:
                draft.notes.append(item.record.note)
        if self._is_failing:
            draft.requests.clear()
            draft.chats.clear()
            draft.rejected.clear()
        return True

    def _prompts(self, waiting: list[_Waiting]) -> dict[str, Iterator[list[list[int]]]]:
        """The tokens of the lines that have a call, in order, by their models."""
        prompts: dict[str, list[LinePrompt]] = {}
        if not self._is_failing:
            for item in waiting:
                if item.call is not None:
                    prompts.setdefault(_model_of(item), []).append(item.prompt)
        return {model_id: tokenized(texts, self._text_model(model_id)) for model_id, texts in prompts.items()}

    def _accept(self, item: _Waiting, call: Call, prompts: list[list[int]]) -> None:
        record, model_id = item.record, _model_of(item)
        fitting = Fitting(meta=self._text_model(model_id).meta, default_max_tokens=self._limits.default_max_tokens)
        params = call.fit([len(prompt) for prompt in prompts], fitting)
        if self.more_params is not None and record.line is not None:
            params = {**params, **self.more_params(record.line.body)}
        prompt_ids = [token for prompt in prompts for token in prompt]
        self._draft.requests.append(
            PlannedRequest(
                line_no=record.line_no,
                custom_id=record.custom_id or "",
                model_id=model_id,
                prompt=np.array(prompt_ids, dtype=">u4").tobytes(),
                params=self._params.setdefault(compact_json(params), params),
                fold_key=fold_key(params),
            )
        )
        self._draft.input_tokens += len(prompt_ids)
        self._draft.num_prompts += len(prompts)
        if self._draft.input_tokens <= self._keeps_chats and call.messages is not None:
            self._draft.chats.append(call.messages)

    def _reject(self, record: CheckedRecord, error: RequestError | None) -> None:
        if record.problems and self._is_strict:
            self._draft.num_problems += len(record.problems)
            room = max(0, self._limits.max_problems - len(self._draft.problems))
            self._draft.problems += record.problems[:room]
        if self._is_failing:
            return
        cause = record.problems[0] if error is None else error
        row = error_row(
            batch_id=self._batch_id,
            line_no=record.line_no,
            custom_id=record.custom_id,
            code=cause.code,
            message=cause.message if isinstance(cause, Problem) else str(cause),
            param=cause.param,
            status=None if error is None else 400,
        )
        self._draft.rejected.append(PartLine(line_no=record.line_no, is_ok=False, row=row))


def _model_of(item: _Waiting) -> str:
    assert item.record.line is not None, "only a line has a call"
    return item.record.line.model_id


def _refuse_flaw(line: Line) -> None:
    """Raises RequestError for what no reader can hold, wherever in the body it stands."""
    if line.flaw is not None:
        raise RequestError(line.flaw.message, code="invalid_value", param=line.flaw.param)


def fold_key(params: dict[str, Any]) -> bytes | None:
    """Equal for requests that must give equal answers to one prompt; None for one that draws its own.

    Greedy requests don't draw, whatever their seed; others give equal answers only with equal explicit seeds.
    """
    if params.get("temperature", 0) == 0:
        params = {**params, "seed": None}
    elif params["seed"] is None:
        return None
    key = compact_json(params)
    return key if len(key) <= _LONGEST_KEY else hashlib.blake2b(key).digest()  # a schema may be long, lines are many
