"""The real engine gives the same completions with drafts as without: every kind of request, in one batch, all limits.

Drafts come from the look-up, and from a proposer that knows each answer and is right four times of five, so that
windows are accepted wholly, in part and not at all. In the fused formats results are the same bit for bit, so log
probabilities too.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.sequence import Sequence as RunningSequence
from engine.config import EngineConfig
from engine.distill.capture import Scorer
from engine.engine import Engine
from engine.errors import ConfigError, ModelError
from engine.load.weights import open_model
from engine.request import Begun, Completion, FinishReason, Request, SamplingParams, TokenLogprobs
from engine.runner import ModelRunner
from engine.spec.choose import heads_on
from engine.spec.draft_model import DraftProposer
from engine.spec.heads_file import Heads, save_heads
from engine.spec.heads_loss import heads_loss, initial_parts
from engine.spec.ngram import NgramProposer
from engine.spec.speculation import Speculation
from engine.structure.grammar import spec_of
from engine.text import load_text
from tests.engine.spec.guesser import SimpleProposer
from tests.tiny import make_tiny_model

DRAWN = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=5, ignore_eos=True)
GREEDY = replace(DRAWN, temperature=0.0, top_p=1.0)
WORDS = ["late", "lost parcel", "refund asked", "refund refused", "thanks"]
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "hot": replace(DRAWN, temperature=1.6, top_k=9, top_p=1.0, min_p=0.02, seed=2**62 + 1),
    "until its end": replace(
        DRAWN,
        temperature=2.0,
        top_p=1.0,
        ignore_eos=False,
        min_tokens=6,
        max_tokens=60,
        stop_token_ids=tuple(range(3, 99)),
    ),
    "penalties": replace(DRAWN, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3),
    "greedy penalties": replace(GREEDY, frequency_penalty=0.4, repetition_penalty=1.1),
    "bias": replace(DRAWN, logit_bias=((17, 3.0), (23, -50.0)), temperature=1.0),
    "log probabilities": replace(DRAWN, logprobs=4),
    "greedy log probabilities": replace(GREEDY, logprobs=2),
    "one token": replace(GREEDY, max_tokens=1),
    "two tokens": replace(GREEDY, max_tokens=2),
    "a choice": replace(GREEDY, grammar=spec_of("choice", WORDS), ignore_eos=False),
    "a drawn choice": replace(DRAWN, grammar=spec_of("choice", WORDS), ignore_eos=False, temperature=1.5),
    "JSON": replace(GREEDY, grammar=spec_of("json", {"type": "array", "items": {"enum": WORDS}, "minItems": 2})),
    "a drawn regex": replace(DRAWN, grammar=spec_of("regex", "([a-c]{2} ){3,9}end"), max_tokens=40, ignore_eos=False),
}


class Recorded(SimpleProposer):
    """Knows the answers, by the ids of requests and the number of the choice."""

    def __init__(
        self, requests: Sequence[Request], right: float, answers: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        super().__init__()
        self._right = right
        self._texts: dict[str, list[int]] = {}
        for request in requests:
            for number, token_ids in enumerate(answers[request.id]):
                name = f"{request.id}\0{number}" if request.n > 1 else request.id
                self._texts[name] = [*request.prompt_ids, *token_ids]

    def guess(self, seq: RunningSequence, length: int) -> tuple[int, ...]:
        known = self._texts[seq.id][len(seq.tokens) :][:length]
        return tuple(t if self.random.random() < self._right else self.random.randrange(384) for t in known)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the shape that the fused CPU kernels serve."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "fused", hidden=128, mlp=192, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without its last layer."""
    directory = tmp_path_factory.mktemp("models") / "small"
    return make_tiny_model(directory, hidden=128, mlp=192, heads=4, kv_heads=2, layers=1)


