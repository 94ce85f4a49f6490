"""Standard Webhooks signatures, as `client.webhooks.unwrap` of the official client verifies them. Pure.

What is signed is `id.timestamp.body` by HMAC-SHA256. The id stays the same however often an event is sent, so that a
receiver knows it again; the timestamp is that of the attempt. While a secret is being replaced both sign.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence

_PREFIX, _SECRET_BYTES, _HINT_CHARS = "whsec_", 32, 4


def new_secret() -> str:
    """`whsec_` and the key in base64."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def hint(secret: str) -> str:
    """What may be shown of a secret after it was shown once."""
    return f"{_PREFIX}...{secret.rstrip('=')[-_HINT_CHARS:]}"


def headers(event_id: str, timestamp_s: int, body: bytes, keys: Sequence[str]) -> dict[str, str]:
    """The headers of one attempt, with a signature a secret, the newest first."""
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(_signature(event_id, timestamp_s, body, key) for key in keys),
    }


def _signature(event_id: str, timestamp_s: int, body: bytes, secret: str) -> str:
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    signed = f"{event_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
