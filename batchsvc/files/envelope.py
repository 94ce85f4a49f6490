"""The envelope of a request: custom_id, method, url, the presence of a body, and one model a file.

`EnvelopeCheck` sees the records of a file in order and says of each what is wrong with it: everything, not only the
first thing. It remembers the custom_ids as 16-byte digests, so that a million of them fit in little memory, and the
model that the first good line named. It doesn't look into the body beyond `model`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchsvc.files.lines import Flaw, Problem, Record, has_half, json_type, shown

MAX_CUSTOM_ID_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A request whose envelope is right. `flaw`: what of its body can't be read, so that it can't be run."""

    line_no: int
    custom_id: str
    body: dict[str, Any]
    model_id: str = ""
    flaw: Flaw | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRecord:
    """A record after the check: a `line`, or the `problems` that it has. `custom_id` is null where it can't be read;
    `note` is the record's."""

    line_no: int
    next_offset: int
    custom_id: str | None
    line: Line | None = None
    problems: list[Problem] = field(default_factory=list)
    note: Problem | None = None


class SeenIds:
    """Which line used a custom_id first, over all windows of a file."""

    def __init__(self) -> None:
        self._current: dict[bytes, int] = {}
        self._high = np.empty(0, dtype=np.uint64)  # sorted; finished windows
        self._low = np.empty(0, dtype=np.uint64)
        self._lines = np.empty(0, dtype=np.int64)
        self._sorted = self._high.data  # the same, for one look-up at a time

    def add_finished(self, line_nos: Sequence[int], custom_ids: Sequence[str | None]) -> None:
        """Adds a finished window. Windows come in the order of their lines."""
        used = [(line, _digest(text)) for line, text in zip(line_nos, custom_ids, strict=True) if text is not None]
        halves = np.frombuffer(b"".join(digest for _, digest in used), dtype=">u8").reshape(-1, 2)
        high = np.concatenate([self._high, halves[:, 0].astype(np.uint64)])
        low = np.concatenate([self._low, halves[:, 1].astype(np.uint64)])
        lines = np.concatenate([self._lines, np.fromiter((line for line, _ in used), np.int64, len(used))])
        order = np.argsort(high, kind="stable")
        self._high, self._low, self._lines = high[order], low[order], lines[order]
        self._sorted = self._high.data

    def finished(self) -> SeenIds:
        """The finished windows alone, to begin another one after them."""
        other = SeenIds()
        other._high, other._low, other._lines, other._sorted = self._high, self._low, self._lines, self._sorted
        return other

    def first_use(self, custom_id: str, line_no: int) -> int | None:
        """The line that used `custom_id` before, or None, and then it is remembered for `line_no`."""
        digest = _digest(custom_id)
        before = self._current.get(digest) or self._finished(digest)
        if before is None:
            self._current[digest] = line_no
        return before

    def _finished(self, digest: bytes) -> int | None:
        high, low = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
        at = bisect_left(self._sorted, high)
        while at < len(self._sorted) and self._sorted[at] == high:
            if int(self._low[at]) == low:
                return int(self._lines[at])
            at += 1
        return None


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


