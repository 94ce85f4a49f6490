"""Runs steps: a plan in, sampled ids out. The runner knows tensors and no requests, the scheduler the reverse.

launch    lays a plan out, brings it to the device in one copy, starts its forward pass and its sampling
result    (flight.py) waits for the ids. Until then they are known on the device alone, where the next step, which
          may be launched before, finds those that it continues from
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.batch import StepInputs, filled, lay_out, resolve
from engine.cache.pool import KVPool
from engine.config import EngineConfig, Formats
from engine.device import errors_told, find_device
from engine.errors import ConfigError
from engine.flight import Flight
from engine.kernels import Kernels, Matrix, Say, choose
from engine.loaded import LoadedModel, from_files
from engine.memory.plan import MemoryPlan, available_bytes, plan_memory
from engine.memory.sizing import LOGIT_ROWS
from engine.model.decoder import Decoder
from engine.request import TokenLogprobs
from engine.sample.logprobs import Likelihoods
from engine.sample.picks import Picks, pick
from engine.sample.sampler import SampleRow, sample
from engine.sched.plan import PLACEHOLDER, Chunk, StepPlan, StepResult, TokenMasks
from engine.spec.choose import draft_bytes_of
from engine.staging import Staging

GPU_KV_SHARE = 0.9
"""Of a GPU's memory beside weights and workspace: nobody else needs it."""


