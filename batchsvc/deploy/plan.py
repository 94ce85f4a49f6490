"""What is deployed where: hosts, processes, their settings and secrets, the same for systemd, compose and Kubernetes.

A plan holds no secret, only the names of the files that hold them; `secrets.py` makes those once.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from batchsvc.errors import InvalidRequestError

Service = Literal["postgres", "valkey", "s3"]
SERVICES: tuple[Service, ...] = ("postgres", "valkey", "s3")
Device = Literal["cpu", "cuda"]

POSTGRES_PORT, VALKEY_PORT, S3_PORT, SIGNALS_PORT = 5432, 6379, 8333, 9100
API_DRAIN_S = 20  # uvicorn lets calls end for 8 s
MIGRATE_WAIT_S = 120  # for PostgreSQL; after that it is begun anew
STOP_SPARE_S = 15.0  # beyond the grace: what is drained is written and given back before anyone kills
MOST_WORKERS = 9  # of one host: the last digit of the ports of their signals

# what each process gets by file, and the name of the secret's file
SECRET_SETTINGS = {
    "DATABASE_URL": "database_url",
    "REDIS_URL": "redis_url",
    "AWS_ACCESS_KEY_ID": "s3_access_key",
    "AWS_SECRET_ACCESS_KEY": "s3_secret_key",
    "BATCHSVC_SECRET_KEY": "secret_key",
    "BATCHSVC_SPLIT_KEY": "split_key",
}
# what other parts of the deployment go by too (probes, ports, times to stop), and where it is said for all of them
_TOLD_ELSEWHERE = {
    "BATCHSVC_MODEL": "say --model",
    "BATCHSVC_BUCKET": "say --bucket",
    "BATCHSVC_PORT": "say --port",
    "BATCHSVC_DEVICE": "say --device",
    "BATCHSVC_TERM_GRACE_S": "say --term-grace-s",
    "BATCHSVC_TERM_GRACE": "say --term-grace-s",
    "BATCHSVC_SIGNALS_PORT": "each process has one of its own, which is probed",
    "BATCHSVC_WORKER_NAME": "each worker has one of its own",
}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
# of the quantities of Kubernetes those that are large enough: bytes have at least seven digits
_MEMORY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(k|[MGT]|[KMGT]i|[eE]([6-9]|1[0-9]))|[1-9][0-9]{6,}")
_SETTING = re.compile(r"[A-Z][A-Z0-9_]*")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\"'\\$`%]*")


class PlanError(InvalidRequestError):
    """What was asked for can't be deployed; the message names the flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where things lie on each host; `{host}` in one stands for the host's own name."""

    program: str = "/opt/batchsvc/bin/batchsvc"
    config: str = "/etc/batchsvc"
    state: str = "/var/lib/batchsvc"
    units: str = "/etc/systemd/system"
    postgres: str = "/usr/lib/postgresql/17/bin"
    valkey: str = "/usr/bin/valkey-server"
    weed: str = "/opt/batchsvc/bin/weed"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One deployment. `hosts`: the first has the data services, the second API and control, the others engines; with
    fewer hosts the last of them does the rest. `without` services are there already."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    model: str = "smollm2-135m"
    workers: int = 1
    device: Device = "cpu"
    without: frozenset[Service] = frozenset()
    image: str = "batchsvc:latest"
    engine_memory: str = "16Gi"  # of a pod of an engine, as Kubernetes writes it
    namespace: str = "batchsvc"
    api_port: int = 8080
    bucket: str = "batchsvc"
    term_grace_s: float = 30.0
    user: str = "batchsvc"
    weed_port: int = 9333  # of three behind the S3 gateway, on loopback
    paths: Paths = field(default_factory=Paths)
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.hosts or len(set(self.hosts)) != len(self.hosts):
            raise PlanError("--hosts names at least one host, each once, with commas between.", param="hosts")
        for host in self.hosts:
            if not (is_ipv6(host) if ":" in host else _HOST.fullmatch(host)):
                raise PlanError(f"--hosts: {host!r} is neither an address nor a name of a host.", param="hosts")
        if not 1 <= self.workers <= MOST_WORKERS:
            raise PlanError(f"--workers is the number of engine workers a host, 1 to {MOST_WORKERS}.", param="workers")
        if not _MEMORY.fullmatch(self.engine_memory):
            raise PlanError(f"--engine-memory is such as 16Gi, not {self.engine_memory!r}.", param="engine_memory")
        for flag, text in (("--model", self.model), ("--image", self.image), ("--bucket", self.bucket)):
            if not text or not _PLAIN.fullmatch(text) or " " in text:
                raise PlanError(f"{flag} can't be {text!r}: no spaces, quotes, $ or % there.", param=flag[2:])
        for name, text in self.extra.items():
            if not _SETTING.fullmatch(name) or not _PLAIN.fullmatch(text):
                raise PlanError(f"--set takes NAME=VALUE without quotes, $ or %, not {name}={text!r}.", param="set")
            if name in ("BATCHSVC_TLS_CERT", "BATCHSVC_TLS_KEY"):
                raise PlanError(
                    f"--set can't take {name}: probes ask by HTTP here, and a proxy speaks TLS.", param="set"
                )
            if reason := _TOLD_ELSEWHERE.get(name.removesuffix("_FILE")):
                raise PlanError(f"--set can't take {name}: {reason}.", param="set")
            if name in SECRET_SETTINGS:
                raise PlanError(f"--set can't take {name}, which is a secret: it goes into a file.", param="set")

    @property
    def data_host(self) -> str:
        return self.hosts[0]

    @property
    def api_host(self) -> str:
        return self.hosts[min(1, len(self.hosts) - 1)]

    @property
    def worker_hosts(self) -> tuple[str, ...]:
        return self.hosts[2:] or self.hosts[-1:]

    @property
    def services(self) -> tuple[Service, ...]:
        """The data services that this deployment runs itself."""
        return tuple(name for name in SERVICES if name not in self.without)

    @property
    def stop_s(self) -> float:
        """How long a worker may take to stop: longer than its own grace, so that nothing is killed in mid-drain."""
        return self.term_grace_s + STOP_SPARE_S

    @cached_property
    def settings(self) -> dict[str, str]:
        """What every process is told that is no secret and the same everywhere."""
        own = {
            "AWS_REGION": "us-east-1",
            "BATCHSVC_BUCKET": self.bucket,
            "BATCHSVC_MODEL": self.model,
            "BATCHSVC_PORT": str(self.api_port),
            "BATCHSVC_TERM_GRACE_S": f"{self.term_grace_s:g}",
            "BATCHSVC_DEVICE": self.device,
        }
        return own | dict(self.extra)

    def secret_settings(self, folder: str) -> dict[str, str]:
        """The settings that name the files of secrets in a folder."""
        return {f"{name}_FILE": f"{folder}/{file}" for name, file in SECRET_SETTINGS.items()}


def is_ipv6(host: str) -> bool:
    """Whether it is an address that every one of our ways to write one takes: without brackets and zone."""
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def authority(host: str, port: int) -> str:
    """host:port as a URL has it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
