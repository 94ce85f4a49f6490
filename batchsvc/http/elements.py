"""Takes a JSON object apart whose one field is a long array of objects, as its bytes come: no more than one is held.

Only what is around the objects is read here; each comes out as its own bytes, for a parser that reads it as strictly as
it likes. A body of any other shape raises NotAnArrayError at its first byte that differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto

_OUTSIDE, _INSIDE = re.compile(rb'["{}\[\]]'), re.compile(rb'["\\]')
_SPACE, _SPACES = b" \t\r\n", re.compile(rb"[ \t\r\n]*")
_MOST_HEAD_BYTES = 1024


class NotAnArrayError(Exception):
    """The body isn't an object with this one array of objects."""


class ElementTooLargeError(Exception):
    """An object of the array is larger than one may be; `index` says which."""

    def __init__(self, index: int) -> None:
        super().__init__(f"element {index}")
        self.index = index


class _Place(Enum):
    """Where in the body the next byte stands."""

    HEAD = auto()
    FIRST = auto()  # before the first object, or the end of an empty array
    NEXT = auto()  # after a comma
    OBJECT = auto()
    AFTER = auto()  # after an object
    TAIL = auto()  # after the array
    END = auto()


class Elements:
    """The objects of the array `name`. Call `feed` with each piece, and `finish` after the last."""

    def __init__(self, name: str, *, most_bytes: int) -> None:
        self._head = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"%s"[ \t\r\n]*:[ \t\r\n]*\[' % re.escape(name.encode()))
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._at = 0  # how far the buffer was looked at
        self._place = _Place.HEAD
        self._depth = 0
        self._is_in_string = False
        self._index = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The objects that end with this piece."""
        self._buffer += piece
        while self._at < len(self._buffer) or self._place is _Place.HEAD:
            if self._place is _Place.HEAD:
                if not self._skip_head():
                    return
            elif self._place is not _Place.OBJECT:
                self._between()
            elif self._skip_object():
                yield bytes(self._buffer[: self._at])
                self._drop()
                self._place, self._index = _Place.AFTER, self._index + 1
            else:
                if len(self._buffer) > self._most_bytes:
                    raise ElementTooLargeError(self._index)
                return

    def finish(self) -> None:
        """Raises NotAnArrayError for a body that ends too early."""
        if self._place is not _Place.END:
            raise NotAnArrayError

    def _skip_head(self) -> bool:
        found = self._head.match(self._buffer)
        if found is None:
            first = bytes(self._buffer.lstrip(_SPACE)[:1])
            if len(self._buffer) > _MOST_HEAD_BYTES or first not in (b"", b"{"):
                raise NotAnArrayError
            return False
        self._at, self._place = found.end(), _Place.FIRST
        self._drop()
        return True

    def _between(self) -> None:
        spaces = _SPACES.match(self._buffer, self._at)
        self._at = spaces.end() if spaces else self._at
        byte = bytes(self._buffer[self._at : self._at + 1])
        self._at += len(byte)
        match self._place, byte:
            case _Place.FIRST | _Place.NEXT, b"{":
                self._at -= 1
                self._drop()
                self._place, self._depth = _Place.OBJECT, 0
            case _Place.FIRST | _Place.AFTER, b"]":
                self._place = _Place.TAIL
            case _Place.AFTER, b",":
                self._place = _Place.NEXT
            case _Place.TAIL, b"}":
                self._place = _Place.END
            case _, b"":
                self._drop()  # of a body there may be gigabytes of spaces
            case _:
                raise NotAnArrayError

    def _skip_object(self) -> bool:
        """Look on to the object's end. False: it isn't here yet."""
        while True:
            found = (_INSIDE if self._is_in_string else _OUTSIDE).search(self._buffer, self._at)
            if found is None:
                self._at = len(self._buffer)
                return False
            sign, self._at = bytes(found[0]), found.end()
            if sign == b"\\":
                if self._at == len(self._buffer):  # what it escapes comes with the next piece
                    self._at -= 1
                    return False
                self._at += 1
            elif sign == b'"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if sign in b"{[" else -1
                if self._depth == 0:
                    return True

    def _drop(self) -> None:
        del self._buffer[: self._at]
        self._at = 0
