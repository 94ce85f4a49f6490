"""An invoice as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from batchsvc.billing.invoice_document import COLUMNS, Document

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #111 }
h1 { font-size: 1.6em } h2 { font-size: 1.1em; margin: 1.5em 0 .3em }
.parties { display: flex; gap: 4em } .parties div { unicode-bidi: plaintext }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .25em .5em; vertical-align: top }
th, tfoot td, .totals tr:last-child td { border-top: 1px solid #999; font-weight: 600 }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.facts, .totals { width: auto } .totals { margin: 1.5em 0 0 auto }
""".strip()
_NUMBERS = 3  # the last columns


def html(document: Document) -> str:
    """The page; every text is escaped."""
    sections = "\n".join(
        f"<h2>{escape(section.title)}</h2>\n<table><thead><tr>{_cells(COLUMNS, 'th')}</tr></thead>\n<tbody>"
        + "\n".join(f"<tr>{_cells(row, 'td')}</tr>" for row in section.rows)
        + f"</tbody>\n<tfoot><tr>{_cells(('Net', '', '', '', '', section.subtotal), 'td')}</tr></tfoot></table>"
        for section in document.sections
    )
    notes = "\n".join(f"<p>{escape(note)}</p>" for note in document.notes)
    title = escape(f"{document.title} {document.facts[0][1]}")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{escape(document.title)}</h1>
{_pairs(document.facts, "facts")}
<div class="parties"><div dir="auto"><h2>Seller</h2>{_address(document.seller)}</div>
<div dir="auto"><h2>Buyer</h2>{_address(document.buyer)}</div></div>
{sections}
{_pairs(document.totals, "totals")}
{notes}
</body></html>
"""


def _cells(texts: Iterable[str], tag: str) -> str:
    first_number = len(COLUMNS) - _NUMBERS
    return "".join(
        f"<{tag}{' class=number' if i >= first_number else ''}>{escape(text)}</{tag}>" for i, text in enumerate(texts)
    )


def _pairs(pairs: Iterable[tuple[str, str]], name: str) -> str:
    rows = "\n".join(f'<tr><td>{escape(a)}</td><td class="number">{escape(b)}</td></tr>' for a, b in pairs)
    return f'<table class="{name}">{rows}</table>'


def _address(lines: Iterable[str]) -> str:
    return "<br>".join(f'<span dir="auto">{escape(line)}</span>' for line in lines)
