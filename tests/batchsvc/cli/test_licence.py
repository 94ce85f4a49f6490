"""A licence is shown before it is accepted, and where nobody can answer the command ends with the way out."""

from __future__ import annotations

import io
import sys

import pytest

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.licence import asking
from engine.load.licence import plain_text
from engine.load.wheels import Agreement, Licence, Member

AGREEMENT = Agreement(
    "duo", Licence(name="Terms of Kindness", url="https://kind.example", text=Member("duo", "duo/T.html")), "Be kind."
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_flag_accepts_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert asking(Console(as_json=True), is_accepted=True)(AGREEMENT)
    shown = capsys.readouterr()
    assert shown.err == "Terms of Kindness (https://kind.example)\n\nBe kind.\n\n"
    assert shown.out == ""


def test_without_a_terminal_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(CommandError, match="Terms of Kindness above; pull it with --accept-licence") as raised:
        asking(Console(), is_accepted=False)(AGREEMENT)
    assert raised.value.code is Exit.USAGE


@pytest.mark.parametrize(("answer", "is_accepted"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_at_a_terminal_it_is_asked(answer: str, is_accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert asking(Console(), is_accepted=False)(AGREEMENT) is is_accepted


def test_a_page_becomes_its_paragraphs() -> None:
    page = (
        "<nav>menu</nav><article><style>p {}</style><div class='the article-body'><h2>Section 1</h2>"
        "<p>You &amp; <b>I</b>\n agree.</p><script>x()</script></div></article><footer>end</footer>"
    )
    assert plain_text(page) == "Section 1\n\nYou & I agree."
    assert plain_text("<p>One.</p><p>Two.</p>") == "One.\n\nTwo."
