"""The prefix index against brute force, also under hash functions that always or often collide."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache.prefix import Entry, HashBytes, PrefixIndex, blake2b_128

SIZE = 2
HASHES: list[HashBytes] = [blake2b_128, lambda _data: b"same", lambda data: blake2b_128(data)[:1]]


class IndexMachine(RuleBasedStateMachine):
    """Chains of blocks over few token ids in two scopes; the oracle is a dict from (scope, tokens) to block."""

    hash_bytes: HashBytes = staticmethod(blake2b_128)

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(block_tokens=SIZE, hash_bytes=type(self).hash_bytes)
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}
        self.next_block = 0

    tokens = st.lists(st.integers(0, 2), max_size=9)
    salts = st.sampled_from(["", "a"])

    def lookup(self, salt: str, tokens: list[int]) -> list[Entry]:
        scope, keys = self.index.scope("", salt), []
        self.index.extend_keys(keys, scope, tokens, len(tokens))
        assert len(keys) == len(tokens) // SIZE
        return self.index.match(scope, keys, tokens)

    @rule(tokens=tokens, salt=salts)
    def insert(self, tokens: list[int], salt: str) -> None:
        scope, keys, parent = self.index.scope("", salt), [], None
        self.index.extend_keys(keys, scope, tokens, len(tokens))
        for depth, key in enumerate(keys):
            prefix = (salt, tuple(tokens[: (depth + 1) * SIZE]))
            parent = self.index.insert(parent, scope, key, tokens, depth, self.next_block)
            assert parent.block == self.known.setdefault(prefix, self.next_block)
            self.next_block += 1

    @rule(tokens=tokens, salt=salts)
    def match(self, tokens: list[int], salt: str) -> None:
        expected = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block = self.known.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            expected.append(block)
        assert [entry.block for entry in self.lookup(salt, tokens)] == expected

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        salt, tokens = data.draw(st.sampled_from(sorted(self.known)))
        below = {k: b for k, b in self.known.items() if k[0] == salt and k[1][: len(tokens)] == tokens}
        assert sorted(self.index.discard(self.known[salt, tokens])) == sorted(below.values())
        for key in below:
            del self.known[key]

    @invariant()
    def the_tree_is_whole(self) -> None:
        self.index.check_integrity()
        assert len(self.index) == len(self.known)


def machine(hash_bytes: HashBytes) -> type:
    kind = type("Machine", (IndexMachine,), {"hash_bytes": staticmethod(hash_bytes)})
    kind.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
    return kind.TestCase


TestIndex = machine(HASHES[0])
TestIndexWhereAllKeysCollide = machine(HASHES[1])
TestIndexWhereManyKeysCollide = machine(HASHES[2])


def root_key(layout: str, model: str, adapter: str, salt: str) -> bytes:
    return PrefixIndex(block_tokens=SIZE, layout=layout, model=model).scope(adapter, salt).key


texts = st.tuples(*[st.text("ab\0", max_size=3)] * 4)


@given(texts, texts)
def test_scope_keys_are_equal_only_for_equal_fields(a: tuple[str, ...], b: tuple[str, ...]) -> None:
    assert (root_key(*a) == root_key(*b)) == (a == b)


@pytest.mark.parametrize("shift", [8, 16, 24, 31])
def test_no_bit_of_a_token_id_is_lost_in_the_key(shift: int) -> None:
    index = PrefixIndex(block_tokens=SIZE)
    keys: list[list[bytes]] = [[], []]
    index.extend_keys(keys[0], index.scope("", ""), [3, 4], 2)
    index.extend_keys(keys[1], index.scope("", ""), [3, 4 ^ (1 << shift)], 2)
    assert keys[0] != keys[1]


def test_a_key_depends_on_all_tokens_before_it() -> None:
    index = PrefixIndex(block_tokens=SIZE)
    keys: list[list[bytes]] = [[], []]
    index.extend_keys(keys[0], index.scope("", ""), [1, 2, 5, 6], 4)
    index.extend_keys(keys[1], index.scope("", ""), [1, 3, 5, 6], 4)
    assert keys[0][1] != keys[1][1]


def test_keys_grow_one_block_at_a_time_to_the_same_chain() -> None:
    index, tokens = PrefixIndex(block_tokens=SIZE), [1, 2, 3, 4, 5]
    scope, at_once, grown = index.scope("x", "y"), [], []
    index.extend_keys(at_once, scope, tokens, 5)
    for known in range(6):
        index.extend_keys(grown, scope, tokens, known)
    assert grown == at_once
    assert len(grown) == 2