class ModelRunner:
    """A loaded model with its KV memory. A step is a function of its plan, of the pool and of the last step's samples.

    Raises ModelError, ConfigError or DeviceError in one sentence when the model can't be served. `say` is told what
    runs slower than it could. `loaded` is a model that isn't read from `config.model`, `pool` the memory of another
    runner, in blocks of which this one keeps its KV. Not thread-safe.
    """

    def __init__(
        self,
        config: EngineConfig,
        say: Say = lambda sentence: None,
        *,
        loaded: LoadedModel | None = None,
        pool: KVPool | None = None,
    ) -> None:
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        loaded = from_files(config) if loaded is None else loaded
        model = loaded.config
        if loaded.note is not None:
            say(loaded.note)
        with errors_told("loading the model"):
            device = find_device(
                config.device,
                Formats(config.weight_format, config.kv_format),
                say,
                reproducible=bool(config.reproducible),
            )
            self.memory: MemoryPlan = _plan_memory(config, loaded, device)
            self.model_config = model
            self.digest = loaded.digest
            self.num_blocks = self.memory.num_blocks
            self.vocab_size = model.vocab_size
            self.context_tokens = model.context_tokens
            self.eos_ids = loaded.eos_ids
            self.kernels: Kernels = choose(
                model,
                weight_format=config.weight_format,
                kv_format=config.kv_format,
                block_tokens=config.block_tokens,
                reproducible=bool(config.reproducible),
                device=device,
                say=say,
            )
            self.device = self.kernels.device
            dtype = torch.float32 if config.weight_format == "float32" else torch.bfloat16
            self._decoder = Decoder(model, loaded.weights(self.kernels, dtype), self.kernels)
            if pool is not None and not pool.holds(model, self.kernels.layout, config.kv_format):
                raise ConfigError(
                    f"{config.model} can't draft: its KV heads must be as many and as wide as the model's, "
                    "and its layers at most as many."
                )
            self.pool = pool or KVPool(
                model,
                kv_format=config.kv_format,
                block_tokens=config.block_tokens,
                num_blocks=self.num_blocks,
                layout=self.kernels.layout,
                device=self.device,
            )
        self.layout_id = self.pool.layout_id
        self._poison = config.poison
        self._staging = Staging(self.device)
        self._graphs = self.kernels.graphs(self._forward, config.max_running) if config.graphs else None
        self._last: Flight | None = None
        self.keeps_states = False  # True: results have the states of which tokens were sampled

    @property
    def overlaps(self) -> bool:
        """Whether a step runs beside this thread: only then is there something to win by planning the next one
        before this one is read."""
        return self.device.type == "cuda"

    def execute(self, plan: StepPlan) -> StepResult:
        """Freed blocks poisoned, blocks copied, KV written, wanted rows sampled.

        A chunk that waits for a token its sequence failed to give in the last step fails with the same reason. Raises
        MemoryShortageError when memory doesn't suffice; nothing of the step counts then. Raises DeviceError when the
        GPU fails; nothing more can be run then.
        """
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """As `execute`, but doesn't wait. Flights are read in the order in which they were launched."""
        with errors_told():
            self._last = self._launch(plan)
            return self._last

    def _launch(self, plan: StepPlan) -> Flight:
        self._prepare(plan)
        before = self._last
        known = before.result().failed if before is not None and before.is_read else {}
        failed = {c.seq_id: known[c.seq_id] for c in plan.chunks if c.seq_id in known and PLACEHOLDER in c.token_ids}
        chunks = [chunk for chunk in plan.chunks if chunk.seq_id not in failed]
        if not chunks:
            return Flight((), before=None, failed=failed)
        step = lay_out(chunks, self.kernels, self.pool.block_tokens, before.places if before is not None else {})
        masks = dict(plan.masks)  # waits: threads that make some would hold up those of the forward pass
        places = _places(chunks)
        sampled = [chunk for chunk in chunks if chunk.pooling is None]
        rows = [row for chunk in sampled for row in self._sample_rows(chunk, masks)]
        picks = pick(rows, self.vocab_size, draws=self.kernels.draws)
        last_ids = before.ids if before is not None and step.has_unread else None
        recorded = self._graphs.run(step, picks.arrays, last_ids) if self._graphs is not None and step.decodes else None
        if recorded is not None:
            hidden, tensors = recorded
        else:
            attention, tensors = self.kernels.place(step.attention, [*step.arrays, *picks.arrays], self._staging.send)
            inputs, tensors = StepInputs.of(tensors[: len(step.arrays)], attention), tensors[len(step.arrays) :]
            if last_ids is not None:
                inputs = inputs.with_ids(filled(inputs.token_ids, last_ids))
            hidden = self._forward(inputs)[inputs.logit_rows]
        pooled: dict[str, Tensor] = {}
        if len(sampled) < len(chunks):
            hidden = self._pool(hidden, chunks, pooled)
        ids, logprobs = self._sample(hidden, picks, tensors)
        return Flight(
            chunks,
            before=None if before is None or before.is_read else before,
            failed=failed,
            ids=ids,
            fetch=self._staging.fetch(ids),
            places=places,
            logprobs=logprobs,
            pooled={name: self._staging.fetch(total) for name, total in pooled.items()},
            states=self._staging.fetch(self._decoder.states(hidden)) if self.keeps_states else None,
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Runs a step without sampling: the wanted rows' logits, float32 [R, vocab]. For measuring quality."""
        return self.head(self.states(plan))

    @torch.inference_mode()
    def states(self, plan: StepPlan) -> Tensor:
        """Runs a step without its head: the wanted rows, [R, hidden], of which `head` makes logits."""
        self._prepare(plan)
        step = lay_out(plan.chunks, self.kernels, self.pool.block_tokens, {})
        attention, tensors = self.kernels.place(step.attention, step.arrays, self._staging.send)
        inputs = StepInputs.of(tensors, attention)
        return self._forward(inputs)[inputs.logit_rows]

    @torch.inference_mode()
    def head(self, states: Tensor) -> Tensor:
        """The logits of such rows, float32 [R, vocab]."""
        return self._decoder.logits(states)

    def normed(self, states: Tensor) -> Tensor:
        """Such rows after the last norm, float32: what `keeps_states` keeps."""
        return self._decoder.states(states)

    @property
    def embedding(self) -> Tensor:
        """[vocab, hidden], as it is looked up."""
        return self._decoder.embedding

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of one layer, then the head: what a token costs. For measuring rates."""
        return self._decoder.matrices

    def _forward(self, inputs: StepInputs) -> Tensor:
        return self._decoder.forward(inputs, self.pool)

    def _prepare(self, plan: StepPlan) -> None:
        if self._poison and plan.freed_blocks:
            self.pool.poison(plan.freed_blocks)
        if plan.copies:
            self.pool.copy(plan.copies)

    def _pool(self, hidden: Tensor, chunks: Sequence[Chunk], pooled: dict[str, Tensor]) -> Tensor:
        """Adds up the wanted states of the chunks whose result is a vector; the rows that are left."""
        kept: list[Tensor] = []
        end = 0
        for chunk in chunks:
            start, end = end, end + len(chunk.logit_rows)
            rows = hidden[start:end]
            if chunk.pooling is None:
                kept.append(rows)
            elif len(rows):
                pooled[chunk.seq_id] = self._decoder.states(rows).sum(dim=0, dtype=torch.float64).float()
        return torch.cat(kept) if kept else hidden[:0]

    def _sample(
        self, hidden: Tensor, picks: Picks, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, dict[int, TokenLogprobs]]:
        """Ids for the rows [R, hidden], in order, -1 for none; and the logprobs of rows that ask for them. `tensors`
        are `picks.arrays` on the device."""
        best, drawn, best_masks, drawn_masks, numbers, top_ks = tensors
        if picks.is_all_best:
            return self._decoder.best(hidden), {}
        ids = torch.full((len(picks.rows),), -1, dtype=torch.int64, device=self.device)
        if len(best):
            ids[best] = self._decoder.best(hidden[best], best_masks if len(best_masks) else None)
        for start in range(0, len(drawn), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            masks = drawn_masks[part]
            logits = self._decoder.logits(hidden[drawn[part]])
            ids[drawn[part]] = self.kernels.draw(logits, numbers[part], top_ks[part], masks if len(masks) else None)
        logprobs: dict[int, TokenLogprobs] = {}
        for start in range(0, len(picks.others), LOGIT_ROWS):
            some = picks.others[start : start + LOGIT_ROWS]
            logits, mine = self._decoder.logits(hidden[some]).cpu(), [picks.rows[index] for index in some]
            likelihoods = Likelihoods(logits, mine)
            found = sample(logits, mine)
            ids[some] = torch.tensor([-1 if token is None else token for token in found], device=self.device)
            logprobs |= {some[index]: one for index, one in likelihoods.of(found).items()}
        return ids, logprobs

    def _sample_rows(self, chunk: Chunk, masks: TokenMasks) -> list[SampleRow]:
        first = chunk.logit_rows[0] if chunk.logit_rows else 0
        positions = [chunk.sample_position + row - first for row in chunk.logit_rows]
        allowed = masks.get(chunk.seq_id)
        history = (*chunk.history, *self._known(chunk)) if chunk.params.has_penalties else ()
        return [
            SampleRow(
                chunk.params,
                position,
                chunk.choice,
                self._masked_ids(chunk, position),
                None if allowed is None else allowed[index],
                history[:position],
                chunk.num_prompt_tokens,
            )
            for index, position in enumerate(positions)
        ]

    def _known(self, chunk: Chunk) -> list[int]:
        """The chunk's ids, for penalties; waits for the last step where it has one of its tokens."""
        last: Mapping[str, tuple[int, ...]] = {}
        if PLACEHOLDER in chunk.token_ids and self._last is not None:
            result = self._last.result()
            last = {chunk.seq_id: (0,) * len(chunk.token_ids), **result.sampled}  # a failed one gets nothing of it
        return resolve(chunk, last)

    def _masked_ids(self, chunk: Chunk, position: int) -> tuple[int, ...]:
        """Tokens that would end the answer, while it is shorter than min_tokens; and ends that don't count, where a
        grammar would take them for its own."""
        params = chunk.params
        ends: set[int] = set(self.eos_ids) if params.ignore_eos and params.grammar else set()
        if position - chunk.num_prompt_tokens < params.min_tokens:
            ends |= set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_ids)
        return tuple(token for token in ends if 0 <= token < self.vocab_size)


def _places(chunks: Sequence[Chunk]) -> dict[str, range]:
    """Which of the sampled rows are whose."""
    found: dict[str, range] = {}
    end = 0
    for chunk in chunks:
        if chunk.pooling is None and chunk.logit_rows:
            found[chunk.seq_id] = range(end, end + len(chunk.logit_rows))
            end += len(chunk.logit_rows)
    return found


def _plan_memory(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> MemoryPlan:
    if device.type == "cpu":
        is_fixed = config.num_blocks is not None or config.kv_bytes is not None
        available = 0 if is_fixed else available_bytes()
        return plan_memory(
            config,
            loaded.config,
            available=available,
            weight_bytes=loaded.weight_bytes,
            draft_bytes=draft_bytes_of(config),
        )
    free, _ = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    return plan_memory(
        config,
        loaded.config,
        available=free,
        weight_bytes=loaded.weight_bytes,
        draft_bytes=draft_bytes_of(config),
        kv_share=GPU_KV_SHARE,
        place=f"{name}'s memory",
    )
