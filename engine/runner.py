"""Runs steps: a plan in, sampled ids out. The runner knows tensors and no requests, the scheduler the reverse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.batch import StepInputs, build_inputs, resolve
from engine.cache.pool import KVPool
from engine.config import GROUP_FORMATS, EngineConfig
from engine.errors import ConfigError, MemoryShortageError
from engine.kernels import Matrix, Say, choose
from engine.load.meta import read_meta
from engine.load.quantization import stored_format
from engine.load.weights import load_weights, open_model
from engine.memory.plan import MemoryPlan, available_bytes, plan_memory
from engine.memory.sizing import LOGIT_ROWS
from engine.model.decoder import Decoder
from engine.request import TokenLogprobs
from engine.sample.logprobs import Likelihoods
from engine.sample.masks import packed
from engine.sample.sampler import SampleRow, sample
from engine.sched.plan import PLACEHOLDER, Chunk, StepPlan, StepResult, TokenMasks

_NOT_FINITE = "The model's output for this request is not a number."
_NO_MEMORY = "DefaultCPUAllocator"  # torch has a type of its own for the accelerator's memory only


class ModelRunner:
    """A loaded model with its KV memory. A step is a function of its plan, of the pool and of the last step's samples.

    Raises ModelError or ConfigError in one sentence when the model can't be served. `say` is told what runs slower
    than it could. Not thread-safe.
    """

    def __init__(self, config: EngineConfig, say: Say = lambda sentence: None) -> None:
        meta = read_meta(config.model)
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        model, source = open_model(meta.path)
        if config.weight_format in GROUP_FORMATS and stored_format(meta.path) != config.weight_format:
            raise ConfigError(
                f"The weights of {meta.name} aren't stored as {config.weight_format}; "
                "quantize it with `batchsvc models quantize`, or use another weight format."
            )
        self.memory: MemoryPlan = plan_memory(config, model, available=available_bytes())
        self.model_config = model
        self.digest = meta.digest
        self.num_blocks = self.memory.num_blocks
        self.vocab_size = model.vocab_size
        self.context_tokens = model.context_tokens
        self.eos_ids: frozenset[int] = meta.eos_ids
        self.kernels = choose(
            model,
            weight_format=config.weight_format,
            kv_format=config.kv_format,
            block_tokens=config.block_tokens,
            reproducible=bool(config.reproducible),
            say=say,
        )
        dtype = torch.float32 if config.weight_format == "float32" else torch.bfloat16
        self._decoder = Decoder(model, load_weights(model, source, self.kernels, dtype), self.kernels)
        self.pool = KVPool(
            model,
            kv_format=config.kv_format,
            block_tokens=config.block_tokens,
            num_blocks=self.num_blocks,
            layout=self.kernels.layout,
        )
        self.layout_id = self.pool.layout_id
        self._poison = config.poison
        self._last_ids: dict[str, tuple[int, ...]] = {}
        self._last_failed: dict[str, str] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Freed blocks poisoned, blocks copied, KV written, wanted rows sampled.

        A chunk that waits for a token its sequence failed to give in the last step fails with the same reason. Raises
        MemoryShortageError when memory doesn't suffice; nothing of the step counts then.
        """
        with _shortage_told():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        self._prepare(plan)
        failed = {c.seq_id: self._last_failed[c.seq_id] for c in plan.chunks if self._is_orphan(c)}
        chunks = [chunk for chunk in plan.chunks if chunk.seq_id not in failed]
        sampled: dict[str, tuple[int, ...]] = {}
        pooled: dict[str, bytes] = {}
        logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        if chunks:
            inputs = build_inputs(chunks, self.kernels, self.pool.block_tokens, self._last_ids)
            masks = dict(plan.masks)  # waits: threads that make some would hold up those of the forward pass
            hidden = self._hidden(inputs)
            if any(chunk.pooling is not None for chunk in chunks):
                hidden, chunks = self._pool(hidden, chunks, pooled, failed)
            ids, likelihoods = self._sample(hidden, chunks, masks)
            row = 0
            for chunk in chunks:
                end = row + len(chunk.logit_rows)
                mine, row = ids[row:end], end
                known = tuple(token for token in mine if token is not None)
                if len(known) < len(mine):
                    failed[chunk.seq_id] = _NOT_FINITE
                elif known:
                    sampled[chunk.seq_id] = known
                    if chunk.params.logprobs is not None:
                        logprobs[chunk.seq_id] = tuple(likelihoods[at] for at in range(end - len(mine), end))
        self._last_ids, self._last_failed = sampled, failed
        return StepResult(sampled, failed, pooled=pooled, logprobs=logprobs)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Runs a step without sampling: the wanted rows' logits, float32 [R, vocab]. For measuring quality."""
        return self.head(self.states(plan))

    @torch.inference_mode()
    def states(self, plan: StepPlan) -> torch.Tensor:
        """Runs a step without its head: the wanted rows, [R, hidden], of which `head` makes logits."""
        self._prepare(plan)
        return self._hidden(build_inputs(plan.chunks, self.kernels, self.pool.block_tokens, self._last_ids))

    @torch.inference_mode()
    def head(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of such rows, float32 [R, vocab]."""
        return self._decoder.logits(states)

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of one layer, then the head: what a token costs. For measuring rates."""
        return self._decoder.matrices

    def _prepare(self, plan: StepPlan) -> None:
        if self._poison and plan.freed_blocks:
            self.pool.poison(plan.freed_blocks)
        if plan.copies:
            self.pool.copy(plan.copies)

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        """Writes the chunks' KV; the rows whose logits are wanted, [R, hidden]."""
        return self._decoder.forward(inputs, self.pool)[inputs.logit_rows]

    def _pool(
        self, hidden: torch.Tensor, chunks: list[Chunk], pooled: dict[str, bytes], failed: dict[str, str]
    ) -> tuple[torch.Tensor, list[Chunk]]:
        """Adds up the wanted states of the chunks whose result is a vector; what is left of rows and chunks."""
        rest: list[Chunk] = []
        kept: list[torch.Tensor] = []
        end = 0
        for chunk in chunks:
            start, end = end, end + len(chunk.logit_rows)
            rows = hidden[start:end]
            if chunk.pooling is None:
                rest.append(chunk)
                kept.append(rows)
            elif len(rows):
                total = self._decoder.states(rows).sum(dim=0, dtype=torch.float64).float()
                if total.isfinite().all():
                    pooled[chunk.seq_id] = total.cpu().numpy().astype("<f4").tobytes()
                else:
                    failed[chunk.seq_id] = _NOT_FINITE
        return (torch.cat(kept) if kept else hidden[:0]), rest

    def _is_orphan(self, chunk: Chunk) -> bool:
        return chunk.seq_id in self._last_failed and PLACEHOLDER in chunk.token_ids

    def _sample(
        self, hidden: torch.Tensor, chunks: list[Chunk], masks: TokenMasks
    ) -> tuple[list[int | None], dict[int, TokenLogprobs]]:
        """Ids for the wanted rows [R, hidden], in order; and the logprobs of rows that ask for them."""
        rows = [row for chunk in chunks for row in self._sample_rows(chunk, masks)]
        ids: list[int | None] = [None] * len(rows)
        logprobs: dict[int, TokenLogprobs] = {}
        greedy = [i for i, row in enumerate(rows) if row.is_argmax]
        others = [i for i, row in enumerate(rows) if not row.is_argmax]
        if greedy:
            greedy.sort(key=lambda i: not rows[i].is_masked)  # the head wants those with masks first
            masked = [rows[i] for i in greedy if rows[i].is_masked]
            allowed = torch.from_numpy(packed(masked, self.vocab_size)).to(hidden.device) if masked else None
            for i, token in zip(greedy, self._decoder.best(hidden[greedy], allowed).tolist(), strict=True):
                ids[i] = token if token >= 0 else None
        for start in range(0, len(others), LOGIT_ROWS):
            some = others[start : start + LOGIT_ROWS]
            logits, mine = self._decoder.logits(hidden[some]), [rows[i] for i in some]
            likelihoods = Likelihoods(logits, mine)
            drawn = sample(logits, mine)
            for i, token in zip(some, drawn, strict=True):
                ids[i] = token
            logprobs |= {some[i]: found for i, found in likelihoods.of(drawn).items()}
        return ids, logprobs

    def _sample_rows(self, chunk: Chunk, masks: TokenMasks) -> list[SampleRow]:
        first = chunk.logit_rows[0] if chunk.logit_rows else 0
        positions = [chunk.sample_position + row - first for row in chunk.logit_rows]
        allowed = masks.get(chunk.seq_id)
        history = (*chunk.history, *resolve(chunk, self._last_ids)) if chunk.params.has_penalties else ()
        return [
            SampleRow(
                chunk.params,
                position,
                chunk.choice,
                self._masked_ids(chunk, position),
                allowed,
                history[:position],
                chunk.num_prompt_tokens,
            )
            for position in positions
        ]

    def _masked_ids(self, chunk: Chunk, position: int) -> tuple[int, ...]:
        """Tokens that would end the answer, while it is shorter than min_tokens; and ends that don't count, where a
        grammar would take them for its own."""
        params = chunk.params
        ends: set[int] = set(self.eos_ids) if params.ignore_eos and params.grammar else set()
        if position - chunk.num_prompt_tokens < params.min_tokens:
            ends |= set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_ids)
        return tuple(token for token in ends if 0 <= token < self.vocab_size)


@contextmanager
def _shortage_told() -> Iterator[None]:
    """Whatever says that memory ran out becomes a MemoryShortageError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryShortageError("A step needs more memory than there is.") from error
    except RuntimeError as error:
        if _NO_MEMORY not in str(error):
            raise
        raise MemoryShortageError("A step needs more memory than there is.") from error