class EnvelopeCheck:
    """Checks records in file order. `resolve` gives the id of the model behind a name, or None.

    `model_id` is the model that earlier lines have settled; with `is_model_given` the batch itself names the model
    and the lines' own are not looked at; with `is_by_line` each line has its own, and none is settled.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        resolve: Callable[[str], str | None],
        seen: SeenIds,
        model_id: str | None = None,
        is_model_given: bool = False,
        is_by_line: bool = False,
    ) -> None:
        self.model_id = model_id
        self._endpoint = endpoint
        self._resolve = resolve
        self._seen = seen
        self._is_model_given = is_model_given
        self._is_by_line = is_by_line

    def check_all(self, records: Iterable[Record]) -> Iterable[CheckedRecord]:
        return map(self.check, records)

    def check(self, record: Record) -> CheckedRecord:
        """The line of a record, or everything that is wrong with it."""
        line_no, next_offset, note = record.line_no, record.next_offset, record.note
        if record.problem is not None:
            return CheckedRecord(
                line_no=line_no, next_offset=next_offset, custom_id=None, problems=[record.problem], note=note
            )
        problems: list[Problem] = []

        def add(code: str, param: str, message: str) -> None:
            problems.append(Problem(line=line_no, code=code, param=param, message=message))

        value = record.value
        custom_id = self._custom_id(value, line_no, add)
        if custom_id is not None and record.flaw is not None and has_half(custom_id):
            add("invalid_value", "custom_id", "custom_id must not contain half a surrogate pair.")
            custom_id = None
        self._method_and_url(value, add)
        body, model_id = value.get("body"), None
        if "body" not in value:
            add("missing_required_parameter", "body", "The line has no body.")
        elif not isinstance(body, dict):
            add("invalid_type", "body", f"body must be a JSON object, not {json_type(body)}.")
        else:
            model_id = self._model(body, add, can_settle=not problems)
        if problems or custom_id is None or not isinstance(body, dict):
            return CheckedRecord(
                line_no=line_no, next_offset=next_offset, custom_id=custom_id, problems=problems, note=note
            )
        flaw = record.flaw and record.flaw._replace(path=record.flaw.path.removeprefix("body."))
        line = Line(line_no=line_no, custom_id=custom_id, body=body, model_id=model_id or "", flaw=flaw)
        return CheckedRecord(line_no=line_no, next_offset=next_offset, custom_id=custom_id, line=line, note=note)

    def _custom_id(self, value: dict[str, Any], line_no: int, add: Callable[[str, str, str], None]) -> str | None:
        custom_id = value.get("custom_id")
        if "custom_id" not in value:
            add("missing_required_parameter", "custom_id", "The line has no custom_id.")
            return None
        if not isinstance(custom_id, str):
            add("invalid_type", "custom_id", f"custom_id must be a string, not {json_type(custom_id)}.")
            return None
        if not custom_id:
            add("invalid_value", "custom_id", "custom_id must not be empty.")
            return None
        if len(custom_id) > MAX_CUSTOM_ID_CHARS:
            add(
                "invalid_value",
                "custom_id",
                f"custom_id has {len(custom_id)} characters; at most {MAX_CUSTOM_ID_CHARS} are allowed.",
            )
            return None
        if "\x00" in custom_id or not _is_text(custom_id):
            add("invalid_value", "custom_id", "custom_id must not contain NUL or half a surrogate pair.")
            return None
        before = self._seen.first_use(custom_id, line_no)
        if before is not None:
            add(
                "duplicate_custom_id",
                "custom_id",
                f"custom_id {shown(custom_id)} of line {line_no} was used by line {before} before.",
            )
        return custom_id

    def _method_and_url(self, value: dict[str, Any], add: Callable[[str, str, str], None]) -> None:
        method, url = value.get("method"), value.get("url")
        if "method" not in value:
            add("missing_required_parameter", "method", 'The line has no method; it must be "POST".')
        elif method != "POST":
            add("invalid_method", "method", f'method must be exactly "POST", not {shown(method)}.')
        if "url" not in value:
            add("missing_required_parameter", "url", f'The line has no url; it must be "{self._endpoint}".')
        elif url != self._endpoint:
            add("url_mismatch", "url", f'url must be the endpoint of the batch, "{self._endpoint}", not {shown(url)}.')

    def _model(self, body: dict[str, Any], add: Callable[[str, str, str], None], *, can_settle: bool) -> str | None:
        """The model that a line runs on."""
        if self._is_model_given:
            return self.model_id
        model_id: str | None = None
        name = body.get("model")
        if name is None:
            add("missing_required_parameter", "body.model", "The body names no model.")
        elif not isinstance(name, str):
            add("invalid_type", "body.model", f"model must be a string, not {json_type(name)}.")
        elif (model_id := self._resolve(name)) is None:
            add(
                "model_not_found",
                "body.model",
                f"The model {shown(name)} does not exist here: name one of /v1/models, or set an alias.",
            )
        elif self._is_by_line:
            pass
        elif self.model_id is None:
            self.model_id = model_id if can_settle else None
        elif model_id != self.model_id:
            add(
                "model_mismatch",
                "body.model",
                f"The line names the model {shown(name)}, but earlier lines settled on {shown(self.model_id)}: "
                'one file is one model, unless its batch says models: "by_line".',
            )
        return model_id


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
