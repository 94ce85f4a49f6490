"""What was captured, on disk: shards of examples with their targets, read again in every epoch, pack by pack.

A shard is a safetensors file that gets its name when it is whole, so what a killed run has finished counts. In memory
stays a line of numbers for each example.

    tokens   int32 [tokens of all]      lengths  int64 [examples, 3]: key, tokens, place of the first to be learned
    ids      int32 [places, C]          log_p, weights  float32 [places, C]          entropy  float32 [places]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.distill.errors import DistillError
from engine.distill.pack import Example, Pack, common_tokens, pack, packed_order
from engine.distill.targets import Targets, joined

SHARD_PLACES = 4096
FAMILY_TOKENS = 32
"""Examples that begin with the same so many tokens are packed together."""
_TARGETS = ("ids", "log_p", "weights", "entropy")


class Writer:
    """Collects examples into shards of `folder`; knows which lines are there already."""

    def __init__(self, folder: Path, places: int = SHARD_PLACES) -> None:
        self._folder = folder
        self._places = places
        self._waiting: list[tuple[int, Example]] = []
        self.lines = {line for shard in paths(folder) for line in opened(shard).get_tensor("lengths")[:, 0].tolist()}

    def add(self, line: int, example: Example) -> None:
        self._waiting.append((line, example))
        if sum(len(one.targets.entropy) for _, one in self._waiting) >= self._places:
            self.flush()

    def flush(self) -> None:
        """Writes what waits. Raises DistillError where there is no room."""
        if not self._waiting:
            return
        examples = [example for _, example in self._waiting]
        found = joined([example.targets for example in examples])
        lengths = [(line, len(one.token_ids), one.first) for line, one in self._waiting]
        tensors = {
            "tokens": torch.tensor([token for one in examples for token in one.token_ids], dtype=torch.int32),
            "lengths": torch.tensor(lengths, dtype=torch.int64),
            **dict(zip(_TARGETS, (found.ids.int(), *found[1:]), strict=True)),
        }
        known = paths(self._folder)
        number = int(known[-1].stem) + 1 if known else 0
        scratch = self._folder / f".{number:05d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, scratch)
            scratch.rename(self._folder / f"{number:05d}.safetensors")
        except (OSError, SafetensorError) as error:
            raise DistillError(
                f"What was captured can't be written to {self._folder} ({error}); make room and go on with --resume."
            ) from error
        self.lines |= {line for line, _ in self._waiting}
        self._waiting = []


class _Place(NamedTuple):
    """Where an example lies: its shard, and its first and last token and target there."""

    shard: int
    tokens: tuple[int, int]
    targets: tuple[int, int]
    first: int


class Dataset:
    """The examples of a folder as packs of at most `pack_tokens` rows, in an order by seed and epoch."""

    def __init__(self, folder: Path, *, pack_tokens: int, seed: int) -> None:
        self._shards = [opened(path) for path in paths(folder)]
        self._seed = seed
        self._places: list[_Place] = []
        self._families: list[int] = []
        shared = self._index()
        if not self._places:
            raise DistillError(f"{folder} holds nothing to learn from.")
        self._sizes = [
            place.tokens[1] - place.tokens[0] - shared[f] for place, f in zip(self._places, self._families, strict=True)
        ]
        self._room = [max(pack_tokens - tokens, 1) for tokens in shared]
        self._epoch, self._first, self._packs = -1, 0, list[list[int]]()

    def __len__(self) -> int:
        return len(self._places)

    def batch(self, number: int) -> Pack:
        """Pack number `number` of an endless row of epochs; the same in every run."""
        if number < self._first:
            self._epoch, self._first, self._packs = -1, 0, []
        while number >= self._first + len(self._packs):
            self._first += len(self._packs)
            self._epoch += 1
            self._packs = self._order(self._epoch)
        return pack([self._example(index) for index in self._packs[number - self._first]])

    def packs_of_epoch(self) -> int:
        """About how many packs an epoch has."""
        return len(self._order(0))

    def targets(self) -> Iterator[tuple[Tensor, Targets]]:
        """The tokens of each shard and what was captured of it."""
        for shard in self._shards:
            yield shard.get_tensor("tokens").long(), _targets(shard, 0, len(shard.get_tensor("entropy")))

    def _index(self) -> list[int]:
        """Fills places and families; how many tokens each family shares."""
        known: dict[tuple[int, ...], int] = {}
        firsts: list[tuple[int, ...]] = []
        shared: list[int] = []
        for number, shard in enumerate(self._shards):
            tokens = shard.get_tensor("tokens").tolist()
            token, target = 0, 0
            for _, size, first in shard.get_tensor("lengths").tolist():
                own = tuple(tokens[token : token + size])
                family = known.setdefault(own[:FAMILY_TOKENS], len(known))
                if family == len(firsts):
                    firsts.append(own)
                    shared.append(first - 1)
                shared[family] = common_tokens([firsts[family], own], min(shared[family], first - 1))
                self._families.append(family)
                self._places.append(_Place(number, (token, token + size), (target, target + size - first), first))
                token, target = token + size, target + size - first
        return self._merged(shared)

    def _merged(self, shared: list[int]) -> list[int]:
        """Puts families of a single example together: they share nothing, but a pack of one would waste a step."""
        sizes = [0] * len(shared)
        for family in self._families:
            sizes[family] += 1
        self._families = [len(shared) if sizes[family] == 1 else family for family in self._families]
        return [*shared, 0]

    def _order(self, epoch: int) -> list[list[int]]:
        draw = np.random.default_rng([self._seed, epoch])
        order = draw.permutation(len(self._places)).tolist()
        packs = packed_order(self._families, self._sizes, order, self._room)
        return [packs[place] for place in draw.permutation(len(packs)).tolist()]

    def _example(self, index: int) -> Example:
        place = self._places[index]
        shard = self._shards[place.shard]
        tokens = shard.get_slice("tokens")[place.tokens[0] : place.tokens[1]]
        return Example(tuple(tokens.tolist()), place.first, _targets(shard, *place.targets))


def _targets(shard: Any, start: int, end: int) -> Targets:
    ids, *rest = (shard.get_slice(name)[start:end] for name in _TARGETS)
    return Targets(ids.long(), *rest)


def paths(folder: Path) -> list[Path]:
    """The finished shards of a folder, in order."""
    return sorted(folder.glob("?????.safetensors"))


def opened(path: Path) -> Any:
    """A shard, to be read in pieces. Raises DistillError for one that is damaged."""
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise DistillError(f"{path} is damaged ({error}); remove it and go on with --resume.") from error
