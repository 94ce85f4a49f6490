"""Finds prompts in which stable text stands after variable text, and puts it in front. Pure: no model, no money.

A prefix is computed once for all prompts that begin with it, so text that many prompts share is cheap at their
beginning and dear anywhere else. Messages are cut into pieces (sentences and lines); a piece that occurs in many of the
chats is *stable*, any other *variable*. The other order has the stable pieces of a message before its variable ones,
and, where no answer of the assistant stands between, messages that are all stable before the others; within both, the
order stays. Nothing is added or lost but white space where two pieces meet. Whether the other order brings anything is
not said here: who asks renders it, plans it, and compares; `Advice` holds what came of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Chat = Sequence[Mapping[str, Any]]

_PIECE = re.compile(r"\s*\S.*?(?:(?<=[.!?:])\s+|\s*\n\s*|\s*\Z)", re.DOTALL)
_LEAST_CHARS = 24  # shorter pieces, such as "Thank you.", are left where they are
_SHARE = 50  # one of so many chats must have a piece for it to be stable, and two at least
_MOST_SHOWN = 3
_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A stable piece that stands after variable text: in how many chats, and where in the first of them (0-based)."""

    text: str
    chats: int
    chat: int
    message: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOrder:
    """All chats in the other order; those in which nothing moves are as they were."""

    chats: list[Chat]
    num_moved: int
    misplaced: list[Misplaced]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the other order of `lines` lines would bring, of which it moves something in `moved_lines`: the cached
    tokens now and then, and what is saved on input. `misplaced` has the lines' numbers, as the API shows them."""

    lines: int
    moved_lines: int
    cached_tokens: int
    then_cached_tokens: int
    saved_nanos: int
    misplaced: list[dict[str, Any]]

    def __add__(self, other: Advice) -> Advice:
        """Of two windows; the places are those of the first."""
        more = {one["text"]: one["lines"] for one in other.misplaced}
        found = [{**one, "lines": one["lines"] + more.get(one["text"], 0)} for one in self.misplaced]
        return Advice(
            lines=self.lines + other.lines,
            moved_lines=self.moved_lines + other.moved_lines,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            then_cached_tokens=self.then_cached_tokens + other.then_cached_tokens,
            saved_nanos=self.saved_nanos + other.saved_nanos,
            misplaced=found or other.misplaced,
        )


def pieces(text: str) -> list[str]:
    """The sentences and lines of a text, with the white space after them: joined, they are the text again."""
    return _PIECE.findall(text)


def other_order(chats: Sequence[Chat]) -> OtherOrder | None:
    """The chats with stable text first. None: it stands there already."""
    stable = _stable(chats)
    reordered, misplaced, num_moved = [], _Misplacements(), 0
    for index, chat in enumerate(chats):
        found = list(_after_variable(chat, stable))
        if found:
            num_moved += 1
            misplaced.note(index, found)
            reordered.append(_reordered(chat, stable))
        else:
            reordered.append(chat)
    return OtherOrder(chats=reordered, num_moved=num_moved, misplaced=misplaced.worst()) if num_moved else None


def _stable(chats: Sequence[Chat]) -> frozenset[str]:
    counts: Counter[str] = Counter()
    for chat in chats:
        counts.update({piece.strip() for message in chat for piece in _pieces(message)})
    least = max(2, -(-len(chats) // _SHARE))
    return frozenset(piece for piece, count in counts.items() if count >= least and len(piece) >= _LEAST_CHARS)


def _pieces(message: Mapping[str, Any]) -> list[str]:
    """The pieces of a message that may be moved: not those of an answer, nor of content that isn't plain text."""
    content = message.get("content")
    return pieces(content) if isinstance(content, str) and message.get("role") != "assistant" else []


def _may_move(chat: Chat) -> bool:
    """Whether whole messages may: not in a dialogue, where each answers the one before."""
    return all(message.get("role") != "assistant" and isinstance(message.get("content"), str) for message in chat)


def _after_variable(chat: Chat, stable: frozenset[str]) -> Iterable[tuple[int, str]]:
    """Message and text of the stable pieces that move: in their message, or with it."""
    may_move, any_variable = _may_move(chat), False
    for number, message in enumerate(chat):
        keys = [piece.strip() for piece in _pieces(message)]
        is_all_stable = stable.issuperset(keys)
        seen = any_variable and may_move and is_all_stable
        for key in keys:
            if key not in stable:
                seen = True
            elif seen:
                yield number, key
        any_variable |= not is_all_stable


def _reordered(chat: Chat, stable: frozenset[str]) -> Chat:
    messages: list[Mapping[str, Any]] = []
    for message in chat:
        found = _pieces(message)
        first = [piece for piece in found if piece.strip() in stable]
        rest = [piece for piece in found if piece.strip() not in stable]
        moved = found[: len(first)] != first
        messages.append({**message, "content": _joined([*first, *rest])} if moved else message)
    if not _may_move(chat):
        return messages
    return sorted(messages, key=lambda message: not stable.issuperset(map(str.strip, _pieces(message))))


def _joined(moved: Sequence[str]) -> str:
    """Pieces as one text; those that come from the end of a text get the line break that they lack."""
    ended = [piece if piece[-1].isspace() else piece + "\n" for piece in moved]
    return "".join(ended).rstrip()


class _Misplacements:
    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}  # how many chats; the first one, and the message in it

    def note(self, chat: int, found: Iterable[tuple[int, str]]) -> None:
        for message, text in {text: (message, text) for message, text in reversed(list(found))}.values():
            self._found.setdefault(text, [0, chat, message])[0] += 1

    def worst(self) -> list[Misplaced]:
        most = sorted(self._found.items(), key=lambda item: (-item[1][0] * len(item[0]), item[0]))[:_MOST_SHOWN]
        return [
            Misplaced(text=text[:_SHOWN_CHARS], chats=chats, chat=chat, message=message)
            for text, (chats, chat, message) in most
        ]
