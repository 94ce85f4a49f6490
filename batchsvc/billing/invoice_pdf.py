"""An invoice as a PDF, by fpdf2: the same bytes every time, right-to-left names in their order, letters joined.

FiraGO has Latin, Greek, Cyrillic, Arabic, Hebrew, Thai, Devanagari and Georgian letters. What it lacks comes from the
fonts of `batchsvc[fonts]`, if they are installed: Chinese, Japanese, Korean and most others. What no font has is
refused by name, because a bill with blanks in it would be worse than none.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from importlib import resources
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from fontTools.ttLib import TTFont
from fpdf import FPDF
from fpdf.enums import TableBordersLayout, VAlign
from fpdf.fonts import FontFace

from batchsvc.billing.invoice_document import COLUMNS, Document
from batchsvc.errors import InvalidRequestError

_FAMILY = "FiraGO"
_MORE = ("KurintoSans-Rg", "KurintoSansSC-Rg", "KurintoSansTC-Rg", "KurintoSansJP-Rg", "KurintoSansKR-Rg")
_WIDTHS = (26, 18, 50, 24, 26, 36)
_ALIGN = ("LEFT", "LEFT", "LEFT", "RIGHT", "RIGHT", "RIGHT")
_BOLD = FontFace(emphasis="BOLD")


class _Pages(FPDF):
    """Pages that say at their foot to which document they belong."""

    foot = ""

    def footer(self) -> None:
        self.set_y(-15)
        self.set_font(_FAMILY, "", 8)
        self.cell(0, 5, f"{self.foot}, page {self.page_no()} of {{nb}}", align="R")


def pdf(document: Document) -> bytes:
    """The file. Raises InvalidRequestError (code `no_glyph`) if no font has a letter of it."""
    with TemporaryDirectory() as folder:  # fpdf2 takes fonts as files only
        page = _Pages(format="A4")
        for style, data in _fira().items():
            path = Path(folder) / f"fira{style}.ttf"
            path.write_bytes(data)
            page.add_font(_FAMILY, style, path)
        more = _fonts_for(_letters(document) - _fira_glyphs())
        for path in more:
            page.add_font(path.stem, "", path)
        page.set_fallback_fonts([path.stem for path in more], exact_match=False)
        page.set_text_shaping(True)
        _draw(page, document)
        return bytes(page.output())


def _draw(page: _Pages, document: Document) -> None:
    page.foot = f"{document.title} {document.facts[0][1]}"
    page.set_title(page.foot)
    page.set_creation_date(datetime.fromtimestamp((document.issued_ms or 0) // 1000, UTC))
    page.add_page()
    page.set_font(_FAMILY, "B", 16)
    page.cell(0, 10, document.title, new_x="LMARGIN", new_y="NEXT")
    page.set_font(_FAMILY, "", 9)
    for name, value in document.facts:
        page.cell(40, 5, name)
        page.cell(0, 5, value, new_x="LMARGIN", new_y="NEXT")
    page.ln(4)
    with page.table(borders_layout=TableBordersLayout.NONE, v_align=VAlign.T, line_height=5) as parties:
        parties.row(("Seller", "Buyer"), style=_BOLD)
        parties.row(("\n".join(document.seller), "\n".join(document.buyer)))
    for section in document.sections:
        page.ln(4)
        page.set_font(_FAMILY, "B", 9)
        page.multi_cell(0, 6, section.title, new_x="LMARGIN", new_y="NEXT")
        page.set_font(_FAMILY, "", 7.5)
        with page.table(
            borders_layout=TableBordersLayout.HORIZONTAL_LINES,
            col_widths=_WIDTHS,
            text_align=_ALIGN,
            headings_style=_BOLD,
        ) as table:
            table.row(COLUMNS)
            for cells in section.rows:
                table.row(cells)
            table.row(("Net", "", "", "", "", section.subtotal), style=_BOLD)
    page.ln(4)
    page.set_font(_FAMILY, "", 9)
    for i, (name, value) in enumerate(document.totals):
        page.set_font(_FAMILY, "B" if i == len(document.totals) - 1 else "", 9)
        page.cell(130, 5, name, align="R")
        page.cell(0, 5, value, align="R", new_x="LMARGIN", new_y="NEXT")
    page.ln(4)
    page.set_font(_FAMILY, "", 9)
    for note in document.notes:
        page.multi_cell(0, 5, note, new_x="LMARGIN", new_y="NEXT")


@cache
def _fira() -> dict[str, bytes]:
    """The fonts as their package holds them: bytes in modules that are slow to load, hence here."""
    from pymupdf_fonts import fontbuffers

    return {"": fontbuffers["figo"](), "B": fontbuffers["figbo"]()}


def _letters(document: Document) -> set[int]:
    return {ord(letter) for letter in document.texts() if letter.isprintable()}


def _fonts_for(missing: set[int]) -> list[Path]:
    """As few further fonts as have all missing letters, the best first."""
    if not missing:
        return []
    found: list[Path] = []
    left = set(missing)
    has = {path: missing & _glyphs(path) for path in _more_fonts()}
    while left and (best := max(has, key=lambda path: len(has[path] & left), default=None)) and has[best] & left:
        found.append(best)
        left -= has[best]
    if left:
        letters = " ".join(map(chr, sorted(left)[:10]))
        way = "" if has else " (`pip install 'batchsvc[fonts]'` brings fonts for most scripts)"
        raise InvalidRequestError(
            f"No font for the PDF has {letters}{way}; the HTML and the CSV carry every letter.", code="no_glyph"
        )
    return found


def _more_fonts() -> list[Path]:
    if find_spec("weblate_fonts") is None:
        return []
    folder = resources.files("weblate_fonts") / "static" / "weblate_fonts" / "kurinto" / "ttf"
    return [path for name in _MORE if (path := Path(str(folder / f"{name}.ttf"))).exists()]


@cache
def _fira_glyphs() -> frozenset[int]:
    return _glyphs_in(BytesIO(_fira()[""]))


@cache
def _glyphs(path: Path) -> frozenset[int]:
    return _glyphs_in(path)


def _glyphs_in(file: Path | BytesIO) -> frozenset[int]:
    with TTFont(file, lazy=True) as font:
        return frozenset(font.getBestCmap())
