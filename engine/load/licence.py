"""A web page's main text as plain text, so that a licence that comes as a page can be read in a terminal."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_BLOCKS = {"p", "h1", "h2", "h3", "h4", "li", "div", "tr", "br", "section"}
_UNSEEN = {"script", "style"}
_MAIN = "article-body"


def plain_text(page: str) -> str:
    """The text of the page's article, or of all of it where none is marked; paragraphs are apart by an empty line."""
    return _read(page, is_whole=False) or _read(page, is_whole=True)


def _read(page: str, *, is_whole: bool) -> str:
    reader = _Reader(is_whole=is_whole)
    reader.feed(page)
    reader.close()
    text = re.sub(r"[ \t]+", " ", "".join(reader.pieces))
    return re.sub(r" ?\n[\n ]*", "\n\n", text).strip()


class _Reader(HTMLParser):
    def __init__(self, *, is_whole: bool) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._is_inside = is_whole
        self._is_whole = is_whole
        self._num_unseen = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if _MAIN in (dict(attrs).get("class") or ""):
            self._is_inside = True
        self._num_unseen += tag in _UNSEEN
        if tag in _BLOCKS:
            self._add("\n")

    def handle_endtag(self, tag: str) -> None:
        self._num_unseen -= tag in _UNSEEN and self._num_unseen > 0
        if tag == "article":
            self._is_inside = self._is_whole
        if tag in _BLOCKS:
            self._add("\n")

    def handle_data(self, data: str) -> None:
        self._add(re.sub(r"\s+", " ", data))

    def _add(self, text: str) -> None:
        if self._is_inside and not self._num_unseen:
            self.pieces.append(text)
