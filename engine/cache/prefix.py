"""Finds the KV blocks of a prefix that was computed before.

Only full blocks of committed steps are in the index. Together they form a tree: a block stands below the block of the
tokens before it, a first block stands below its scope (adapter and project salt). A block's key is a digest over its
parent's key and its token ids, the scope's key one over KV layout, model, adapter and salt; all fields are typed and
length-prefixed, so that no two different lists of fields read the same.

Keys only find candidates. A hit is confirmed by comparing the token ids, the parent and the scope, so a colliding
digest costs time and can never hand out a wrong block or another project's.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HashBytes = Callable[[bytes], bytes]

_UINT32 = next(code for code in "IL" if array(code).itemsize == 4)


def blake2b_128(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Scope:
    """Sequences of different scopes never share blocks."""

    adapter: str
    salt: str
    key: bytes = field(compare=False)


@dataclass(slots=True, eq=False)
class Entry:
    """One full block in the index. `depth` is 0 for the first block of a prompt."""

    key: bytes
    parent: Entry | None
    scope: Scope
    token_ids: tuple[int, ...]
    block: int
    depth: int
    children: set[Entry] = field(default_factory=set)


class PrefixIndex:
    """The tree of cached blocks of one model. Owns no references: whoever takes a block shares it in the pool."""

    def __init__(
        self, *, block_tokens: int, layout: str = "", model: str = "", hash_bytes: HashBytes = blake2b_128
    ) -> None:
        self.block_tokens = block_tokens
        self._layout = layout
        self._model = model
        self._hash = hash_bytes
        self._buckets: dict[bytes, list[Entry]] = {}
        self._by_block: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def scope(self, adapter: str, salt: str) -> Scope:
        fields = (self._layout, self._model, adapter, salt)
        return Scope(adapter, salt, self._hash(b"".join(_text_field(text) for text in fields)))

    def extend_keys(self, keys: list[bytes], scope: Scope, tokens: Sequence[int], num_tokens: int) -> None:
        """Appends the keys of the full blocks of `tokens[:num_tokens]` that `keys` lacks."""
        size = self.block_tokens
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            parent = keys[-1] if keys else scope.key
            keys.append(self._hash(_bytes_field(parent) + _token_field(tokens[start : start + size])))

    def key_of(self, block: int) -> bytes:
        return self._by_block[block].key

    def match(self, scope: Scope, keys: Sequence[bytes], tokens: Sequence[int]) -> list[Entry]:
        """The longest chain of entries that hold the first tokens, one a key."""
        chain: list[Entry] = []
        parent: Entry | None = None
        for depth, key in enumerate(keys):
            parent = self._find(parent, scope, key, self._block_of(tokens, depth))
            if parent is None:
                break
            chain.append(parent)
        return chain

    def insert(
        self, parent: Entry | None, scope: Scope, key: bytes, tokens: Sequence[int], depth: int, block: int
    ) -> Entry:
        """Adds block number `depth` of `tokens`. Returns the entry that was there already, with its own block, if the
        same tokens were committed before."""
        token_ids = self._block_of(tokens, depth)
        found = self._find(parent, scope, key, token_ids)
        if found is not None:
            return found
        entry = Entry(key, parent, scope, token_ids, block, depth)
        self._buckets.setdefault(key, []).append(entry)
        self._by_block[block] = entry
        if parent is not None:
            parent.children.add(entry)
        return entry

    def discard(self, block: int) -> list[int]:
        """Takes a block and all below it out of the index; returns their blocks."""
        entry = self._by_block[block]
        if entry.parent is not None:
            entry.parent.children.remove(entry)
        gone, lost = [entry], []
        while gone:
            entry = gone.pop()
            gone.extend(entry.children)
            lost.append(entry.block)
            del self._by_block[entry.block]
            bucket = self._buckets[entry.key]
            bucket.remove(entry)
            if not bucket:
                del self._buckets[entry.key]
        return lost

    def check_integrity(self) -> None:
        """Raises AssertionError when the tree, the buckets and the block map disagree."""
        entries = [entry for bucket in self._buckets.values() for entry in bucket]
        assert len(entries) == len(self._by_block), f"{len(entries)} entries for {len(self._by_block)} blocks"
        for entry in entries:
            assert self._by_block[entry.block] is entry, f"block {entry.block} belongs to another entry"
            if entry.parent is None:
                assert entry.depth == 0, "a first block has a depth"
            else:
                assert entry.depth == entry.parent.depth + 1, "a block's depth is not its parent's + 1"
                assert entry in entry.parent.children, "a parent doesn't know its child"
                assert self._by_block.get(entry.parent.block) is entry.parent, "a parent left before its child"

    def _block_of(self, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
        return tuple(tokens[depth * self.block_tokens : (depth + 1) * self.block_tokens])

    def _find(self, parent: Entry | None, scope: Scope, key: bytes, token_ids: tuple[int, ...]) -> Entry | None:
        for entry in self._buckets.get(key, ()):
            if entry.parent is parent and entry.token_ids == token_ids and entry.scope == scope:
                return entry
        return None


def _text_field(text: str) -> bytes:
    data = text.encode()
    return b"s" + len(data).to_bytes(8, "big") + data


def _bytes_field(data: bytes) -> bytes:
    return b"b" + len(data).to_bytes(8, "big") + data


def _token_field(token_ids: Sequence[int]) -> bytes:
    data = array(_UINT32, token_ids)
    return b"t" + len(data).to_bytes(8, "big") + data.tobytes()
