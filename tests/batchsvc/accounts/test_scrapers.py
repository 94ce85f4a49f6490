"""Who may scrape from another machine, and that an outage of the database can be scraped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy.exc import OperationalError

from batchsvc.accounts import scrapers as scraping
from batchsvc.accounts.scrapers import Scrapers
from batchsvc.accounts.service import Caller
from batchsvc.errors import AuthenticationError, PermissionDeniedError

ADMIN = Caller(project_id="proj_a", api_key_id="k", is_admin=True)


def gives(caller: Caller) -> Callable[[], Caller]:
    return lambda: caller


def away() -> Caller:
    raise OperationalError("select", {}, Exception("away"))


def wrong() -> Caller:
    raise AuthenticationError("no", code="invalid_api_key")


def unasked() -> Caller:
    raise AssertionError("nobody waits for it")


@pytest.mark.parametrize(
    ("is_admin", "scopes", "may"),
    [(True, None, True), (True, ("api.all.read",), True), (True, ("api.files.read",), False), (False, None, False)],
)
def test_admin_keys_that_may_read_are_let_in(is_admin: bool, scopes: tuple[str, ...] | None, may: bool) -> None:
    caller = Caller(project_id="proj_a", api_key_id="k", is_admin=is_admin, scopes=scopes)
    door = Scrapers(lambda: False)
    if may:
        door.admit("s", gives(caller))
        return
    with pytest.raises(PermissionDeniedError):
        door.admit("s", gives(caller))
    with pytest.raises(OperationalError):
        door.admit("s", away)


def test_a_key_that_was_good_is_let_in_while_the_database_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    is_away = False
    door = Scrapers(lambda: is_away)
    door.admit("good", gives(ADMIN))
    door.admit("good", away)
    with pytest.raises(OperationalError):
        door.admit("another", away)
    is_away = True
    door.admit("good", unasked)
    is_away = False
    monkeypatch.setattr(scraping, "_REMEMBERED_S", 0)
    with pytest.raises(OperationalError):
        door.admit("good", away)


@pytest.mark.parametrize("is_known", [True, False], ids=["known to be away", "found away"])
def test_a_scraper_outlasts_an_outage_of_hours(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    now_s, is_away = 1_000.0, False
    monkeypatch.setattr(scraping, "monotonic_s", lambda: now_s)
    door = Scrapers(lambda: is_away)
    for secret in ("scraper", "visitor"):
        door.admit(secret, gives(ADMIN))
    is_away = is_known
    for _ in range(20):
        now_s += 15 * 60
        door.admit("scraper", unasked if is_known else away)
    with pytest.raises(OperationalError):
        door.admit("visitor", away)
    is_away = False
    with pytest.raises(AuthenticationError):
        door.admit("scraper", wrong)
    with pytest.raises(OperationalError):
        door.admit("scraper", away)


def test_a_revoked_key_is_forgotten_and_few_are_remembered() -> None:
    door = Scrapers(lambda: False)
    for number in range(scraping._MOST_KEYS + 1):
        door.admit(f"key {number}", gives(ADMIN))
    with pytest.raises(OperationalError):
        door.admit("key 0", away)
    door.admit("key 1", away)
    with pytest.raises(AuthenticationError):
        door.admit("key 1", wrong)
    with pytest.raises(OperationalError):
        door.admit("key 1", away)
