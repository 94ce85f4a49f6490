"""Sealed secrets: only the keys of the deployment open them, and only where they belong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.errors import InvalidRequestError, UnavailableError
from batchsvc.sealing import Seals
from batchsvc.settings import Settings, SettingsError
from tests.batchsvc.test_settings import BASE

OLD, NEW = "old" * 16, "new" * 16


@given(st.text(min_size=1, max_size=256))
def test_what_is_sealed_is_opened_by_its_key_for_its_purpose_alone(secret: str) -> None:
    sealed = Seals.of(OLD).seal(secret, "the store a")
    assert secret.encode() not in sealed.encode() or len(secret) < 4
    assert sealed != Seals.of(OLD).seal(secret, "the store a"), "equal secrets don't show"
    assert Seals.of(OLD).opened(sealed, "the store a") == secret
    assert Seals.of(f"{NEW}, {OLD}").opened(sealed, "the store a") == secret, "a key that was replaced"
    for seals, purpose, text in (
        (Seals.of(NEW), "the store a", sealed),
        (Seals.of(OLD), "the store b", sealed),
        (Seals.of(OLD), "the store a", sealed[:-4]),
        (Seals.of(OLD), "the store a", ""),
        (Seals(), "the store a", sealed),
    ):
        with pytest.raises(UnavailableError, match="BATCHSVC_SECRET_KEY"):
            seals.opened(text, purpose)


def test_without_a_key_nothing_is_kept() -> None:
    with pytest.raises(InvalidRequestError, match="openssl rand"):
        Seals.of(None).seal("x", "the store a")


def test_a_short_key_is_no_setting() -> None:
    assert Settings.from_env(BASE | {"BATCHSVC_SECRET_KEY": OLD}).secret_key == OLD
    with pytest.raises(SettingsError, match="32 characters"):
        Settings.from_env(BASE | {"BATCHSVC_SECRET_KEY": "short"})
    with pytest.raises(InvalidRequestError, match="surrogate"):
        Seals.of(OLD).seal("\ud800", "the store a")
