"""The part file: finished lines with their numbers, tokens and costs; and the builders of output and error lines.

A part is JSONL, compressed with zstd. Its lines carry the finished line of the result file verbatim, so merging
parts never formats anything again and a bill can be added up from the objects alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
import zstandard

from batchsvc.json_bytes import one_line_json

_ROW = b',"row":'
_HEAD = re.compile(
    rb'\{"line":(\d+),"ok":(true|false),[^{]*,"row":'
)  # no number holds a brace, the row begins with one


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLine:
    """One finished line. `row` is the line of the output (`is_ok`) or error file, without newline."""

    line_no: int
    is_ok: bool
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nanos: int = 0
    standard_nanos: int = 0
    steps: int = 0  # of the engine that it took part in; 0: not known
    row: bytes


class PartRows(NamedTuple):
    """Rows of result files by their places in one text: row i is `text[starts[i]:ends[i]]`."""

    text: bytes
    line_nos: np.ndarray[Any, np.dtype[np.int64]]
    is_ok: np.ndarray[Any, np.dtype[np.bool_]]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    ends: np.ndarray[Any, np.dtype[np.int64]]


def encode(lines: Iterable[PartLine]) -> bytes:
    """The object of a part."""
    out = bytearray()
    for line in lines:
        head = orjson.dumps(
            {
                "line": line.line_no,
                "ok": line.is_ok,
                "input_tokens": line.input_tokens,
                "cached_tokens": line.cached_tokens,
                "output_tokens": line.output_tokens,
                "cost_nanos": line.cost_nanos,
                "standard_nanos": line.standard_nanos,
                "steps": line.steps,
            }
        )
        assert b"\n" not in line.row, "a row of a part is one line"
        out += head[:-1] + _ROW + line.row + b"}\n"
    return zstandard.ZstdCompressor(level=3).compress(bytes(out))


def decode(data: bytes) -> list[PartLine]:
    """What `encode` was given."""
    return [_decode_line(line) for line in _text(data).split(b"\n") if line]


def rows(data: bytes) -> PartRows:
    """The rows of a part without taking them apart: what merging needs, an order of magnitude faster than `decode`."""
    text = _text(data)
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n")).astype(np.int64)
    line_nos, oks, starts = [], [], []
    start = 0
    for end in ends.tolist():
        head = _HEAD.match(text, start, end)
        if head is None:
            raise ValueError("The object isn't a part.")
        line_nos.append(int(head[1]))
        oks.append(head[2] == b"true")
        starts.append(head.end())
        start = end + 1
    places = (np.array(line_nos, np.int64), np.array(oks, np.bool_), np.array(starts, np.int64), ends - 1)
    return PartRows(text, *places)


def error_rows(line_nos: Sequence[int], rows: Sequence[bytes]) -> PartRows:
    """Rows of the error file that are in no part."""
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    ends = np.cumsum(sizes)
    return PartRows(b"".join(rows), np.array(line_nos, np.int64), np.zeros(len(rows), np.bool_), ends - sizes, ends)


def _text(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)  # `encode` has noted the size in the frame


def _decode_line(line: bytes) -> PartLine:
    # the head holds numbers only, so the first mark is ours and the row stays byte for byte as it was
    end = line.index(_ROW)
    head = orjson.loads(line[:end] + b"}")
    return PartLine(
        line_no=head["line"],
        is_ok=head["ok"],
        input_tokens=head["input_tokens"],
        cached_tokens=head["cached_tokens"],
        output_tokens=head["output_tokens"],
        cost_nanos=head["cost_nanos"],
        standard_nanos=head["standard_nanos"],
        steps=head.get("steps", 0),  # older parts have none
        row=line[end + len(_ROW) : -1],
    )


def success_row(
    *,
    batch_id: str,
    line_no: int,
    custom_id: str,
    model: str,
    created_s: int,
    text: str = "",
    finish_reason: str = "stop",
    choices: list[dict[str, Any]] | None = None,
    system_fingerprint: str | None = None,
    service_tier: str | None = None,
    warnings: Sequence[Mapping[str, str]] = (),
    prompt_tokens: int,
    cached_tokens: int,
    completion_tokens: int,
    cost_nanos: int,
) -> bytes:
    """A line of the output file. `created_s` is the batch's creation time, so that a rerun gives the same bytes;
    `choices` are the answers where they aren't just one text."""
    answer = {"role": "assistant", "content": text, "refusal": None}
    ident = line_ident(batch_id, line_no)
    body = chat_body(
        ident=ident,
        model=model,
        created_s=created_s,
        choices=choices or [{"index": 0, "message": answer, "logprobs": None, "finish_reason": finish_reason}],
        system_fingerprint=system_fingerprint,
        service_tier=service_tier,
        usage=chat_usage(prompt_tokens, cached_tokens, completion_tokens, cost_nanos),
    )
    response = {"status_code": 200, "request_id": f"req_{ident}", "body": body}
    return _row(ident, custom_id, response, None, line_no, warnings)


def chat_body(
    *,
    ident: str,
    model: str,
    created_s: int,
    choices: list[dict[str, Any]],
    system_fingerprint: str | None,
    service_tier: str | None,
    usage: dict[str, Any],
) -> dict[str, Any]:
    """The body of a chat completion."""
    body = {
        "id": f"chatcmpl-{ident}",
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": choices,
        "usage": usage,
        "system_fingerprint": system_fingerprint,
    }
    return body if service_tier is None else body | {"service_tier": service_tier}


def chat_usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int, cost_nanos: int) -> dict[str, Any]:
    """The usage of a chat or text completion."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cost_nanos": cost_nanos,
    }


def answer_row(
    *,
    batch_id: str,
    line_no: int,
    custom_id: str,
    body: dict[str, Any],
    warnings: Sequence[Mapping[str, str]] = (),
) -> bytes:
    """A line of the output file whose body another endpoint shapes; arrays of numbers in it may be numpy's."""
    ident = line_ident(batch_id, line_no)
    response = {"status_code": 200, "request_id": f"req_{ident}", "body": body}
    return _row(ident, custom_id, response, None, line_no, warnings)


def error_row(
    *,
    batch_id: str,
    line_no: int,
    custom_id: str | None,
    code: str,
    message: str,
    param: str | None = None,
    status: int | None = None,
) -> bytes:
    """A line of the error file: with `status` a request that was rejected, without one a line that never ran."""
    ident = line_ident(batch_id, line_no)
    if status is None:
        error = {"code": code, "message": message} | ({"param": param} if param is not None else {})
        return _row(ident, custom_id, None, error, line_no)
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    response = {"status_code": status, "request_id": f"req_{ident}", "body": body}
    return _row(ident, custom_id, response, None, line_no)


def usage_of(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Input, cached and output tokens of the usage of any endpoint's answer."""
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, usage.get("completion_tokens", 0)


def line_ident(batch_id: str, line_no: int) -> str:
    """Part of all ids of a line's result, and the same whenever it is made."""
    return hashlib.blake2b(f"{batch_id}:{line_no}:id".encode(), digest_size=12).hexdigest()


def _row(
    ident: str,
    custom_id: str | None,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
    line_no: int,
    warnings: Sequence[Mapping[str, str]] = (),
) -> bytes:
    whole: dict[str, Any] = {"id": f"batch_req_{ident}", "custom_id": custom_id, "response": response}
    whole |= {"error": error, "line": line_no} | ({"warnings": warnings} if warnings else {})
    return one_line_json(whole, orjson.OPT_SERIALIZE_NUMPY)
