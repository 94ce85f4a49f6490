"""The decode side: an engine whose prompts another one computes, with the same methods as an engine of its own.

It owns its requests from the first to the last moment. A prompt goes to a prefill engine, its blocks come into the
cache here, then the request runs as any other does and finds them. What is already cached here when it arrives, or
shorter than a block, runs at once; all else is asked for in order of lane and arrival.

    queued -> asked (a prompt was sent) -> coming (its blocks are wanted) -> in the engine -> ended

When a prefill engine is lost, its prompts go to another. Nothing waits for ever: where none was connected for
`patience_s` this engine computes the prompts itself, those of interactive requests at once, and so it does with a
prompt that was lost with three prefill engines.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from engine.cache.passing import Prefix
from engine.engine import Engine
from engine.errors import EngineError, PeerError, RequestError
from engine.intake import EngineStats
from engine.request import Completion, Expectation, FinishReason, Lane, Request, StepOutput, Usage
from engine.split.credits import Grants
from engine.split.link import Link
from engine.split.messages import (
    SAID_TWICE,
    Blocks,
    Cancel,
    Credit,
    Hello,
    Message,
    Offer,
    Prompt,
    Want,
    check,
    most_piece_bytes,
)
from engine.split.peers import Peers

ROLE = "decode"
_SHARE = 4  # one block in so many may be held for what doesn't run yet, for each lane
_WAIT_S = 0.02
_MOST_LOSSES = 3  # of a prompt, each with its prefill engine: then it may be the prompt's fault
PATIENCE_S = 30.0


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that isn't in the engine, or has no token yet. `number` names its prompt on the link that it was sent
    over; `hit_tokens` comes with the offer. `losses` are prefill engines that were lost with it."""

    rank: tuple[int, int]
    request: Request
    prefix: Prefix
    number: str = ""
    hit_tokens: int | None = None
    keys: list[bytes] = field(default_factory=list)  # of blocks that are on their way for it
    losses: int = 0

    @property
    def lane(self) -> Lane:
        return Lane.of(self.request.lane)

    def __lt__(self, other: _Pending) -> bool:
        return self.rank < other.rank


@dataclass(slots=True)
class _Peer:
    """A prefill side that said what it is. `asked` are prompts in their order, `coming` keys of blocks under way."""

    link: Link
    window_tokens: int = 0
    most_tokens: int = 0
    is_known: bool = False
    asked: dict[str, _Pending] = field(default_factory=dict)
    coming: set[bytes] = field(default_factory=set)
    asked_tokens: Counter[Lane] = field(default_factory=Counter)  # that fill its window

    def load(self, lane: Lane) -> tuple[int, int]:
        """What a prompt of this lane waits for here; between equals, all that it has to do."""
        return sum(self.asked_tokens[other] for other in Lane if other <= lane), self.asked_tokens.total()

    def has_room(self, num_tokens: int, lane: Lane) -> bool:
        """Whether a prompt fits into its window; a first one always does."""
        asked_tokens = self.asked_tokens[lane]
        return not asked_tokens or asked_tokens + num_tokens <= self.window_tokens


@dataclass(slots=True)
class DecodeStats:
    """Totals since the start. `received_bytes` are those of the blocks alone; `lost_blocks` came too late to be of use,
    `spared_prompts` were cached here; `own_prompts` waited in vain and were computed here."""

    handed_over: int = 0
    received_blocks: int = 0
    received_bytes: int = 0
    lost_blocks: int = 0
    spared_prompts: int = 0
    own_prompts: int = 0
    lost_peers: int = 0
    most_open_blocks: int = 0


def most_bytes(engine: Engine) -> int:
    """Of a frame from a prefill engine: what the links of a decode side let in."""
    return most_piece_bytes(engine.passing().block_bytes)


