"""Inputs 11, 12, 13 and 19: what is too long, too large, too deep or too much, and what is exactly enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.batchsvc.batches.planned import CONTEXT_TOKENS, jsonl, line
from tests.inputs.service import Service

EMBEDDINGS = "/v1/embeddings"
COMPLETIONS = "/v1/completions"


def asking(custom_id: str, url: str = EMBEDDINGS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def test_input_11_giant_lines_and_deep_ones(running: Service) -> None:
    """Refused before they are parsed, by line and with the limit; lines around them run. What it takes: test_bombs.py
    next to the readers, and row 68 of tests/faults/test_hostile_inputs.py."""
    giant = b'{"custom_id": "' + b"x" * 12_000_000 + b'"}\n'
    deep = b'{"custom_id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    key = b'{"' + b"k" * 10_000_000 + b'": 1}\n'
    ended = running.run(jsonl(line("a"), giant, deep, key, line("b")), on_invalid="skip")
    assert ended.codes == {2: "line_too_long", 3: "invalid_json_line", 4: "line_too_long"}
    limit = str(running.settings.max_line_bytes)
    assert all(limit in ended.errors[number]["error"]["message"] for number in (2, 4))
    assert list(ended.texts) == ["a", "b"]
    just_deep = line("c", metadata={"deep": json.loads("[" * 70 + "]" * 70)})
    assert running.refusal(jsonl(just_deep)) == [(1, "invalid_json_line", None)]


@pytest.mark.parametrize("most", [50, pytest.param(50_000, marks=pytest.mark.slow)])
def test_input_12_fifty_thousand_lines_and_one_more(service: Service, most: int) -> None:
    limited = service.with_settings(max_lines=most)
    fits = jsonl(*(asking(f"c{number}", input=[5]) for number in range(most)))
    batch = limited.accepted(fits, endpoint=EMBEDDINGS)
    assert batch["request_counts"]["total"] == most
    over = limited.refusal(fits + jsonl(asking("more", input=[5])), endpoint=EMBEDDINGS)
    assert over == [(None, "too_many_tasks", "input_file_id")]


@pytest.mark.parametrize("most", [2_000_000, pytest.param(200_000_000, marks=pytest.mark.slow)])
def test_input_12_two_hundred_megabytes_and_one_byte(service: Service, most: int) -> None:
    limited = service.with_settings(max_input_bytes=most)

    def upload(size: int) -> Any:
        """A form that comes in pieces, as the official client sends it: nothing says how long it will be."""
        head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        head += b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'

        def pieces() -> Iterator[bytes]:
            yield head
            for at in range(0, size, 8_000_000):
                yield b"\n" * min(8_000_000, size - at)
            yield b"\r\n--x--\r\n"

        return limited.client.post(
            "/v1/files", content=pieces(), headers={"Content-Type": "multipart/form-data; boundary=x"}
        )

    fits = upload(most)
    assert (fits.status_code, fits.json()["bytes"]) == (200, most)
    assert limited.client.delete(f"/v1/files/{fits.json()['id']}").status_code == 200
    over = upload(most + 1)
    assert over.status_code == 413
    assert str(most) in over.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"", b"\n", b"\n \r\n\t\n", b"\xef\xbb\xbf"])
def test_input_12_files_without_lines(service: Service, data: bytes) -> None:
    assert service.refusal(data) == [(None, "empty_file", "input_file_id")]


def test_input_13_inputs_of_embeddings(running: Service) -> None:
    """Ids are counted as the tokens that they are."""
    data = jsonl(
        asking("most", input=[[5, 6]] * 2_048),
        asking("over", input=[[5]] * 2_049),
        asking("texts", input=["Where is my parcel?", "a"]),
        asking("ids", input=[5, 6, 7]),
        asking("empty", input=""),
        asking("one empty", input=["a", ""]),
        asking("none", input=[]),
        asking("unknown", input=[999_999]),
        asking("long", input=[5] * (CONTEXT_TOKENS + 1)),
    )
    ended = running.run(data, endpoint=EMBEDDINGS)
    assert {row["custom_id"] for row in ended.output.values()} == {"most", "texts", "ids"}
    assert ended.answers[1]["usage"]["prompt_tokens"] == 4_096
    assert ended.answers[4]["usage"]["prompt_tokens"] == 3
    assert [len(ended.answers[number]["data"]) for number in (1, 3, 4)] == [2_048, 2, 1]
    assert {number: param for number, (_, param) in ended.refusals.items()} == {
        2: "input",
        5: "input",
        6: "input[1]",
        7: "input",
        8: "input",
        9: "input",
    }
    assert ended.refusals[9] == ("context_length_exceeded", "input")


@pytest.mark.parametrize("most", [500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_input_13_fifty_thousand_inputs_and_one_more(service: Service, most: int) -> None:
    """Over all lines and windows of a file."""
    limited = service.with_settings(max_inputs=most, window_lines=10)
    lines = [asking(f"c{number}", input=[[5]] * (most // 25)) for number in range(25)]
    assert limited.accepted(jsonl(*lines), endpoint=EMBEDDINGS)["request_counts"]["total"] == 25
    over = jsonl(*lines, asking("more", input=[5]))
    assert limited.refusal(over, endpoint=EMBEDDINGS) == [(None, "too_many_inputs", "input_file_id")]
    quote = limited.door.quote(over, endpoint=EMBEDDINGS)
    assert (quote["status"], quote["errors"]["data"][0]["code"]) == ("failed", "too_many_inputs")


def test_input_19_prompts_at_the_end_of_the_context(running: Service) -> None:
    """What doesn't fit is refused alone; what fits exactly runs."""
    ids, most = [5, 6, 7, 8], CONTEXT_TOKENS
    data = jsonl(
        asking("fits", COMPLETIONS, prompt=ids * (most // 4 - 1) + [5, 6, 7], max_tokens=1),
        asking("full", COMPLETIONS, prompt=ids * (most // 4), max_tokens=1),
        asking("answer", COMPLETIONS, prompt=ids, max_tokens=most - 3),
        asking("all", COMPLETIONS, prompt=ids, max_tokens=most - 4, ignore_eos=True),
        asking("rest", COMPLETIONS, prompt=ids * (most // 4 - 1) + [5, 6]),
    )
    ended = running.run(data, endpoint=COMPLETIONS)
    assert ended.refusals == dict.fromkeys((2, 3), ("context_length_exceeded", "prompt"))
    usage = {number: body["usage"] for number, body in ended.answers.items()}
    assert (usage[1]["prompt_tokens"], usage[1]["completion_tokens"]) == (most - 1, 1)
    assert usage[4]["completion_tokens"] == most - 4
    assert usage[5]["completion_tokens"] <= 2, "max_tokens that isn't given is what is left"
    assert running.run(jsonl(line("long", "parcel " * most), line("short"))).refusals == {
        1: ("context_length_exceeded", "messages")
    }
