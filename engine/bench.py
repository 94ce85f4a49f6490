"""`python -m engine.bench --workload FILE.jsonl --json`: how fast one engine runs a file of chat requests.

The last line on standard output is one JSON object; what is going on is told on standard error. The fields:

wall_s          from the first line read to the last completion: reading, rendering, tokenizing, planning, running
load_s          building the engine for the first time in this process; load_warm_s for the second time
prompt_tokens   of all lines; cached_tokens of these were not computed (found in the cache, or lines folded into one)
output_tokens   of all lines; output_tps is these over wall_s, total_tps prompt and output over wall_s
decode_tps      output tokens of the steps that computed nothing but decodes, over the time of those steps
mean_running    sequences a step
spec            what may propose tokens (engine/spec): drafted_tokens were computed on trial, accepted_tokens were
                right; accepted_per_verify is these over the windows that they came in, null without any
kl              of the weights' format against float32 on held-out text (engine/quality/); null where it isn't known;
                verdict on weights and KV: unquantized, within (their limits), unmeasured, or over (forced)
roofline_ratio  the least time that the arithmetic and the memory reads of this workload could take, over wall_s

The least time is the sum of two parts, with rates measured after the run in the same process:
1. every distinct prompt position (`trie_tokens`) and every output token through the layers, every output token through
   the head, at the rate of the fastest of the model's matrices with 2,048 rows (`matmul_tflops`);
2. the KV that decoding must read: each sequence its private suffix at each of its steps, and the positions that
   prompts share once in each of the fewest steps possible, at the best read rate (`read_gbps`).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.cache.pool import block_bytes
from engine.config import DEVICES, KV_FORMATS, SPEC_MODES, WEIGHT_FORMATS, EngineConfig
from engine.engine import Engine, EngineStats
from engine.errors import EngineError
from engine.load.fetch import locate
from engine.model.config import ModelConfig
from engine.quality.serving import resolve_formats
from engine.request import Completion, FinishReason, Request, SamplingParams
from engine.runner import ModelRunner
from engine.sched.order import common_prefix_tokens, plan_window
from engine.text import TextModel, load_text

RATE_ROWS = 2048
DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a workload asks for. Tokens are counted once where prompts share them."""

    trie_tokens: int
    shared_tokens: int
    private_reads: int
    output_tokens: int
    fewest_steps: int


def least_work(prompts: Sequence[bytes], outputs: Sequence[int], max_running: int) -> Work:
    """`prompts` as big-endian token bytes, each once, with the output tokens of each.

    `private_reads` is the number of positions that decoding reads outside of shared prefixes, over all its steps.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    lengths = [len(prompts[i]) // 4 for i in order]
    shared = [common_prefix_tokens(prompts[a], prompts[b]) for a, b in pairwise(order)]
    before, after = [0, *shared], [*shared, 0]
    trie = sum(length - lcp for length, lcp in zip(lengths, before, strict=True))
    private = [length - max(a, b) for length, a, b in zip(lengths, before, after, strict=True)]
    reads = sum(outputs[i] * own + outputs[i] * (outputs[i] - 1) // 2 for i, own in zip(order, private, strict=True))
    total = sum(outputs)
    steps = max(max(outputs, default=0), -(-total // max_running))
    return Work(trie, trie - sum(private), reads, total, steps)


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine reaches in the chosen format: operations a second, bytes read a second."""

    matmul_flops: float
    read_bytes: float


def measure_rates(runner: ModelRunner) -> Rates:
    """Best of several: the model's own matrices with RATE_ROWS rows; 256 MiB of memory, by summing it."""
    rates = []
    for matrix in runner.matrices:
        rows = runner.kernels.pack_rows(torch.randn(RATE_ROWS, matrix.num_columns, device=runner.device))
        seconds = _best_of(partial(runner.kernels.linear, rows, matrix))
        rates.append(2 * RATE_ROWS * matrix.num_rows * matrix.num_columns / seconds)
    big = torch.ones(64 << 20, device=runner.device)
    return Rates(max(rates), big.nbytes / _best_of(big.sum))


