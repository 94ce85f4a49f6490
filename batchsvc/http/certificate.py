"""The API's own certificate, where it speaks TLS itself: what uvicorn is told, checked before the start."""

from __future__ import annotations

import ssl
from typing import Any

from batchsvc.settings import Settings, SettingsError


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """Nothing where a proxy speaks TLS. Raises SettingsError for a certificate and key that can't serve."""
    if settings.tls_cert is None:
        return {}
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")  # else OpenSSL asks on the terminal
    except ssl.SSLError as error:
        raise SettingsError(
            f"BATCHSVC_TLS_CERT and BATCHSVC_TLS_KEY can't be used: {settings.tls_cert} and {settings.tls_key} aren't "
            f"a certificate in PEM form and its key without a password ({error.reason or 'no PEM'}).",
            param="BATCHSVC_TLS_CERT",
        ) from error
    except OSError as error:
        raise SettingsError(
            f"BATCHSVC_TLS_CERT and BATCHSVC_TLS_KEY can't be used: {settings.tls_cert} or {settings.tls_key} can't "
            f"be read ({error.strerror}).",
            param="BATCHSVC_TLS_CERT",
        ) from error
    return {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
