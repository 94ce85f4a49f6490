"""Sides as real processes, forked from a server that has torch loaded, so that a hundred kills don't take an hour."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

from engine.split.__main__ import main

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["pytest", "tests.engine.split.processes"])
TEXT = "the parcel was late and the customer asks for a refund please answer in one short sentence order shipped"
WORDS = TEXT.split()
STEMS = (
    "You are a helpful assistant that reads tickets and is kind. " * 2,
    "Say what is wrong with the delivery. " * 3,
)
ENGINE = (
    "--quant",
    "int8",
    "--num-blocks",
    "300",
    "--threads",
    "1",
    "--reproducible",
    "--silence",
    "5",
    "--patience",
    "600",
)


def write_workload(path: Path, lines: int, *, max_tokens: int, seed: int = 0) -> Path:
    """Chats with shared system prompts, greedy and drawn, none of which ends by itself."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(lines):
            content = " ".join(rng.choices(WORDS, k=rng.randint(3, 12)))
            messages = [{"role": "system", "content": STEMS[number % 2]}, {"role": "user", "content": content}]
            body = {"messages": messages, "max_tokens": max_tokens, "temperature": number % 2, "ignore_eos": True}
            file.write(json.dumps({"body": body, "custom_id": str(number)}) + "\n")
    return path


def free_address(kind: str, folder: Path) -> str:
    if kind == "shm":
        return f"shm://{folder}/prefill.sock"
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"gloo://127.0.0.1:{server.getsockname()[1]}"


def run_side(arguments: tuple[str, ...], log: str) -> None:
    """What a forked process does."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(sink, stream)
    raise SystemExit(main(arguments))


class Sides:
    """A prefill and a decode process of one model. Each has a log in `folder`."""

    def __init__(self, folder: Path, model: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self._model = ("--model", str(model))
        self._key: tuple[str, ...] = ()

    def share_key(self) -> None:
        """From now on the sides know each other by a key, as on different hosts."""
        path = self.folder / "key"
        path.write_text("0123456789abcdef" * 2 + "\n")
        self._key = ("--key-file", str(path))

    def prefill(self) -> BaseProcess:
        return self._start("prefill", "--listen", self.address)

    def decode(self, workload: Path, answers: Path, *, is_alone: bool = False) -> BaseProcess:
        peer = () if is_alone else ("--peer", self.address)
        return self._start(
            "decode", *peer, "--workload", str(workload), "--answers", str(answers), "--max-running", "16"
        )

    def said(self, role: str) -> str:
        log = self.folder / f"{role}.log"
        return log.read_text() if log.exists() else ""

    def report(self) -> dict[str, object]:
        """The last thing that a decode process said."""
        found: dict[str, object] = json.loads(self.said("decode").splitlines()[-1])
        return found

    def _start(self, role: str, *options: str) -> BaseProcess:
        arguments = (role, *self._model, *self._key, *ENGINE, "--step-tokens", "128", *options)
        process = FORKING.Process(target=run_side, args=(arguments, str(self.folder / f"{role}.log")), daemon=True)
        process.start()
        return process


@contextlib.contextmanager
def ended_with(*processes: BaseProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            kill(process)


def kill(process: BaseProcess) -> bool:
    """Without a warning. False where it had ended by itself."""
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):  # it just did
            os.kill(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


def answers_in(path: Path) -> list[tuple[str, list[int]]]:
    """Whole lines alone count."""
    if not path.exists():
        return []
    written = path.read_bytes()
    lines = written[: written.rfind(b"\n") + 1].splitlines()
    return [(entry["id"], entry["token_ids"]) for entry in map(json.loads, lines)]


def until(is_so: Callable[[], bool], within_s: float, what: str) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)
