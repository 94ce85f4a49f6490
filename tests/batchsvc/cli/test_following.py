"""Following results into a file: it ends whole, whatever broke off, and goes on behind its last whole line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.cli import following
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit

ROWS = [json.dumps({"line": n, "cursor": f"k{n}", "pad": "x" * (n * 37 % 90)}).encode() + b"\n" for n in range(1, 21)]


class Server:
    """Answers with some of the rows behind the cursor; `breaks` are answers that break off, or interrupt us."""

    def __init__(self, sizes: list[int], breaks: dict[int, BaseException] | None = None) -> None:
        self.sizes, self.breaks, self.asked = sizes, breaks or {}, list[str | None]()

    @contextmanager
    def results(self, _batch_id: str, *, after: str | None, order: str) -> Iterator[tuple[str, Iterator[bytes]]]:
        assert order == "completion"
        at = int(after[1:]) if after else 0
        size = self.sizes.pop(0) if self.sizes else len(ROWS)
        number = len(self.asked)
        self.asked.append(after)

        def chunks() -> Iterator[bytes]:
            yield b"".join(ROWS[at : at + size])
            if number in self.breaks:
                yield ROWS[0][:9]  # the beginning of a line
                raise self.breaks[number]

        yield "completed", chunks()

    def batch(self, batch_id: str) -> dict[str, Any]:
        return {"id": batch_id, "status": "completed"}


def follow(server: Server, output: Path, after: str | None = None) -> None:
    console, check = Console(), lambda _: None
    client: Any = server
    following.follow_results(client, console, "batch_1", output, order="completion", after=after, check=check)


def test_a_broken_answer_is_gone_on_with(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    broken = CommandError("away", Exit.UNREACHABLE)
    server = Server([3, 4, 5], breaks={0: broken, 2: broken})
    follow(server, output)
    assert output.read_bytes() == b"".join(ROWS)
    assert server.asked == [None, "k3", "k7", "k12", "k20"]


def test_ctrl_c_and_the_same_command_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(CommandError) as stopped:
        follow(Server([6], breaks={0: KeyboardInterrupt()}), output)
    assert stopped.value.code == Exit.INTERRUPTED and "repeat the command" in stopped.value.message
    assert output.read_bytes() == b"".join(ROWS[:6])
    again = Server([])
    follow(again, output)
    assert again.asked[0] == "k6" and output.read_bytes() == b"".join(ROWS)
    follow(done := Server([]), output)
    assert done.asked == ["k20"] and output.read_bytes() == b"".join(ROWS), "nothing is written twice"


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for text in (b'{"line": 1}\n', b"hello\n", b"[]\n"):
        output.write_bytes(text)
        with pytest.raises(CommandError, match="don't come from --follow"):
            follow(Server([]), output)
        assert output.read_bytes() == text
    output.write_bytes(ROWS[0])
    with pytest.raises(CommandError, match="leave out --after"):
        follow(Server([]), output, after="k5")


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b" ")), max_size=6),
    torn=st.binary(max_size=20).map(lambda data: data.replace(b"\n", b" ")),
)
def test_the_last_whole_line_is_found(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], torn: bytes
) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    path = tmp_path_factory.mktemp("tail") / "f"
    path.write_bytes(whole + torn)
    with path.open("rb") as file:
        assert following.last_line(file) == (len(whole), lines[-1] if lines else b"")


def test_a_long_last_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "f"
    long = b"y" * 200_000
    path.write_bytes(b"first\n" + long + b"\ntorn" + b"z" * 100_000)
    with path.open("rb") as file:
        assert following.last_line(file) == (6 + len(long) + 1, long)
