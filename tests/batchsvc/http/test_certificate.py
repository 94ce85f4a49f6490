"""The API speaks TLS by its own certificate, and doesn't start with one that can't serve."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives import serialization

from batchsvc.http import certificate
from batchsvc.settings import Settings, SettingsError
from batchsvc.stack.services import choose_ports
from tests.certificates import written
from tests.e2e.conftest import wait_for
from tests.servers import S3Server

BASE = {"DATABASE_URL": "sqlite:///x.db", "REDIS_URL": "redis://127.0.0.1/0"}


def test_without_a_certificate_the_api_speaks_http() -> None:
    assert certificate.uvicorn_options(Settings.from_env(BASE)) == {}


@pytest.mark.parametrize("which", ["missing", "no pem", "swapped", "encrypted", "alone"])
def test_a_certificate_that_cannot_serve_is_told_by_the_settings_names(which: str, tmp_path: Path) -> None:
    cert, key = written(tmp_path)
    env = {**BASE, "BATCHSVC_TLS_CERT": str(cert), "BATCHSVC_TLS_KEY": str(key)}
    match which:
        case "missing":
            key.unlink()
        case "no pem":
            cert.write_text("nothing")
        case "swapped":
            env |= {"BATCHSVC_TLS_CERT": str(key), "BATCHSVC_TLS_KEY": str(cert)}
        case "encrypted":
            plain = serialization.load_pem_private_key(key.read_bytes(), None)
            locked = serialization.BestAvailableEncryption(b"secret")
            key.write_bytes(plain.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
        case _:
            del env["BATCHSVC_TLS_KEY"]
    with pytest.raises(SettingsError, match="BATCHSVC_TLS_CERT"):
        certificate.uvicorn_options(Settings.from_env(env))


def test_the_api_serves_tls(tmp_path: Path, s3_server: S3Server) -> None:
    cert, key = written(tmp_path)
    port = choose_ports(("api",))["api"]
    env = {
        **os.environ,
        "DATABASE_URL": f"sqlite:///{tmp_path / 'x.db'}",
        "REDIS_URL": "redis://127.0.0.1:9/0",
        "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
        "BATCHSVC_BUCKET": "tls-of-the-api",
        "BATCHSVC_PORT": str(port),
        "BATCHSVC_TLS_CERT": str(cert),
        "BATCHSVC_TLS_KEY": str(key),
    }
    process = subprocess.Popen([sys.executable, "-P", "-m", "batchsvc.app"], env=env, cwd=tmp_path)
    trusted = ssl.create_default_context(cafile=str(cert))

    def answers(context: ssl.SSLContext) -> bool:
        try:
            return httpx.get(f"https://127.0.0.1:{port}/livez", verify=context, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(lambda: answers(trusted), "the API by TLS")
        assert not answers(ssl.create_default_context())  # nobody else's certificate would do
    finally:
        process.terminate()
        process.wait(60)
