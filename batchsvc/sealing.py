"""Seals secrets that have to be stored and used again: AES-256-GCM with keys that the database doesn't hold.

What a secret is for is authenticated with it, so that a sealed text moved to another row opens nothing. The newest of
the keys seals, all of them open: a key is replaced by putting a new one before it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchsvc.errors import InvalidRequestError, UnavailableError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

LEAST_CHARS = 32
WRONG_KEY = "secret_key_wrong"
"""Code of the error that none of this process's keys opens a secret."""

_FORM = "1:"  # before every sealed text: how it was made
_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Seals:
    """The keys of a deployment, newest first; without any, nothing can be sealed."""

    keys: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, secret_key: str | None) -> Seals:
        """Those that the setting names, separated by commas. Raises ValueError for one that is too short."""
        texts = [text.strip() for text in (secret_key or "").split(",") if text.strip()]
        if any(len(text) < LEAST_CHARS for text in texts):
            raise ValueError(f"each key has {LEAST_CHARS} characters or more, such as `openssl rand -hex 32` makes")
        return cls(tuple(hashlib.sha256(text.encode()).digest() for text in texts))

    def seal(self, text: str, purpose: str) -> str:
        """The text in a form that only these keys open, for this purpose."""
        if not self.keys:
            raise InvalidRequestError(
                "Secrets can't be kept here: set BATCHSVC_SECRET_KEY, as `openssl rand -hex 32` makes one, "
                "for the API and the workers.",
                code="secret_key_missing",
            )
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "A secret is text, and half a surrogate pair is none.", code="invalid_value"
            ) from error
        nonce = os.urandom(_NONCE_BYTES)
        sealed = _cipher(self.keys[0]).encrypt(nonce, data, purpose.encode())
        return _FORM + base64.b64encode(nonce + sealed).decode()

    def opened(self, sealed: str, purpose: str) -> str:
        """What was sealed. Raises UnavailableError where none of the keys opens it."""
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.b64decode(sealed.removeprefix(_FORM), validate=True)
        except binascii.Error:
            data = b""
        for key in self.keys if len(data) > _NONCE_BYTES else ():
            try:
                return _cipher(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], purpose.encode()).decode()
            except InvalidTag:
                continue
        raise UnavailableError(
            f"The secret of {purpose} can't be opened: BATCHSVC_SECRET_KEY isn't the key that sealed it.",
            code=WRONG_KEY,
        )


def _cipher(key: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # settings are read where it isn't needed

    return AESGCM(key)
