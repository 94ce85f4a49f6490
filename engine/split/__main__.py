"""`python -m engine.split`: the two sides as processes, without a service: to measure, and to see that it works.

    python -m engine.split prefill --model PATH --listen gloo://127.0.0.1:4100
    python -m engine.split decode --model PATH --peer gloo://127.0.0.1:4100 --workload FILE.jsonl --json

The prefill side serves until it is ended. The decode side runs a workload (engine/bench.py) and prints one JSON line;
without --peer it is one engine that does both, to compare with. With --answers each answer is appended to a file as
soon as it is complete, and what the file has already isn't run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.bench import planned_rows
from engine.config import KV_FORMATS, WEIGHT_FORMATS, EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, PeerError
from engine.load.fetch import locate
from engine.request import Completion, Request
from engine.split.decode import PATIENCE_S, DecodeSide, most_bytes
from engine.split.link import SILENCE_S
from engine.split.peers import Peers
from engine.split.prefill import PrefillSide
from engine.split.signed import LEAST_BYTES, NO_KEY, SplitKey
from engine.split.wires import listen
from engine.text import load_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one side. What can't be is said in one sentence, with exit code 2."""
    options = _parser().parse_args(arguments)
    try:
        if options.role == "prefill":
            _serve(options)
        else:
            _decode(options)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _serve(options: argparse.Namespace) -> None:
    engine = _engine(options)
    key = _key(options.key_file)
    listener = listen(options.listen, key=key, silence_s=options.silence)
    side = PrefillSide(engine, listener, step_tokens=options.step_tokens, key=key, silence_s=options.silence)
    sys.stdout.write(json.dumps({"listening": listener.address}) + "\n")
    sys.stdout.flush()
    while True:
        side.step()


def _decode(options: argparse.Namespace) -> None:
    engine, began_s = _engine(options), time.perf_counter()
    rows, repeats = planned_rows(load_text(options.model), options.workload, options.limit)
    answers = Answers(options.answers)
    missing = [row for row in rows if row.id not in answers.found]
    side: Engine | DecodeSide = engine
    if options.peer:
        wake = threading.Event()
        peers = Peers(
            lambda: options.peer,
            wake,
            most_bytes=most_bytes(engine),
            key=_key(options.key_file),
            silence_s=options.silence,
        )
        side = DecodeSide(engine, peers, wake, patience_s=options.patience)
    for completion in _run(side, missing):
        answers.add(completion)
    wall_s = time.perf_counter() - began_s
    report: dict[str, Any] = {
        "requests": sum(repeats),
        "wall_s": round(wall_s, 3),
        "steps": engine.stats().steps,
        "computed_tokens": engine.stats().computed_tokens,
        "output_tokens": sum(len(tokens) for tokens in answers.found.values()),
        "answers_digest": answers.digest(),
    }
    if isinstance(side, DecodeSide):
        report |= {"block_bytes": engine.passing().block_bytes, **asdict(side.split)}
    side.close()
    answers.close()
    sys.stdout.write(json.dumps(report) + "\n")


def _run(side: Engine | DecodeSide, requests: Sequence[Request]) -> Iterator[Completion]:
    for request in requests:
        side.add(request)
    told: str | None = None
    while side.has_work():
        yield from side.step().completions
        note = side.note() if isinstance(side, DecodeSide) else None
        if note is not None and note != told:
            sys.stderr.write(f"{note}\n")
        told = note


class Answers:
    """Answers by request, and in a file, whole lines of which count whenever their writer was killed."""

    def __init__(self, path: Path | None) -> None:
        self.found: dict[str, list[int]] = {}
        self._file: int | None = None
        if path is None:
            return
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        written = path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        os.ftruncate(self._file, len(whole))
        os.lseek(self._file, len(whole), os.SEEK_SET)
        for line in whole.splitlines():
            entry = json.loads(line)
            self.found[entry["id"]] = entry["token_ids"]

    def add(self, completion: Completion) -> None:
        self.found[completion.request_id] = list(completion.token_ids)
        if self._file is not None:
            entry = {"id": completion.request_id, "token_ids": completion.token_ids}
            os.write(self._file, json.dumps(entry).encode() + b"\n")

    def digest(self) -> str:
        """Equal where all answers are."""
        return hashlib.sha256(json.dumps(sorted(self.found.items())).encode()).hexdigest()[:16]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _engine(options: argparse.Namespace) -> Engine:
    options.model = str(locate(options.model))
    config = EngineConfig(
        model=options.model,
        weight_format=options.quant,
        kv_format=options.kv,
        num_blocks=options.num_blocks,
        step_tokens=options.step_tokens,
        max_running=options.max_running,
        threads=options.threads,
        reproducible=options.reproducible,
    )
    return Engine(config, text=load_text(config.model), say=lambda sentence: None)


def _key(path: Path | None) -> SplitKey:
    """Raises PeerError for a file that can't be read, or is too short."""
    if path is None:
        return NO_KEY
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise PeerError(f"--key-file {path} can't be read: {error.strerror or error}.") from error
    if len(secret) < LEAST_BYTES:
        raise PeerError(
            f"--key-file {path} has less than {LEAST_BYTES} characters: `openssl rand -hex 32` makes a key."
        )
    return SplitKey(secret)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.split", description="Prefill and decode as processes.")
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--model", default="smollm2-135m", help="name, path or hf:owner/name")
    parser.add_argument("--listen", default="gloo://127.0.0.1:0", help="address of a prefill side (port 0: a free one)")
    parser.add_argument("--peer", action="append", default=[], help="address of a prefill side, for a decode side")
    parser.add_argument("--key-file", type=Path, help="file of the key that both sides share, beyond this host")
    parser.add_argument("--workload", type=Path, help="JSONL file of chat completion batch lines, for a decode side")
    parser.add_argument("--limit", type=int, help="run only the first N lines")
    parser.add_argument("--answers", type=Path, help="append answers to this file; those in it aren't run again")
    parser.add_argument("--quant", default="int8", choices=WEIGHT_FORMATS, help="weight format")
    parser.add_argument("--kv", default="bf16", choices=KV_FORMATS, help="KV format")
    parser.add_argument("--num-blocks", type=int, help="blocks of the KV pool (default: a share of free memory)")
    parser.add_argument("--step-tokens", type=int, default=2048, help="most tokens computed in one step")
    parser.add_argument("--max-running", type=int, default=256, help="most sequences that decode in one step")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--reproducible", action="store_true", help="the same tokens bit for bit in any company")
    parser.add_argument("--silence", type=float, default=SILENCE_S, help="seconds until a silent peer counts as lost")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds until a decode side that is alone computes prompts"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