class DecodeSide:
    """`add`, `abort`, `expect`, `stats` and `note` may be called from any thread, all else from the one that steps."""

    def __init__(self, engine: Engine, peers: Peers, wake: threading.Event, *, patience_s: float = PATIENCE_S) -> None:
        self.split = DecodeStats()
        self._patience_s = patience_s
        self._alone_since_s = monotonic()  # where no prefill engine is connected
        self._engine = engine
        self._links = peers
        self._wake = wake
        self._passing = engine.passing()
        self._grants = Grants(max(1, self._passing.num_blocks // _SHARE))
        self._peers: list[_Peer] = []
        self._lock = threading.Lock()
        self._inbox: deque[Request | str] = deque()
        self._open: set[str] = set()
        self._queue: list[_Pending] = []  # a heap
        self._outside: dict[str, _Pending] = {}  # by request: queued, asked or coming
        self._asked_of: dict[str, _Peer] = {}  # prompts without credit, the aborted ones included
        self._inside: dict[str, _Pending] = {}  # handed to the engine, until their first token
        self._hit_tokens: dict[str, int] = {}  # of requests in the engine: what the prefill side's cache held
        self._arrivals = itertools.count()
        self._numbers = itertools.count()

    def add(self, request: Request) -> None:
        """As Engine.add."""
        with self._lock:
            if request.id in self._open:
                raise RequestError(f"There is an unfinished request {request.id}.", code="invalid_value", param="id")
            self._open.add(request.id)
            self._inbox.append(request)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """As Engine.abort."""
        with self._lock:
            if request_id in self._open:
                self._inbox.append(request_id)
        self._wake.set()

    def expect(self, name: str, expectation: Expectation | None) -> None:
        """As Engine.expect."""
        self._engine.expect(name, expectation)

    def has_work(self) -> bool:
        """Whether anything isn't ended, even if all of it waits for a prefill engine; or one of them has something to
        say."""
        has_news = self._links.has_new or any(peer.link.has_news for peer in self._peers)
        return bool(self._open) or self._engine.has_work() or has_news

    def is_ready(self) -> bool:
        """Whether a prefill engine is connected."""
        return any(peer.is_known for peer in self._peers)

    def num_unfinished(self) -> int:
        return len(self._open)

    def stats(self) -> EngineStats:
        """As Engine.stats: what waits for its prompt isn't counted as waiting for this engine."""
        return self._engine.stats()

    def signals(self) -> dict[str, Any]:
        """As Engine.signals: a first token counts from when its prompt was here."""
        return self._engine.signals()

    def note(self) -> str | None:
        """What it is waiting for, in a sentence, while no prefill engine is connected."""
        if self.is_ready():
            return None
        waiting, reason = len(self._outside), self._links.reason()
        behind = f", and {waiting} request{' waits' if waiting == 1 else 's wait'} for one" if waiting else ""
        return f"No prefill engine is connected{behind}{f': {reason}' if reason else '.'}"

    def step(self) -> StepOutput:
        """Hears the prefill engines, asks them for prompts, and computes a step of what has come; waits a little
        without work."""
        self._wake.clear()
        output = StepOutput()
        self._take_in(output)
        self._hear()
        self._ask()
        self._grant()
        if self._engine.has_work():
            output.add_all(self._engine.step())
            self._follow(output)
        elif not output.completions:
            began_s = monotonic()
            self._wake.wait(_WAIT_S)
            output.idle_s = monotonic() - began_s
        with self._lock:
            self._open.difference_update(completion.request_id for completion in output.completions)
        return output

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Runs requests and returns their completions in order. For measuring and tests."""
        wanted = list(requests)
        found: dict[str, Completion] = {}
        for request in wanted:
            self.add(request)
        while len(found) < len(wanted):
            found |= {completion.request_id: completion for completion in self.step().completions}
        return [found[request.id] for request in wanted]

    def close(self) -> None:
        """Takes no more requests, and says goodbye."""
        self._links.close()
        for peer in self._peers:
            peer.link.close("The decode engine was stopped.")
        self._engine.close()

    def _take_in(self, output: StepOutput) -> None:
        with self._lock:
            taken = list(self._inbox)
            self._inbox.clear()
        for item in taken:
            if isinstance(item, str):
                self._abort(item, output)
            elif item.pooling is not None:
                self._engine.add(item)
            else:
                tokens = [*item.prompt_ids, *item.resume_ids]
                prefix = Prefix(
                    token_ids=tokens[: self._passing.whole_blocks(tokens)], salt=item.salt, adapter=item.adapter
                )
                pending = _Pending((item.lane, next(self._arrivals)), item, prefix)
                self._outside[item.id] = pending
                if not self._start_spared(pending):
                    heapq.heappush(self._queue, pending)

    def _start_spared(self, pending: _Pending) -> bool:
        """Hands a request whose prompt needs nobody to the engine."""
        num_blocks = len(pending.prefix.token_ids) // self._passing.block_tokens
        if self._passing.num_cached(pending.prefix) < num_blocks:
            return False
        self.split.spared_prompts += num_blocks > 0
        self._start(None, pending)
        return True

    def _abort(self, request_id: str, output: StepOutput) -> None:
        pending = self._outside.pop(request_id, None)
        if pending is None:
            self._engine.abort(request_id)
            return
        peer = self._peer_of(pending)
        if peer is not None:
            peer.link.send(Cancel(id=pending.number))
            self._drop(peer, pending)
        usage = Usage(len(pending.request.prompt_ids), 0, 0)
        output.completions.append(
            Completion(request_id=request_id, token_ids=(), text="", finish_reason=FinishReason.ABORT, usage=usage)
        )

    def _peer_of(self, pending: _Pending) -> _Peer | None:
        return next((peer for peer in self._peers if pending.number in peer.asked), None)

    def _hear(self) -> None:
        for link in self._links.take_new():
            link.send(Hello(origin=self._passing.origin, role=ROLE, most_blocks=self._grants.most_blocks))
            self._peers.append(_Peer(link))
        for peer in list(self._peers):
            try:
                for message in peer.link.take():
                    self._read(peer, message)
            except EngineError as error:
                self._links.refused(peer.link, str(error))
                peer.link.close(str(error))
            if peer.link.ending is not None:
                self._lose(peer)

    def _read(self, peer: _Peer, message: Message) -> None:
        if isinstance(message, Hello):
            if peer.is_known:
                raise PeerError(SAID_TWICE)
            check(message, ROLE, self._passing.origin)
            peer.window_tokens, peer.most_tokens = message.window_tokens, message.most_tokens
            peer.is_known = True
        elif not peer.is_known:
            raise PeerError("The other side spoke before it said what it is.")
        elif isinstance(message, Offer):
            self._want(peer, message)
        elif isinstance(message, Blocks):
            self._adopt(peer, message)
        else:
            raise PeerError("The other side sent what only a decode engine may send.")

    def _want(self, peer: _Peer, offer: Offer) -> None:
        pending = peer.asked.get(offer.id)
        if pending is None:  # nobody waits for it any more
            return
        if pending.hit_tokens is not None:
            raise PeerError("The other side offered a prompt twice.")
        peer.asked_tokens[pending.lane] -= len(pending.prefix.token_ids)
        if not offer.keys:  # it can't be computed there, so it is here
            self._start(peer, pending)
            return
        keys = self._passing.keys(self._as_sent(pending.prefix))
        if list(offer.keys) != keys[: len(offer.keys)]:
            raise PeerError("Its blocks have other keys than ours of the same tokens.")
        pending.hit_tokens = offer.hit_tokens
        first = self._passing.num_cached(pending.prefix)
        while first < len(keys) and keys[first] in peer.coming:
            first += 1
        pending.keys = list(offer.keys[first:])
        peer.coming.update(pending.keys)
        self._keep(pending, is_kept=True)
        peer.link.send(Want(id=offer.id, first=first))

    def _adopt(self, peer: _Peer, blocks: Blocks) -> None:
        pending = peer.asked.get(blocks.id)
        self.split.received_blocks += blocks.count
        self.split.received_bytes += blocks.count * self._passing.block_bytes
        if pending is None:
            self.split.lost_blocks += blocks.count
            return
        if pending.hit_tokens is None:
            raise PeerError("The other side sent blocks of a prompt that it hasn't offered.")
        if blocks.count:
            depths = range(blocks.first, blocks.first + blocks.count)
            if depths.stop > len(pending.prefix.token_ids) // self._passing.block_tokens:
                raise PeerError("The other side sent blocks behind the end of a prompt.")
            self.split.lost_blocks += blocks.count - self._passing.adopt(pending.prefix, depths, blocks.data)
        if blocks.is_last:
            self.split.handed_over += 1
            self._start(peer, pending)

    def _ask(self) -> None:
        """Sends prompts on, in order, to whom has the least to do; what needs nobody runs at once."""
        while self._queue:
            pending = self._queue[0]
            if self._outside.get(pending.request.id) is not pending:  # aborted
                heapq.heappop(self._queue)
                continue
            if self._start_spared(pending):
                heapq.heappop(self._queue)
                continue
            if self._computes_itself(pending):
                heapq.heappop(self._queue)
                self.split.own_prompts += 1
                self._start(None, pending)
                continue
            size, lane = len(pending.prefix.token_ids), pending.lane
            peer = self._least_busy(size, lane)
            if peer is None or not peer.has_room(size, lane):
                return
            heapq.heappop(self._queue)
            pending.number = str(next(self._numbers))
            peer.asked[pending.number] = pending
            peer.asked_tokens[lane] += size
            sent = self._as_sent(pending.prefix)
            peer.link.send(
                Prompt(
                    id=pending.number,
                    token_ids=sent.token_ids,
                    salt=sent.salt,
                    adapter=sent.adapter,
                    lane=pending.request.lane,
                )
            )
            self._grants.ask(pending.number, size // self._passing.block_tokens, lane)
            self._asked_of[pending.number] = peer

    def _as_sent(self, prefix: Prefix) -> Prefix:
        """The prefix as prefill engines know it: a salt is a secret of its project, and stays here."""
        return replace(prefix, salt=self._links.key.salt(prefix.salt))

    def _least_busy(self, size: int, lane: Lane) -> _Peer | None:
        """Of those that can hold a prompt of so many tokens."""
        fitting = [peer for peer in self._peers if peer.is_known and size <= peer.most_tokens]
        return min(fitting, key=lambda peer: peer.load(lane), default=None)

    def _computes_itself(self, pending: _Pending) -> bool:
        """Whether no prefill engine is to be waited for with this prompt."""
        if pending.losses >= _MOST_LOSSES:
            return True
        size = len(pending.prefix.token_ids)
        if self.is_ready() and all(size > peer.most_tokens for peer in self._peers if peer.is_known):
            return True
        patience_s = 0.0 if pending.request.lane == Lane.INTERACTIVE else self._patience_s
        return not self.is_ready() and monotonic() - self._alone_since_s >= patience_s

    def _grant(self) -> None:
        for grant in self._grants.grant(self._passing.num_available):
            self._asked_of.pop(grant.name).link.send(Credit(blocks=grant.blocks, lane=grant.lane))
        self.split.most_open_blocks = max(self.split.most_open_blocks, self._grants.open_blocks)

    def _start(self, peer: _Peer | None, pending: _Pending) -> None:
        """The request goes into the engine; its credit is free once it runs."""
        request = pending.request
        del self._outside[request.id]
        if peer is not None:
            del peer.asked[pending.number]
            peer.coming.difference_update(pending.keys)
            is_first = not request.resume_ids and not request.resume_choices
            if is_first and pending.hit_tokens is not None:
                self._hit_tokens[request.id] = min(pending.hit_tokens, len(request.prompt_ids) - 1)
            self._inside[request.id] = pending
        self._engine.add(request)

    def _follow(self, output: StepOutput) -> None:
        """Frees the credit of what runs, and says of a prompt what the cache of its prefill engine held."""
        for request_id in [*output.new_tokens, *(completion.request_id for completion in output.completions)]:
            pending = self._inside.pop(request_id, None)
            if pending is not None:
                self._grants.free(pending.number)
                self._keep(pending, is_kept=False)
        for request_id in output.hit_tokens.keys() & self._hit_tokens.keys():
            output.hit_tokens[request_id] = self._hit_tokens[request_id]
        for index, completion in enumerate(output.completions):
            hit_tokens = self._hit_tokens.pop(completion.request_id, None)
            if hit_tokens is not None and completion.usage.output_tokens:
                usage = replace(completion.usage, hit_tokens=hit_tokens)
                output.completions[index] = replace(completion, usage=usage)

    def _keep(self, pending: _Pending, *, is_kept: bool) -> None:
        """Has the cache keep the prompt's blocks, until its request has them."""
        prefix = pending.prefix
        uses = Expectation(
            prompt_ids=prefix.token_ids,
            uses=((len(prefix.token_ids), 1),),
            salt=prefix.salt,
            adapter=prefix.adapter,
        )
        self._engine.scheduler.expect(f"split {pending.number}", uses if is_kept else None)

    def _drop(self, peer: _Peer, pending: _Pending) -> None:
        """The prompt is no longer asked for there."""
        del peer.asked[pending.number]
        if pending.hit_tokens is None:
            peer.asked_tokens[pending.lane] -= len(pending.prefix.token_ids)
        peer.coming.difference_update(pending.keys)
        self._grants.free(pending.number)
        self._keep(pending, is_kept=False)
        pending.keys, pending.number, pending.hit_tokens = [], "", None

    def _lose(self, peer: _Peer) -> None:
        """What was asked of it is asked of another."""
        self._peers.remove(peer)
        if peer.is_known:
            self.split.lost_peers += 1
            self._alone_since_s = monotonic()
        elif peer.link.ending is not None:
            self._links.refused(peer.link, peer.link.ending)
        lost = list(peer.asked.values())
        unpaid = {number for number, asked_of in self._asked_of.items() if asked_of is peer}
        self._grants.forget(unpaid | peer.asked.keys())
        for number in unpaid:
            del self._asked_of[number]
        for pending in lost:
            self._drop(peer, pending)
            pending.losses += 1
            heapq.heappush(self._queue, pending)