class World:
    """Engines over one model."""

    def __init__(self, model: Path, weights: str, kv: str) -> None:
        self.config = EngineConfig(
            model=str(model), weight_format=weights, kv_format=kv, num_blocks=300, threads=1, poison=True,
            reproducible=True, spec="off",
        )  # fmt: skip
        self.text = load_text(model)
        rng = random.Random(3)
        stem = rng.choices(range(3, 384), k=40)
        self.requests = [
            Request(id=name, prompt_ids=stem[: 10 * (i % 5)] + rng.choices(range(3, 384), k=4 + 3 * i), params=params)
            for i, (name, params) in enumerate(KINDS.items())
        ]
        self.requests.append(replace(self.requests[1], id="three answers", n=3))
        (free,) = self.run([replace(self.requests[1], id="free")])
        stops = (free.text[9:12], "not in it")  # ends inside a token, and perhaps inside a window
        self.requests.append(replace(self.requests[1], id="stop string", params=replace(DRAWN, stop=stops)))
        self.plain = self.run(self.requests)
        self.answers = {request.id: self._answers(request) for request in self.requests}
        self.told = {one.id: self._told(one) for one in self.requests if one.params.logprobs is not None}

    def engine(self, speculation: Speculation | None = None, **changes: Any) -> Engine:
        config = replace(self.config, **changes)
        return Engine(config, runner=ModelRunner(config), text=self.text, speculation=speculation)

    def run(
        self, requests: Sequence[Request], speculation: Speculation | None = None, **changes: Any
    ) -> list[Completion]:
        engine = self.engine(speculation, **changes)
        found = list(engine.run(requests))
        engine.scheduler.check_integrity()
        if speculation is not None:
            assert engine.stats().drafted_tokens > engine.stats().accepted_tokens > 0
        return found

    def recorded(self) -> Speculation:
        return Speculation(Recorded(self.requests, 0.8, self.answers), is_gated=False)

    def begun(self, cut: int) -> dict[str, Request]:
        """The requests with what another engine said of them, log probabilities too."""
        found = {}
        for request in self.requests:
            if request.n > 1:
                begun = tuple(Begun(own[:cut]) for own in self.answers[request.id])
                found[request.id] = replace(request, resume_choices=begun)
            else:
                told = () if request.params.logprobs is None else self.told[request.id][:cut]
                ids = self.answers[request.id][0][:cut]
                found[request.id] = replace(request, resume_ids=ids, resume_logprobs=told)
        return found

    def _told(self, request: Request) -> tuple[TokenLogprobs, ...]:
        engine, told = self.engine(), list[TokenLogprobs]()
        engine.add(request)
        while engine.has_work():
            told += engine.step().logprobs.get(request.id, [])
        return tuple(told)

    def _answers(self, request: Request) -> list[tuple[int, ...]]:
        if request.n == 1:
            return [self.plain[self.requests.index(request)].token_ids]
        return [self.run([replace(request, n=1, choice=i)])[0].token_ids for i in range(request.n)]

    def trained_heads(self, directory: Path) -> Path:
        """Heads that know these answers well, as they were trained on them."""
        texts = [(request.prompt_ids, ids) for request in self.requests for ids in self.answers[request.id]]
        scorer = Scorer(self.config.model, 400, weight_format="bf16", threads=1)
        rows = torch.cat([scorer.rows((*prompt, *ids), len(prompt)) for prompt, ids in texts])
        next_ids = torch.tensor([token for _, ids in texts for token in ids])
        owners = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor([len(ids) for _, ids in texts]))
        model, source = open_model(Path(self.config.model))
        embedding = source.load("embedding.weight").float()
        ids = torch.arange(3, 323)  # some tokens they can't say
        parts = initial_parts(embedding[ids], num_heads=3, inner=128, seed=1)
        targets = 12.0 * torch.nn.functional.one_hot((next_ids - 3).clamp(0, len(ids) - 1), len(ids)).float()
        for part in parts.values():
            part.requires_grad_()
        optimizer = torch.optim.AdamW(parts.values(), lr=4e-3)
        for _ in range(60):
            optimizer.zero_grad()
            heads_loss(parts, 3, rows, embedding[next_ids], targets, owners, model.activation).backward()
            optimizer.step()
        made = Heads(
            model_digest=self.text.meta.digest, num_heads=3, hidden=128, inner=128, vocab_size=384,
            parts=parts | {"ids": ids.int()},
        )  # fmt: skip
        save_heads(directory, made, {})
        return directory


def assert_same(found: Sequence[Completion], plain: Sequence[Completion]) -> None:
    """But for prefix hits, which depend on the schedule."""
    for one, other in zip(found, plain, strict=True):
        assert replace(one, usage=replace(one.usage, hit_tokens=other.usage.hit_tokens)) == other