def least_seconds(work: Work, rates: Rates, model: ModelConfig, kv_format: str) -> float:
    """The least time the workload could take on a machine with these rates."""
    head = model.vocab_size * model.hidden
    layers = model.num_parameters - (1 if model.is_tied else 2) * head
    flops = 2 * layers * (work.trie_tokens + work.output_tokens) + 2 * head * work.output_tokens
    positions = work.private_reads + work.shared_tokens * work.fewest_steps
    return flops / rates.matmul_flops + positions * block_bytes(model, kv_format, 1) / rates.read_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the workload. `rows` are the requests that ran, `repeats` how many lines each answers."""

    wall_s: float
    rows: list[Request]
    repeats: list[int]
    completions: dict[str, Completion]
    decode_s: float
    decode_tokens: int

    def total(self, count: str) -> int:
        """Sum of a field of the completions' usage over all lines."""
        usages = [self.completions[row.id].usage for row in self.rows]
        return sum(times * int(getattr(usage, count)) for usage, times in zip(usages, self.repeats, strict=True))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens not computed: hits of the first line of a row, whole prompts of its further lines."""
        usages = [self.completions[row.id].usage for row in self.rows]
        return sum(u.hit_tokens + (n - 1) * u.prompt_tokens for u, n in zip(usages, self.repeats, strict=True))


def planned_rows(text: TextModel, path: Path, limit: int | None) -> tuple[list[Request], list[int]]:
    """Reads, tokenizes and plans the file: its requests in their order, and how many lines each answers."""
    with path.open(encoding="utf-8") as file:
        bodies = [json.loads(line)["body"] for line in file if line.strip()][:limit]
    prompts = text.encode_prompts([text.render(body["messages"]) for body in bodies])
    params = [_params(body, index) for index, body in enumerate(bodies)]
    plan = plan_window(
        [np.asarray(ids, dtype=">u4").tobytes() for ids in prompts],
        [repr(p).encode() if p.is_greedy or "seed" in body else None for p, body in zip(params, bodies, strict=True)],
        [p.max_tokens for p in params],
        unit_lines=1 << 30,
        unit_tokens=1 << 60,
    )
    firsts = [row.members[0] for row in plan.rows]
    rows = [Request(id=str(i), prompt_ids=prompts[i], params=params[i]) for i in firsts]
    return rows, [len(row.members) for row in plan.rows]


def run_workload(engine: Engine, text: TextModel, path: Path, limit: int | None) -> Run:
    """Reads, tokenizes, plans and runs the file. Raises EngineError when a line fails."""
    start = time.perf_counter()
    rows, repeats = planned_rows(text, path, limit)
    for row in rows:
        engine.add(row)
    completions: dict[str, Completion] = {}
    decode_s, decode_tokens = 0.0, 0
    while engine.has_work():
        began, settled = time.perf_counter(), _settled_tokens(engine.stats())
        output = engine.step()
        new_tokens = sum(map(len, output.new_tokens.values()))
        if _settled_tokens(engine.stats()) - settled == new_tokens:
            decode_s, decode_tokens = decode_s + time.perf_counter() - began, decode_tokens + new_tokens
        completions |= {completion.request_id: completion for completion in output.completions}
    wall_s = time.perf_counter() - start
    failed = [c for c in completions.values() if c.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)]
    if failed:
        raise EngineError(f"{len(failed)} of {len(rows)} requests failed; the first says: {failed[0].error_message}")
    return Run(wall_s, rows, repeats, completions, decode_s, decode_tokens)


def _settled_tokens(stats: EngineStats) -> int:
    """Computed tokens but for those of drafts that were wrong."""
    return stats.computed_tokens - stats.drafted_tokens + stats.accepted_tokens


def measure(config: EngineConfig, name: str, path: Path, limit: int | None) -> dict[str, Any]:
    """Runs the benchmark; the JSON object described above."""
    _say(f"Loading {name} in {config.weight_format}, KV in {config.kv_format}.")
    text = load_text(config.model)
    start = time.perf_counter()
    ModelRunner(config)
    load_s, start = time.perf_counter() - start, time.perf_counter()
    runner = ModelRunner(config, _say)
    engine = Engine(config, runner=runner, text=text)
    load_warm_s = time.perf_counter() - start
    _say(runner.memory.sentence)
    _say(f"Running {path.name}.")
    run = run_workload(engine, text, path, limit)
    peak_rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    stats = engine.stats()
    _say("Measuring the machine's rates.")
    rates = measure_rates(runner)
    outputs = [run.completions[row.id].usage.output_tokens for row in run.rows]
    prompts = [np.asarray(row.prompt_ids, dtype=">u4").tobytes() for row in run.rows]
    work = least_work(prompts, outputs, config.max_running)
    least_s = least_seconds(work, rates, runner.model_config, config.kv_format)
    prompt_tokens, output_tokens = run.total("prompt_tokens"), run.total("output_tokens")
    return {
        "model": name,
        "format": config.weight_format,
        "kv_format": config.kv_format,
        "workload": path.name,
        "wall_s": round(run.wall_s, 3),
        "load_s": round(load_s, 3),
        "load_warm_s": round(load_warm_s, 3),
        "requests": sum(run.repeats),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "output_tokens": output_tokens,
        "output_tps": round(output_tokens / run.wall_s, 1),
        "total_tps": round((prompt_tokens + output_tokens) / run.wall_s, 1),
        "decode_tps": round(run.decode_tokens / run.decode_s, 1) if run.decode_s else None,
        "peak_rss_mib": round(peak_rss_mib),
        "steps": stats.steps,
        "mean_running": round(stats.mean_running, 1),
        "preemptions": stats.preemptions,
        "spec": config.spec,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "accepted_per_verify": _ratio(stats.accepted_tokens, stats.verifications),
        "trie_tokens": work.trie_tokens,
        "matmul_tflops": round(rates.matmul_flops / 1e12, 3),
        "read_gbps": round(rates.read_bytes / 1e9, 1),
        "least_s": round(least_s, 3),
        "roofline_ratio": round(least_s / run.wall_s, 3),
        "device": runner.device.type,
        "threads": torch.get_num_threads(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench", description="Time one engine on a file of requests."
    )
    parser.add_argument("--workload", required=True, type=Path, help="JSONL file of chat completion batch lines")
    parser.add_argument("--model", default="smollm2-135m", help="name, path or hf:owner/name")
    parser.add_argument("--limit", type=int, help="run only the first N lines")
    parser.add_argument("--quant", default="auto", choices=("auto", *WEIGHT_FORMATS), help="weight format")
    parser.add_argument("--kv", default="auto", choices=("auto", *KV_FORMATS), help="KV format")
    parser.add_argument("--force-format", action="store_true", help="also run formats that are over their limits")
    parser.add_argument(
        "--reproducible",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the same tokens whatever else is in the batch (default: where that costs nothing)",
    )
    parser.add_argument("--draft", help="a smaller model of the same vocabulary that proposes tokens")
    parser.add_argument("--spec", default="auto", choices=SPEC_MODES, help="what may propose tokens")
    parser.add_argument("--max-running", type=int, default=256, help="most sequences at once (1: one stream)")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="where to run")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args(argv)
    try:
        path = str(locate(args.model, say=_say))
        formats, verdict = resolve_formats(path, args.quant, args.kv, _say, force=args.force_format)
        config = EngineConfig(
            model=path,
            weight_format=formats.weights,
            kv_format=formats.kv,
            device=args.device,
            threads=args.threads,
            reproducible=args.reproducible,
            spec=args.spec,
            draft=None if args.draft is None else str(locate(args.draft, say=_say)),
            max_running=args.max_running,
        )
        report = measure(config, args.model, args.workload, args.limit)
        shown = verdict.shown()
        report |= {"kl": shown["weights"]["kl"], "verdict": shown["verdict"]}
    except (EngineError, OSError, ValueError, KeyError) as error:
        _say(f"The benchmark can't run: {error}")
        return 1
    if args.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key:15} {value}")
    return 0


def _params(body: dict[str, Any], index: int) -> SamplingParams:
    """The parameters of a body; the service checks them strictly, a benchmark's file is our own."""
    stop = body.get("stop") or ()
    return SamplingParams(
        max_tokens=body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS,
        min_tokens=body.get("min_tokens", 0),
        temperature=body.get("temperature", 1.0),
        top_k=body.get("top_k", 0),
        top_p=body.get("top_p", 1.0),
        seed=body.get("seed", index),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=body.get("ignore_eos", False),
    )


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 2) if whole else None


def _best_of(action: Callable[[], object], times: int = 7) -> float:
    """Least seconds one call took."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        action()
        if torch.cuda.is_available():  # else there is nothing that runs beside this thread
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
