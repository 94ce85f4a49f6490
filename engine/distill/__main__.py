"""`python -m engine.distill TEACHER TARGET`: trains a student; a JSON line a step, the last one says what came of it.

SIGINT and SIGTERM end a run behind the step that it is at, with a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from engine.distill.errors import StoppedError
from engine.distill.heads import HeadsRun
from engine.distill.options import DIRECTIONS, HEADS_PREFIX, METHODS, PRECISIONS, Options
from engine.distill.run import Run
from engine.errors import EngineError


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = _parser().parse_args(argv)
    stops: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    try:
        options = Options(**(vars(args) | {"results": tuple(args.results)}))
        kind = HeadsRun if options.student.startswith(HEADS_PREFIX) else Run
        _tell(kind(options, _tell, lambda: bool(stops)).run())
    except StoppedError as error:
        _tell({"stopped": str(error)})
        return 130
    except EngineError as error:
        _tell({"error": str(error)})
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.distill", description="Train a student of a model.")
    parser.add_argument("teacher", help="name, path or hf:owner/name")
    parser.add_argument("target", type=Path, help="the directory to make")
    parser.add_argument("--student", required=True, help="layers:N, heads:N, or the path of a config.json")
    parser.add_argument("--data", type=Path, required=True, help="JSONL of batch lines")
    parser.add_argument("--results", type=Path, action="append", default=[], help="JSONL of their results")
    parser.add_argument("--method", default="both", choices=METHODS)
    parser.add_argument("--kl", default="forward", choices=DIRECTIONS)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top", type=int, default=32, help="likeliest tokens kept of each place")
    parser.add_argument("--tail", type=int, default=16, help="tokens drawn from the others")
    parser.add_argument("--draft-vocab", type=int, help="tokens that it scores as a draft")
    parser.add_argument("--embeddings", action="store_true", help="also train the embedding and the head")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pack-tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--holdout", type=float, default=0.1, help="share of the lines that it never sees")
    parser.add_argument("--samples", type=int, default=0, help="further answers of the teacher to each line")
    parser.add_argument("--lines", type=int, default=10_000, help="most lines that are read")
    parser.add_argument("--eval-lines", type=int, default=32, help="most held-out lines that it is measured on")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS)
    parser.add_argument("--checkpoint-steps", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--batch", help="the batch that the data came from")
    parser.add_argument("--project", help="the project that the data belongs to")
    parser.add_argument("--licence", help="what the teacher comes under")
    return parser


def _tell(value: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # who listened is gone; what is done so far is kept all the same
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