FORMATS = [pytest.param(("int8", "int8"), id="int8"), pytest.param(("bf16", "bf16"), id="bf16", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=FORMATS)
def world(request: pytest.FixtureRequest, model: Path) -> Iterator[World]:
    return World(model, *request.param)


def test_the_plain_answers_are_worth_comparing(world: World) -> None:
    ended = {c.request_id: c.finish_reason for c in world.plain}
    assert set(ended.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert ended["stop string"] is ended["a choice"] is ended["until its end"] is FinishReason.STOP
    assert len({c.token_ids for c in world.plain}) >= len(KINDS) - 1
    told = {c.request_id: len(c.logprobs) - len(c.token_ids) for c in world.plain if c.logprobs is not None}
    assert told == {"log probabilities": 0, "greedy log probabilities": 0}, "compared with those of each proposer"


LIMITS: list[dict[str, Any]] = [
    {},
    {"step_tokens": 23, "max_running": 5},
    {"num_blocks": 24, "prefix_cache": False},
    {"overlap": True},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_kind_of_request_ends_the_same(world: World, limits: dict[str, Any]) -> None:
    assert_same(world.run(world.requests, world.recorded(), **limits), world.plain)


def test_the_look_up_changes_nothing(world: World) -> None:
    assert_same(world.run(world.requests, Speculation(NgramProposer(), is_gated=False)), world.plain)
    assert_same(world.run(world.requests, spec="auto"), world.plain)


def preempted(engine: Engine, requests: Sequence[Request], period: int) -> list[Completion]:
    """The answers in the order of the requests, which are preempted now and then."""
    for request in requests:
        engine.add(request)
    ended: dict[str, Completion] = {}
    step = 0
    while engine.has_work():
        for index, seq in enumerate(engine.scheduler.running()):
            if (index + step) % period == 0 and step < 20:
                engine.scheduler.preempt(seq.id)
        step += 1
        ended |= {c.request_id: c for c in engine.step().completions}
    assert engine.stats().preemptions > 10 and engine.stats().accepted_tokens > 0
    return [ended[request.id] for request in requests]


def test_preempted_now_and_then(world: World) -> None:
    for period in (2, 3, 5):
        assert_same(preempted(world.engine(world.recorded()), world.requests, period), world.plain)


def test_an_answer_that_another_engine_began_goes_on(world: World) -> None:
    """Cut at any place, with drafts before it, behind it, or both."""
    for cut in (1, 3, 8, 17):
        begun = world.begun(cut)
        found = world.run(list(begun.values()), world.recorded())
        assert_same(found, [plain for plain in world.plain if plain.request_id in begun])


class WithDraft:
    """Engines whose every proposal of a draft model is drafted."""

    def __init__(self, world: World, small: Path) -> None:
        self._world = world
        self._small = small

    def engine(self, **changes: Any) -> Engine:
        config = replace(self._world.config, **changes)
        runner = ModelRunner(config)
        own = replace(config, model=str(self._small), poison=False, overlap=False)
        draft = DraftProposer(ModelRunner(own, pool=runner.pool), config.block_tokens)
        speculation = Speculation(draft, is_gated=False)
        return Engine(config, runner=runner, text=self._world.text, speculation=speculation)

    def run(self, requests: Sequence[Request], **changes: Any) -> list[Completion]:
        engine = self.engine(**changes)
        found = list(engine.run(requests))
        engine.scheduler.check_integrity()
        assert engine.stats().drafted_tokens > engine.stats().accepted_tokens > 0
        return found


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_draft_model_changes_nothing(world: World, small: Path, limits: dict[str, Any]) -> None:
    assert_same(WithDraft(world, small).run(world.requests, **limits), world.plain)


def test_a_draft_model_that_is_named_changes_nothing(world: World, small: Path) -> None:
    config = replace(world.config, spec="draft", draft=str(small))
    engine = Engine(config, runner=ModelRunner(config), text=world.text)
    assert_same(list(engine.run(world.requests)), world.plain)


def test_a_draft_model_with_preemptions_and_answers_that_another_engine_began(world: World, small: Path) -> None:
    engine = WithDraft(world, small).engine()
    assert_same(preempted(engine, world.requests, 3), world.plain)
    begun = world.begun(5)
    found = WithDraft(world, small).run(list(begun.values()))
    assert_same(found, [plain for plain in world.plain if plain.request_id in begun])


@pytest.fixture(scope="module")
def heads(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world.trained_heads(tmp_path_factory.mktemp("heads"))


class WithHeads:
    """Engines whose every proposal of heads is drafted."""

    def __init__(self, world: World, heads: Path) -> None:
        self._world = world
        self._heads = heads

    def engine(self, **changes: Any) -> Engine:
        config = replace(self._world.config, **changes)
        runner = ModelRunner(config)
        speculation = Speculation(heads_on(runner, self._heads, config.model), is_gated=False)
        return Engine(config, runner=runner, text=self._world.text, speculation=speculation)

    def run(self, requests: Sequence[Request], **changes: Any) -> list[Completion]:
        engine = self.engine(**changes)
        found = list(engine.run(requests))
        engine.scheduler.check_integrity()
        stats = engine.stats()
        assert stats.drafted_tokens > stats.accepted_tokens > stats.verifications / 4
        return found


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_heads_change_nothing(world: World, heads: Path, limits: dict[str, Any]) -> None:
    assert_same(WithHeads(world, heads).run(world.requests, **limits), world.plain)


def test_heads_with_preemptions_and_answers_that_another_engine_began(world: World, heads: Path) -> None:
    assert_same(preempted(WithHeads(world, heads).engine(), world.requests, 3), world.plain)
    begun = world.begun(5)
    found = WithHeads(world, heads).run(list(begun.values()))
    assert_same(found, [plain for plain in world.plain if plain.request_id in begun])


def test_heads_are_found_where_they_lie(world: World, heads: Path, model: Path, tmp_path: Path) -> None:
    """Named as a draft, or beside the model's weights; gated like all that proposes."""
    for changes in ({"spec": "heads", "draft": str(heads)}, {"spec": "auto", "draft": str(heads)}):
        engine = world.engine(**changes)
        assert_same(list(engine.run(world.requests)), world.plain)
        assert engine.stats().accepted_tokens > 0
    own = tmp_path / "own"
    shutil.copytree(model, own)
    for name in ("heads.safetensors", "heads.json"):
        shutil.copy(heads / name, own)
    engine = world.engine(spec="heads", model=str(own))
    assert_same(list(engine.run(world.requests)), world.plain)
    assert engine.stats().accepted_tokens > 0


def test_a_model_that_cannot_draft_is_refused_in_a_sentence(world: World, tmp_path: Path) -> None:
    sizes = {"hidden": 128, "mlp": 192, "heads": 4}
    others = {
        "has another vocabulary": make_tiny_model(tmp_path / "words", **sizes, kv_heads=2, vocab_size=320),
        "as many and as wide": make_tiny_model(tmp_path / "heads", **sizes, kv_heads=4),
        "layers at most as many": make_tiny_model(tmp_path / "layers", **sizes, kv_heads=2, layers=3),
    }
    swapped = make_tiny_model(tmp_path / "swapped", **sizes, kv_heads=2)
    spelled = json.loads((swapped / "tokenizer.json").read_text("utf-8"))
    vocab = spelled["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(spelled), "utf-8")
    for says, path in (*others.items(), ("has another vocabulary", swapped)):
        config = replace(world.config, spec="auto", draft=str(path))
        with pytest.raises(ConfigError, match=says):
            Engine(config, runner=ModelRunner(config), text=world.text)
    with pytest.raises(ConfigError, match="draft"):
        replace(world.config, spec="draft")
    with pytest.raises(ConfigError, match="heads"):
        replace(world.config, spec="medusa")


def test_heads_that_cannot_draft_are_refused_in_a_sentence(world: World, heads: Path, small: Path) -> None:
    for changes, says in (
        ({"spec": "heads"}, "no heads beside its weights"),
        ({"spec": "heads", "draft": str(small)}, "no heads.safetensors"),
        ({"spec": "draft", "draft": str(heads)}, "heads and no model"),
    ):
        with pytest.raises(ConfigError, match=says):
            world.engine(**changes)
    with pytest.raises(ModelError, match="another digest"):
        world.engine(spec="heads", draft=str(heads), model=str(small))


class Spelled(SimpleProposer):
    """Knows what the answer's form lets it be."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__()
        self._token_ids = tuple(token_ids)

    def guess(self, seq: RunningSequence, length: int) -> tuple[int, ...]:
        return self._token_ids[seq.num_outputs :][:length]


@pytest.mark.parametrize("stop", ["b", "nowhere"])
def test_a_form_that_fails_behind_a_stop_string_ends_there(world: World, stop: str) -> None:
    """Behind abx nothing can follow; whether that is seen in the same window or a step later."""
    dead = spec_of("lark", 'start: "ab" "x" dead\ndead: dead "a"')
    params = replace(GREEDY, grammar=dead, stop=(stop,), ignore_eos=False)
    request = Request(id="r", prompt_ids=[20, 30, 40], params=params)
    token_ids = [*world.text.tokenizer.encode("abx"), 2]
    (plain,) = world.run([request])
    engine = world.engine(Speculation(Spelled(token_ids), is_gated=False))
    assert_same(list(engine.run([request])), [plain])
    assert plain.finish_reason is (FinishReason.STOP if stop == "b" else FinishReason.ERROR)
    assert engine.stats().drafted_tokens == 2 and engine.stats().steps == 2


def test_a_draft_ends_where_the_form_forbids_it(world: World) -> None:
    """What stands behind could never count, so it isn't computed."""
    params = replace(GREEDY, grammar=spec_of("regex", "ab(c|d)e"), ignore_eos=False)
    request = Request(id="r", prompt_ids=[20, 30, 40], params=params)
    (plain,) = world.run([request])
    engine = world.engine(Speculation(Spelled(world.text.tokenizer.encode("abxeeee")), is_gated=False))
    assert_same(list(engine.run([request])), [plain])
    assert engine.stats().drafted_tokens == 2 and engine.stats().accepted_tokens == 1, "and neither x nor a second e"
