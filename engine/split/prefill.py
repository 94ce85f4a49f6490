"""The prefill side: computes prompts for decode engines, as far as these have room, and sends them the blocks.

It keeps nothing that anybody would miss: when it is killed, whoever asked asks another one. A prompt's blocks are
announced to the cache as needed until they are sent; if they were evicted all the same, the decode engine is sent what
is left and computes the rest. An engine that has work and gets nowhere for `hung_s` is told by silence: its links don't
beat, and whoever asked asks another one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from engine.cache.passing import Passing, Prefix
from engine.engine import Engine
from engine.errors import EngineError, PeerError, RequestError
from engine.request import Completion, Expectation, FinishReason, Lane, Request, SamplingParams
from engine.split.credits import Purse
from engine.split.link import SILENCE_S, Link, Wire
from engine.split.messages import (
    HEAD_BYTES,
    PIECE_BYTES,
    SAID_TWICE,
    Blocks,
    Bye,
    Cancel,
    Credit,
    Hello,
    Message,
    Offer,
    Prompt,
    Want,
    check,
    encode,
    most_prompt_bytes,
)
from engine.split.signed import NO_KEY, SignedWire, SplitKey
from engine.split.wires import Listener

ROLE = "prefill"
_WINDOW_STEPS = 4
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)  # the token is sampled once more where the answer is
_WAIT_S = 0.05
_AGAIN_S = 0.2  # after a connection that couldn't be taken
_MOST_PEERS = 64
_MOST_DECLINED = 16  # at once, with the reason
HUNG_S = 60.0


class _Work(NamedTuple):
    """A prompt that was sent. `name` is what our engine calls it: a peer may use an id again while what it cancelled
    still ends here."""

    prefix: Prefix
    lane: Lane
    name: str


@dataclass(slots=True)
class _Peer:
    """A decode side: its prompts that wait, and those that run or are offered. The first two fill its window."""

    link: Link
    since_s: float
    window_tokens: int
    purse: Purse | None = None  # None: it hasn't said what it is
    waiting: dict[str, _Work] = field(default_factory=dict)
    running: dict[str, _Work] = field(default_factory=dict)
    offered: dict[str, _Work] = field(default_factory=dict)
    held_tokens: Counter[Lane] = field(default_factory=Counter)  # of those that wait or run
    turn: Counter[Lane] = field(default_factory=Counter)  # tokens at which its next prompt comes

    def hold(self, work: _Work) -> None:
        """A prompt came. Raises PeerError where it is more than its lane's window has room for; a first one always is
        let in."""
        held_tokens, num_tokens = self.held_tokens[work.lane], len(work.prefix.token_ids)
        if held_tokens and held_tokens + num_tokens > self.window_tokens:
            raise PeerError(
                f"The other side sent a prompt of {num_tokens:,} tokens beside {held_tokens:,} of its lane that wait "
                f"or run, and {self.window_tokens:,} may at once."
            )
        self.held_tokens[work.lane] += num_tokens

    def let_go(self, work: _Work) -> None:
        """A prompt neither waits nor runs any more."""
        self.held_tokens[work.lane] -= len(work.prefix.token_ids)


@dataclass(slots=True)
class PrefillStats:
    """Totals since the start. `sent_bytes` are those of the blocks alone."""

    prompts: int = 0
    sent_blocks: int = 0
    sent_bytes: int = 0
    spared_blocks: int = 0  # offered, and there already


class PrefillSide:
    """Serves decode engines with `engine`, which is its alone. `step` is called again and again on one thread."""

    def __init__(
        self,
        engine: Engine,
        listener: Listener,
        *,
        step_tokens: int,
        key: SplitKey = NO_KEY,
        silence_s: float = SILENCE_S,
        hung_s: float = HUNG_S,
    ) -> None:
        self.stats = PrefillStats()
        self.moved_s = monotonic()  # when it was last seen to get somewhere, or to have nothing to do
        self.hung_s = hung_s
        self._closing = threading.Event()
        self._engine = engine
        self._listener = listener
        self._passing: Passing = engine.passing()
        self._window_tokens = _WINDOW_STEPS * step_tokens
        self._most_tokens = self._passing.num_blocks * self._passing.block_tokens
        self._key = key
        self._silence_s = silence_s
        self._declining = threading.Semaphore(_MOST_DECLINED)
        self._peers: list[_Peer] = []
        self._arrived: deque[_Peer] = deque()
        self._numbers = itertools.count()
        self._owners: dict[str, tuple[_Peer, str]] = {}  # of requests in the engine
        self._busy_blocks = 0
        most = self._passing.num_blocks
        self._most_busy = {Lane.INTERACTIVE: most * 3 // 4, Lane.BATCH: most // 2}  # blocks, when a prompt is begun
        self._turn: Counter[Lane] = Counter()
        self._wake = threading.Event()
        threading.Thread(target=self._accept, name="split accept", daemon=True).start()

    @property
    def address(self) -> str:
        """Where decode engines find it."""
        return self._listener.address

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def step(self) -> None:
        """Hears the peers, begins what they have credit for, and computes a step; waits a little without work."""
        self._wake.clear()
        for peer in self._welcome():
            try:
                for message in peer.link.take():
                    self._hear(peer, message)
                if peer.purse is None and monotonic() - peer.since_s > self.hung_s:
                    raise PeerError(f"The other side didn't say what it is within {self.hung_s:g} s.")
            except EngineError as error:
                peer.link.close(str(error))
            if peer.link.ending is not None:
                self._lose(peer)
        self._begin()
        if not self._engine.has_work():
            self.moved_s = monotonic()
            self._wake.wait(_WAIT_S)
            return
        computed_tokens = self._engine.stats().computed_tokens
        completions = self._engine.step().completions
        if completions or self._engine.stats().computed_tokens != computed_tokens:
            self.moved_s = monotonic()
        for completion in completions:
            self._offer(completion)

    def close(self) -> None:
        """Says goodbye to all."""
        self._closing.set()
        self._listener.close()
        for peer in self._peers:
            peer.link.close("The prefill engine was stopped.")
        self._engine.close()

    def _accept(self) -> None:
        numbers = itertools.count(1)
        while not self._closing.is_set():
            try:
                self._meet(self._listener.accept(), next(numbers))
            except Exception:  # too many open files, say, or one that was gone again: others come
                self._closing.wait(_AGAIN_S)

    def _meet(self, wire: Wire, number: int) -> None:
        if len(self._peers) + len(self._arrived) >= _MOST_PEERS:
            if not self._declining.acquire(blocking=False):
                wire.close()
                return
            threading.Thread(target=self._decline, args=(wire,), name="split decline", daemon=True).start()
            return
        link = Link(
            SignedWire(wire, self._key, is_listener=True, silence_s=self._silence_s),
            f"Decode engine {number}",
            self._wake,
            most_bytes=most_prompt_bytes(self._most_tokens),
            silence_s=self._silence_s,
            may_beat=lambda: not self._hangs(),
        )
        self._arrived.append(_Peer(link, monotonic(), self._window_tokens))
        self._wake.set()

    def _decline(self, wire: Wire) -> None:
        try:
            with contextlib.suppress(PeerError):
                wire.receive(HEAD_BYTES)  # its greeting: a transport may let nobody speak who doesn't listen
                wire.send(encode(Bye(sentence=f"This prefill engine serves {_MOST_PEERS} others already.")))
            wire.close()
        finally:
            self._declining.release()

    def _hangs(self) -> bool:
        return monotonic() - self.moved_s > self.hung_s

    def _welcome(self) -> list[_Peer]:
        while self._arrived:
            peer = self._arrived.popleft()
            self._peers.append(peer)
            peer.link.send(
                Hello(
                    origin=self._passing.origin,
                    role=ROLE,
                    window_tokens=self._window_tokens,
                    most_tokens=self._most_tokens,
                )
            )
        return list(self._peers)

    def _hear(self, peer: _Peer, message: Message) -> None:
        if isinstance(message, Hello):
            if peer.purse is not None:
                raise PeerError(SAID_TWICE)
            check(message, ROLE, self._passing.origin)
            peer.purse = Purse(message.most_blocks)
        elif peer.purse is None:
            raise PeerError("The other side spoke before it said what it is.")
        elif isinstance(message, Credit):
            peer.purse.earn(message.blocks, Lane.of(message.lane))
        elif isinstance(message, Prompt):
            num_tokens = len(message.token_ids)
            num_blocks = num_tokens // self._passing.block_tokens
            if not num_blocks or num_blocks * self._passing.block_tokens != num_tokens:
                raise PeerError("The other side sent a prompt that isn't whole blocks long.")
            if num_tokens > self._most_tokens:
                raise PeerError(f"The other side sent a prompt of {num_tokens:,} tokens; {self._most_tokens:,} fit.")
            if message.id in peer.waiting or message.id in peer.running or message.id in peer.offered:
                raise PeerError("The other side sent a prompt twice.")
            prefix = Prefix(token_ids=message.token_ids, salt=message.salt, adapter=message.adapter)
            work = _Work(prefix, Lane.of(message.lane), f"prompt {next(self._numbers)}")
            peer.hold(work)
            peer.waiting[message.id] = work
            peer.purse.queue(message.id, num_blocks, work.lane)
        elif isinstance(message, Want):
            self._send(peer, message)
        elif isinstance(message, Cancel):
            self._cancel(peer, message.id)
        else:
            raise PeerError("The other side sent what only a prefill engine may send.")

    def _begin(self) -> None:
        """Takes prompts for which there is credit, interactive ones first, until those that aren't sent yet fill the
        lane's share of the pool."""
        for lane in Lane:
            while self._busy_blocks <= self._most_busy[lane]:
                peer = self._next(lane)
                if peer is None:
                    break
                self._take(peer, lane)

    def _next(self, lane: Lane) -> _Peer | None:
        """The peer whose turn it is among those with a prompt to begin: each gets as many tokens as any other, however
        long its prompts are, and who had nothing to do saves nothing up."""
        ready = [peer for peer in self._peers if peer.purse is not None and peer.purse.first(lane) is not None]
        return min(ready, key=lambda peer: max(peer.turn[lane], self._turn[lane]), default=None)

    def _take(self, peer: _Peer, lane: Lane) -> None:
        """Begins the peer's next prompt."""
        assert peer.purse is not None
        prompt_id = peer.purse.first(lane)
        assert prompt_id is not None
        peer.purse.begin(lane)
        work = peer.waiting.pop(prompt_id)
        name, prefix = work.name, work.prefix
        num_tokens = len(prefix.token_ids)
        self._turn[lane] = max(peer.turn[lane], self._turn[lane])
        peer.turn[lane] = self._turn[lane] + num_tokens
        self.stats.prompts += 1
        self._busy_blocks += num_tokens // self._passing.block_tokens
        self._engine.scheduler.expect(
            name,
            Expectation(prompt_ids=prefix.token_ids, uses=((num_tokens, 1),), salt=prefix.salt, adapter=prefix.adapter),
        )
        if self._passing.num_cached(prefix) * self._passing.block_tokens == num_tokens:
            self._tell(peer, prompt_id, work, hit_tokens=num_tokens)
            return
        peer.running[prompt_id] = work
        self._owners[name] = (peer, prompt_id)
        try:
            self._engine.add(
                Request(
                    id=name,
                    prompt_ids=prefix.token_ids,
                    params=_PARAMS,
                    salt=prefix.salt,
                    lane=lane,
                    adapter=prefix.adapter,
                )
            )
        except RequestError:
            del peer.running[prompt_id], self._owners[name]
            self._give_up(peer, prompt_id, work)

    def _offer(self, completion: Completion) -> None:
        """A prompt came to its end."""
        peer, prompt_id = self._owners.pop(completion.request_id)
        work = peer.running.get(prompt_id)
        if work is None or work.name != completion.request_id:  # cancelled
            return
        del peer.running[prompt_id]
        if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._give_up(peer, prompt_id, work)
            return
        hit_tokens = completion.usage.hit_tokens
        is_whole = hit_tokens == len(work.prefix.token_ids) - 1  # its last is computed again, wherever it was cached
        self._tell(peer, prompt_id, work, hit_tokens=hit_tokens + is_whole)

    def _tell(self, peer: _Peer, prompt_id: str, work: _Work, *, hit_tokens: int) -> None:
        prefix = work.prefix
        keys = self._passing.keys(prefix)[: self._passing.num_cached(prefix)]
        if not keys:  # all of it was evicted again
            self._give_up(peer, prompt_id, work)
            return
        peer.let_go(work)
        peer.offered[prompt_id] = work
        peer.link.send(Offer(id=prompt_id, keys=keys, hit_tokens=hit_tokens))

    def _give_up(self, peer: _Peer, prompt_id: str, work: _Work) -> None:
        """The decode side computes it."""
        peer.let_go(work)
        self._forget(work)
        peer.link.send(Offer(id=prompt_id, keys=()))

    def _send(self, peer: _Peer, want: Want) -> None:
        work = peer.offered.pop(want.id, None)
        if work is None:
            return
        prefix = work.prefix
        num_blocks = self._passing.num_cached(prefix)
        piece = max(1, PIECE_BYTES // self._passing.block_bytes)
        starts = range(want.first, num_blocks, piece) or (want.first,)
        for start in starts:
            depths, data = self._passing.export(prefix, range(start, min(start + piece, num_blocks)))
            is_last = start + piece >= num_blocks
            peer.link.send(Blocks(id=want.id, first=start, count=len(depths), is_last=is_last, data=data))
            self.stats.sent_blocks += len(depths)
            self.stats.sent_bytes += len(depths) * self._passing.block_bytes
        self.stats.spared_blocks += min(want.first, num_blocks)
        self._forget(work)

    def _cancel(self, peer: _Peer, prompt_id: str) -> None:
        waiting = peer.waiting.pop(prompt_id, None)
        if waiting is not None and peer.purse is not None:
            peer.let_go(waiting)
            peer.purse.cancel(prompt_id)
        running = peer.running.pop(prompt_id, None)
        if running is not None:
            peer.let_go(running)
            self._engine.abort(running.name)
        begun = running or peer.offered.pop(prompt_id, None)
        if begun is not None:
            self._forget(begun)

    def _forget(self, work: _Work) -> None:
        self._busy_blocks -= len(work.prefix.token_ids) // self._passing.block_tokens
        self._engine.scheduler.expect(work.name, None)

    def _lose(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        for prompt_id in [*peer.waiting, *peer.running, *peer.offered]:
            self._cancel(peer, prompt_id)
