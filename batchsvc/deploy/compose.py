"""A compose file: all of a deployment on one machine with containers.

Secrets are files of `secrets/`. Containers run as users without privileges on a read-only root; what must last lies in
volumes; a stop waits longer than the process drains.
"""

from __future__ import annotations

from typing import Any

import yaml

from batchsvc.deploy import images
from batchsvc.deploy.plan import API_DRAIN_S, MIGRATE_WAIT_S, S3_PORT, SECRET_SETTINGS, SIGNALS_PORT, Plan
from batchsvc.deploy.probe import TIMEOUT_S
from batchsvc.deploy.secrets import DigestOf, no_digest

_SECRETS = "/run/secrets"
_CACHE = "/var/lib/batchsvc"
_LOADS_S = 3600  # an engine pulls its model, and loads it
_RECOVERS_S = 3600  # after a crash a data service replays its log first, and those that wait for it must not give up


def compose_file(plan: Plan, digest_of: DigestOf = no_digest) -> str:
    """The text of compose.yaml. `digest_of` files of secrets: where it changes, containers are made anew."""
    services: dict[str, Any] = {name: _DATA[name](plan) for name in plan.services}
    for name in services:
        services[name] |= _hardened() | {"restart": "unless-stopped"}
    if "s3" in plan.services:
        services["s3-owner"] = _s3_owner()
    waits: dict[str, Any] = {name: {"condition": "service_healthy"} for name in plan.services}
    migrated = {"migrate": {"condition": "service_completed_successfully"}}
    services["migrate"] = _ours(plan, ["migrate", "--wait", str(MIGRATE_WAIT_S)], waits) | {"restart": "on-failure"}
    api = {"BATCHSVC_HOST": "0.0.0.0"}  # noqa: S104  of the container
    services["api"] = _ours(plan, ["serve", "api"], waits | migrated, api) | {
        "ports": [f"127.0.0.1:{plan.api_port}:{plan.api_port}"],
        "healthcheck": _probe(plan.api_port),
        "stop_grace_period": f"{API_DRAIN_S}s",
        "mem_limit": "4g",
    }
    services["control"] = _ours(plan, ["serve", "control"], waits | migrated, _signals()) | {
        "healthcheck": _probe(SIGNALS_PORT),
        "stop_grace_period": f"{plan.stop_s:g}s",
        "mem_limit": "8g",
    }
    engine = _ours(plan, ["serve", "engine"], waits | migrated, _signals()) | {
        "healthcheck": _probe(SIGNALS_PORT, start_s=_LOADS_S),
        "stop_grace_period": f"{plan.stop_s:g}s",
    }
    if plan.device == "cuda":  # a service for each GPU: replicas of one would all see the same
        for number in range(plan.workers):
            device = {"driver": "nvidia", "device_ids": [str(number)], "capabilities": ["gpu"]}
            name = f"engine-{number}"
            services[name] = engine | {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
    else:
        services["engine"] = engine | {"deploy": {"replicas": plan.workers}}
    for name, service in services.items():
        if name not in ("postgres", "migrate") and (files := _read(service)):  # PostgreSQL reads its only once
            service["labels"] = {"batchsvc.secrets": digest_of(files)}
    volumes: dict[str, Any] = {name: {} for name in (*plan.services, "cache")}
    secrets = {name: {"file": f"./secrets/{name}"} for name in _secret_files(plan)}
    document = {"name": plan.namespace, "services": services, "volumes": volumes, "secrets": secrets}
    return str(yaml.safe_dump(document, sort_keys=False, width=120))


def _read(service: dict[str, Any]) -> list[str]:
    return [one if isinstance(one, str) else one["source"] for one in service.get("secrets", [])]


def _secret_files(plan: Plan) -> list[str]:
    own = {"postgres": ["postgres_password"], "valkey": ["valkey.conf"], "s3": ["s3.json", "security.toml"]}
    return [*SECRET_SETTINGS.values(), *(name for service in plan.services for name in own[service])]


def _postgres(_plan: Plan) -> dict[str, Any]:
    return {
        "image": images.POSTGRES,
        "user": f"{images.POSTGRES_UID}:{images.POSTGRES_UID}",
        "environment": {
            "POSTGRES_USER": "batchsvc",
            "POSTGRES_DB": "batchsvc",
            "POSTGRES_PASSWORD_FILE": f"{_SECRETS}/postgres_password",
            "PGDATA": "/var/lib/postgresql/data/main",
        },
        "command": ["postgres", "-c", "max_connections=200"],
        "secrets": ["postgres_password"],
        "volumes": ["postgres:/var/lib/postgresql/data"],
        "tmpfs": ["/tmp", "/var/run/postgresql:uid=999,gid=999"],  # noqa: S108  in the container
        "shm_size": "256m",
        "stop_signal": "SIGINT",
        "stop_grace_period": "120s",
        # by TCP: on its socket the image's own server answers too, which is there only to make the database
        "healthcheck": _health(["CMD", "pg_isready", "-q", "-h", "127.0.0.1", "-U", "batchsvc"], start_s=_RECOVERS_S),
    }


def _valkey(_plan: Plan) -> dict[str, Any]:
    flags = ["--appendonly", "yes", "--dir", "/data", "--maxmemory-policy", "noeviction"]
    return {
        "image": images.VALKEY,
        "user": f"{images.VALKEY_UID}:{images.VALKEY_UID}",
        "command": ["valkey-server", f"{_SECRETS}/valkey.conf", *flags],
        "secrets": ["valkey.conf"],
        "volumes": ["valkey:/data"],
        "sysctls": {"net.core.somaxconn": 4096},
        "stop_grace_period": "60s",
        # it answers even without the password, that one is needed: it is there. So it does while it loads its file:
        # until it has, our processes work as if there were none
        "healthcheck": _health(["CMD-SHELL", "valkey-cli ping | grep -Eq 'PONG|NOAUTH'"]),
    }


def _s3(_plan: Plan) -> dict[str, Any]:
    return {
        "image": images.SEAWEEDFS,
        "user": f"{images.UID}:{images.UID}",
        "depends_on": {"s3-owner": {"condition": "service_completed_successfully"}},
        "working_dir": "/data",
        "command": [
            *("server", "-dir=/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.ip.bind=0.0.0.0"),
            *(f"-s3.port={S3_PORT}", f"-s3.config={_SECRETS}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-s3.localSocket=/tmp/s3.sock", "-filer.localSocket=/tmp/filer.sock"),
            *("-master.telemetry=false", "-volume.max=0"),
        ],
        # weed looks there for the keys that close the ports behind the gateway
        "secrets": ["s3.json", {"source": "security.toml", "target": "/etc/seaweedfs/security.toml"}],
        "volumes": ["s3:/data"],
        "tmpfs": ["/tmp"],  # noqa: S108  in the container
        "stop_grace_period": "60s",
        "healthcheck": _health(
            ["CMD", "wget", "-q", "-O", "/dev/null", f"http://127.0.0.1:{S3_PORT}/healthz"], start_s=_RECOVERS_S
        ),
    }


def _s3_owner() -> dict[str, Any]:
    """Gives the volume to the user of `s3` and ends: the image has its folder as root's, and so has a fresh volume."""
    return {
        "image": images.SEAWEEDFS,
        "user": "0:0",
        "entrypoint": ["chown", "-R", f"{images.UID}:{images.UID}", "/data"],
        "command": [],
        "network_mode": "none",
        "volumes": ["s3:/data"],
        **_hardened(),
        "cap_add": ["CHOWN", "DAC_OVERRIDE"],  # the second, to look into what is another user's already
        "restart": "on-failure",
    }


_DATA = {"postgres": _postgres, "valkey": _valkey, "s3": _s3}


def _ours(
    plan: Plan, command: list[str], depends_on: dict[str, Any], more: dict[str, str] | None = None
) -> dict[str, Any]:
    endpoint = {} if "s3" in plan.without else {"AWS_ENDPOINT_URL_S3": f"http://s3:{S3_PORT}"}
    return {
        "image": plan.image,
        "user": f"{images.UID}:{images.UID}",
        "command": command,
        "depends_on": depends_on,
        "environment": {
            **plan.secret_settings(_SECRETS),
            **endpoint,
            **plan.settings,
            **(more or {}),
            "HOME": _CACHE,
            "PYTHONUNBUFFERED": "1",
        },
        "secrets": list(SECRET_SETTINGS.values()),
        "volumes": [f"cache:{_CACHE}"],
        "tmpfs": ["/tmp:exec"],  # noqa: S108  in the container; compiled kernels are loaded from there
        "restart": "unless-stopped",
        "ulimits": {"nofile": 65536},
        **_hardened(),
    }


def _hardened() -> dict[str, Any]:
    return {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "pids_limit": 4096}


def _signals() -> dict[str, str]:
    return {"BATCHSVC_SIGNALS_HOST": "0.0.0.0", "BATCHSVC_SIGNALS_PORT": str(SIGNALS_PORT)}  # noqa: S104


def _probe(port: int, *, start_s: int = 60) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/readyz"
    return _health(["CMD", "python", "-P", "-m", "batchsvc.deploy.probe", url], start_s=start_s)


def _health(test: list[str], *, start_s: int = 30) -> dict[str, Any]:
    return {
        "test": test,
        "interval": "10s",
        "timeout": f"{TIMEOUT_S + 4}s",
        "retries": 3,
        "start_period": f"{start_s}s",
    }
