"""Sending where a tenant says: to the judged address and no other, within its time, following nothing."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchsvc.egress import Egress
from batchsvc.outbound import Outbound, OutboundError
from tests.receiver import receiving

LOOPBACK = Egress.parse("127.0.0.0/8")


def test_a_name_that_changes_its_mind_leads_nowhere_else() -> None:
    """DNS rebinding: the second answer would be private, and nobody asks for it."""
    asked: list[str] = []

    def rebinding(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    with receiving() as receiver:
        outbound = Outbound(LOOPBACK, 5, rebinding)
        assert outbound.post(f"http://hooks.example:{receiver.port}/x?y=z", {"X-A": "b"}, b"{}") == 204
        (got,) = receiver.received
        assert (got.path, got.body, got.headers["x-a"]) == ("/x?y=z", b"{}", "b")
        assert got.headers["host"] == f"hooks.example:{receiver.port}"
    assert asked == ["hooks.example"]


def test_without_permission_loopback_is_not_connected_to() -> None:
    with receiving() as receiver:
        for egress in (Egress(), Egress.parse("10.0.0.0/8")):
            with pytest.raises(OutboundError):
                Outbound(egress, 5).post(receiver.url, {}, b"")
            with pytest.raises(OutboundError, match="no public address"):
                Outbound(egress, 5, lambda *_: ["127.0.0.1"]).post("https://hooks.example/", {}, b"")
        assert not receiver.received


def test_a_redirect_is_an_answer_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # nor is a proxy of the environment
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with receiving() as other, receiving() as receiver:
        receiver.statuses, receiver.location = [302], other.url
        assert Outbound(LOOPBACK, 5).post(receiver.url, {}, b"") == 302
        assert not other.received


@contextmanager
def dripping() -> Iterator[int]:
    """A server that sends a byte of its head now and then, for ever."""
    server = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def drip() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not stopped.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        stopped.set()
        thread.join()
        server.close()


def test_a_receiver_that_drips_holds_nobody_up() -> None:
    with dripping() as port:
        began = time.monotonic()
        with pytest.raises(OutboundError, match=r"no answer within 0\.5 s"):
            Outbound(LOOPBACK, 0.5).post(f"http://127.0.0.1:{port}/", {}, b"")
        assert time.monotonic() - began < 30, "far from the end of the drip, which there is none of"


def test_nobody_there_and_nonsense_are_said_in_a_few_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OutboundError, match="the connection failed"):
        Outbound(LOOPBACK, 5).post(f"http://127.0.0.1:{port}/", {}, b"")
    with receiving() as receiver, pytest.raises(OutboundError, match="the connection failed"):
        Outbound(LOOPBACK, 5).post(receiver.url.replace("http://", "https://"), {}, b"")


def test_what_a_server_of_another_kind_says_is_not_passed_on() -> None:
    """A tenant sees why nothing was delivered, and none of the words of whatever is at that address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"SSH-2.0-secret_banner\r\n\r\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        with pytest.raises(OutboundError, match="no valid HTTP answer") as refused:
            Outbound(LOOPBACK, 5).post(f"http://127.0.0.1:{server.getsockname()[1]}/", {}, b"")
        thread.join()
    assert "secret" not in str(refused.value)


def test_tls_is_of_the_name_and_not_of_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "2",
            ),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=x", "-addext", "subjectAltName=DNS:hooks.example"),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    names: list[str | None] = []
    tls.sni_callback = lambda _socket, name, _context: names.append(name)
    with receiving(tls) as receiver:
        url = f"https://hooks.example:{receiver.port}/"
        with pytest.raises(OutboundError, match="certificate"):
            Outbound(LOOPBACK, 5, lambda *_: ["127.0.0.1"]).post(url, {}, b"")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert Outbound(LOOPBACK, 5, lambda *_: ["127.0.0.1"]).post(url, {}, b"") == 204
        assert names == ["hooks.example"] * 2
        with pytest.raises(OutboundError, match="certificate"):
            Outbound(LOOPBACK, 5, lambda *_: ["127.0.0.1"]).post(url.replace("hooks", "other"), {}, b"")
