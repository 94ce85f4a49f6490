"""`batchsvc invoice` and `statement` from a month's usage to a paid invoice, and the admin routes behind them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from batchsvc.accounts import service as accounts
from batchsvc.app import create_app
from batchsvc.billing.month import Month
from batchsvc.cli import main
from tests.batchsvc.billing.books import SELLER, Books
from tests.dispatchers import NullDispatcher

Command = Callable[..., tuple[int, str, str]]
JANUARY = Month(2024, 1)

pytestmark = pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


@pytest.fixture
def batchsvc(books: Books, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    """Runs `batchsvc ... --from-env`; gives exit code, standard output and standard error."""
    for name, value in {"DATABASE_URL": books.db.url, "REDIS_URL": "redis://127.0.0.1:1", **SELLER}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchsvc", *arguments, "--from-env"])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsysbinary.readouterr()
        return int(ended.value.code or 0), said.out.decode("utf-8", "replace"), said.err.decode()

    return run


def test_from_a_month_s_usage_to_a_paid_invoice(books: Books, batchsvc: Command, tmp_path: Path) -> None:
    books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    code, out, _ = batchsvc("invoice", "party", "acme", "--name", "Acme SA", "--tax-rate", "20", "--currency", "eur")
    assert code == 0 and "Acme SA" in out and "EUR" in out
    code, _, err = batchsvc("invoice", "draft", "acme", "--month", "2024-01")
    assert code == 1 and "this invoice is in EUR" in err and "--exchange-rate" in err
    code, out, err = batchsvc("invoice", "draft", "acme", "--month", "2024-01", "--exchange-rate", "0.9", "--json")
    draft = json.loads(out)
    assert code == 0 and draft["status"] == "draft" and f"batchsvc invoice issue {draft['id']}" in err
    assert (draft["net"], draft["tax"], draft["rounding"], draft["payable"]) == ("0.045", "0.009", "-0.004", "0.05")
    code, out, _ = batchsvc("invoice", "issue", draft["id"])
    assert code == 0 and "Invoice INV-000001, issued: 2024-01 of Acme SA" in out and "tax 20 %" in out
    code, out, _ = batchsvc("invoice", "list", "--project", "acme")
    assert code == 0 and "INV-000001" in out and "0.05 EUR" in out
    code, _, err = batchsvc("invoice", "show", "INV-000001", "-o", str(tmp_path / "bill.html"))
    assert code == 0 and (tmp_path / "bill.html").read_bytes().startswith(b"<!doctype html>") and "Wrote" in err
    code, out, _ = batchsvc("invoice", "show", "INV-000001", "--format", "csv")
    assert code == 0 and out.startswith("invoice,kind,project_id,batch_id,part_id,") and out.count("\n") == 2
    code, out, _ = batchsvc("invoice", "credit-note", "INV-000001", "--amount", "0.01", "--reason", "slow")
    assert code == 0 and "Credit note INV-CN-000001, issued, corrects INV-000001" in out
    assert batchsvc("invoice", "dispute", "INV-000001", "--reason", "why?")[0] == 0
    code, out, _ = batchsvc("invoice", "pay", "INV-000001", "--reason", "wire 7")
    assert code == 0 and "INV-000001, paid" in out
    code, _, err = batchsvc("invoice", "void", "INV-000001", "--reason", "no")
    assert code == 1 and "corrected by INV-CN-000001" in err
    code, out, _ = batchsvc("statement", "acme", "--month", "2024-01")
    assert code == 0 and "Opening balance $0.00" in out and "Closing balance -$0.05" in out and "part" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("invoice", "draft", "nobody", "--month", "2024-01"), 1, "no project nobody"),
        (("invoice", "draft", "acme", "--month", "2024-13"), 1, "A month is written as 2026-01"),
        (("invoice", "party", "acme", "--currency", "XAU"), 1, "no currency"),
        (("invoice", "party", "acme", "--tax-rate", "101"), 1, "percentage"),
        (("invoice", "party", "acme", "--country", "Francia"), 1, "Invalid 'country'"),
        (("invoice", "party", "acme", "--name", "a\nb"), 1, "Invalid 'name'"),
        (("invoice", "list", "--status", "open"), 1, "it is one of draft, issued"),
        (("invoice", "show", "INV-000009"), 1, "no invoice INV-000009"),
        (("invoice", "show", "INV-000009", "--format", "doc"), 2, "html, pdf or csv"),
        (("statement", "acme", "--month", "soon"), 1, "A month is written"),
    ],
)
def test_what_can_t_be_done_is_one_sentence(
    batchsvc: Command, arguments: tuple[str, ...], code: int, says: str
) -> None:
    ended, out, err = batchsvc(*arguments)
    assert ended == code and out == "" and says in err and err.count("\n") == 1


def test_the_routes_are_for_the_admin_key(books: Books) -> None:
    with books.db.transaction() as session:
        keys = {is_admin: accounts.create_key(session, books.project, "k", is_admin)[1] for is_admin in (True, False)}
    client = TestClient(create_app(books.settings, NullDispatcher()))

    def call(verb: str, path: str, *, is_admin: bool = True, **more: Any) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {keys[is_admin]}"}
        answer = client.request(verb, f"/v1/admin{path}", headers=headers, **more)
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status_code, answer.json() if is_json else {"bytes": answer.content}

    books.use(JANUARY.start_ms)
    body = {"project": "acme", "month": "2024-01"}
    assert call("POST", "/invoices", is_admin=False, json=body)[0] == 403
    assert call("GET", "/projects/acme/statement?month=2024-01", is_admin=False)[0] == 403
    code, draft = call("POST", "/invoices", json=body)
    assert code == 200 and draft["status"] == "draft"
    assert call("POST", f"/invoices/{draft['id']}/void", json={})[0] == 400, "a reason is missing"
    assert call("POST", f"/invoices/{draft['id']}/issue", json={})[1]["number"] == "INV-000001"
    assert call("GET", "/invoices?month=2024-01&status=issued")[1]["data"]
    for form, begins in (("html", b"<!doctype html>"), ("csv", b"invoice,"), ("pdf", b"%PDF-")):
        code, file = call("GET", f"/invoices/INV-000001/content?format={form}")
        assert code == 200 and file["bytes"].startswith(begins)
    assert call("GET", "/invoices/INV-000001/content?format=doc")[0] == 400
    assert call("GET", "/invoices/INV-7/content")[0] == 404
    code, shown = call("GET", "/projects/acme/statement?month=2024-01")
    assert code == 200 and shown["closing_nanos"] == -books.used_nanos(JANUARY)
    assert call("POST", "/projects/acme/party", json={"tax_rate": "19", "nam": "x"})[0] == 400
    assert call("POST", "/projects/acme/party", json={"tax_rate": "19"})[1]["tax_rate"] == "19"
