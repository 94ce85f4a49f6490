"""What the first request of a file says of it, whatever the file is packed in; a contradiction is told, not guessed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.input_file import InputOptions, endpoint_of, first_request, model_to_serve
from batchsvc.cli.target import Target

REQUEST = {"custom_id": "1", "url": "/v1/embeddings", "body": {"model": "m"}}
LINES = json.dumps(REQUEST).encode() + b"\n" + b'{"more": 1}\n' * 1000


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\r\n \n"])
def test_the_first_request_is_found_in_any_packing(tmp_path: Path, pack: object, before: bytes) -> None:
    assert callable(pack)
    path = tmp_path / "anything"
    path.write_bytes(pack(before + LINES))
    assert first_request(path) == REQUEST
    assert endpoint_of(path) == endpoint_of(path, "/v1/embeddings") == "/v1/embeddings"
    with pytest.raises(CommandError, match=r"the first line of .* for /v1/embeddings") as refused:
        endpoint_of(path, "/v1/responses")
    assert refused.value.code == Exit.USAGE


@pytest.mark.parametrize(
    "data",
    [
        b"PAR1" + b"\0" * 50,
        b"custom_id,body\n1,{}\n",
        b"\x1f\x8bnothing",
        b"\x28\xb5\x2f\xfdnothing",
        b"[1]\n",
        b'{"url": 5}\n',
        b'{"url": "/v1/images"}\n',
        b"{broken\n",
        gzip.compress(LINES, mtime=0)[:15],
    ],
)
def test_without_one_it_is_a_chat_unless_told(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "anything"
    path.write_bytes(data)
    assert endpoint_of(path) == "/v1/chat/completions"
    if b"images" not in data:
        assert endpoint_of(path, "/v1/embeddings") == "/v1/embeddings"
    assert model_to_serve(Target(url="http://x", api_key="k"), path) is None


def test_one_input_is_named_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(LINES)
    assert InputOptions(file=path).chosen() == InputOptions(input_file=path).chosen() == path
    (tmp_path / "empty").touch()
    for options, says in (
        (InputOptions(), "Name one input"),
        (InputOptions(file=path, input_file=path), "Name one input"),
        (InputOptions(file=tmp_path), "is a directory"),
        (InputOptions(file=tmp_path / "nope"), "There is no file"),
        (InputOptions(file=tmp_path / "empty"), "is empty"),
    ):
        with pytest.raises(CommandError, match=says):
            options.chosen()
