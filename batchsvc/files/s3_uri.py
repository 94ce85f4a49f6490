"""Addresses of objects in the stores of tenants, `s3://bucket/key`, and what of them a registration covers. Pure.

A key has to be the same object for everybody on its way. Some servers take the steps of a key for folders and resolve
`..`, which would lead out of a registered prefix: so keys with steps that are empty, `.` or `..` are refused.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from batchsvc.errors import InvalidRequestError

SCHEME = "s3://"
MAX_CHARS = 1_100  # of an address: a key has at most 1,024 bytes
_MAX_KEY_BYTES, _MAX_PREFIX_BYTES = 1_024, 900  # what is written under a prefix has names of its own
_BUCKET = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII)
_LEAST_BUCKET, _MOST_BUCKET = 3, 63
_HIDDEN = ("Cc", "Cs")  # control characters, and halves of characters


@dataclass(frozen=True, slots=True)
class S3Uri:
    """A bucket, and in it an object or, where the key is empty or ends in a slash, all that begins so."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"

    @property
    def name(self) -> str:
        """The last step of the key."""
        return self.key.rpartition("/")[2]

    def below(self, name: str) -> S3Uri:
        """An address under this prefix."""
        return S3Uri(self.bucket, self.key + name)

    def covers(self, other: S3Uri) -> bool:
        """Whether the other address lies under this prefix."""
        return self.bucket == other.bucket and other.key.startswith(self.key)


def is_s3(text: str) -> bool:
    """Whether somebody means an address of this kind."""
    return text.startswith(SCHEME)


def parse_object(text: str, param: str) -> S3Uri:
    """The address of one object. Raises InvalidRequestError that names `param`."""
    bucket, key = _split(text, param)
    if not key:
        raise _refusal(param, "it names a bucket and no object: write s3://bucket/key.")
    _check_key(key, param, _MAX_KEY_BYTES)
    return S3Uri(bucket, key)


def parse_prefix(text: str, param: str) -> S3Uri:
    """The address of a prefix: of a folder, with or without its last slash, or of a whole bucket."""
    bucket, key = _split(text, param)
    folder = key.removesuffix("/")
    if folder:
        _check_key(folder, param, _MAX_PREFIX_BYTES)
    elif key:
        raise _refusal(param, "its key has an empty step.")
    return S3Uri(bucket, f"{folder}/" if folder else "")


def _split(text: str, param: str) -> tuple[str, str]:
    if not is_s3(text) or len(text) > MAX_CHARS:
        raise _refusal(param, "an address in S3 is written s3://bucket/key.")
    bucket, _, key = text.removeprefix(SCHEME).partition("/")
    if not _LEAST_BUCKET <= len(bucket) <= _MOST_BUCKET or not _BUCKET.fullmatch(bucket):
        raise _refusal(param, "a bucket's name is 3 to 63 of a-z, 0-9, hyphens and single dots.")
    return bucket, key


def _check_key(key: str, param: str, most_bytes: int) -> None:
    if any(unicodedata.category(character) in _HIDDEN for character in key):
        raise _refusal(param, "its key has a control character.")
    if len(key.encode()) > most_bytes:
        raise _refusal(param, f"its key is over {most_bytes} bytes.")
    if any(step in ("", ".", "..") for step in key.split("/")):
        raise _refusal(param, "its key has a step that is empty, '.' or '..'.")


def _refusal(param: str, says: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {says}", code="invalid_s3_uri", param=param)
