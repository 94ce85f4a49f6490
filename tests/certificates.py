"""A certificate for 127.0.0.1 that signs itself, and a server that speaks TLS with it in front of one that doesn't."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_ASKS_FOR_TLS = struct.pack("!ii", 8, 80877103)  # PostgreSQL's SSLRequest


def written(folder: Path) -> tuple[Path, Path]:
    """The paths of a certificate and its key, both PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return cert_path, key_path


@contextmanager
def in_front_of(server: int | str, cert: Path, key: Path, *, is_postgres: bool = False) -> Iterator[int]:
    """The port of a TLS server on loopback that passes everything on to this one: a port, or a socket's path.

    Clients of PostgreSQL ask in plain text for TLS before they speak it. Whoever asks for nothing is sent away.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_pass_on, args=(plain, context, server, is_postgres), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def _pass_on(plain: socket.socket, context: ssl.SSLContext, address: int | str, is_postgres: bool) -> None:
    with suppress(OSError), plain:
        if is_postgres:
            if plain.recv(len(_ASKS_FOR_TLS), socket.MSG_WAITALL) != _ASKS_FOR_TLS:
                return
            plain.sendall(b"S")
        client = context.wrap_socket(plain, server_side=True)
        server = _connected(address)
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        with client, server:
            _copy(client, server)
            back.join()


def _connected(address: int | str) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
