"""Units of systemd for one to many hosts, what they read, and a script a host that puts them in place.

Every unit runs as a user without a login, may gain no privilege, sees the system read-only, and gets its secrets by
file. It is restarted for ever, with a pause; a stop waits longer than the process drains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from batchsvc.deploy.plan import (
    API_DRAIN_S,
    MIGRATE_WAIT_S,
    MOST_WORKERS,
    POSTGRES_PORT,
    S3_PORT,
    SECRET_SETTINGS,
    SERVICES,
    SIGNALS_PORT,
    VALKEY_PORT,
    Plan,
    authority,
)
from batchsvc.deploy.secrets import OF_SERVICE

Section = list[tuple[str, str]]

_OURS = "ours"

_HARDENING: Section = [
    ("NoNewPrivileges", "yes"),
    ("CapabilityBoundingSet", ""),
    ("AmbientCapabilities", ""),
    ("ProtectSystem", "strict"),
    ("ProtectHome", "yes"),
    ("PrivateTmp", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectControlGroups", "yes"),
    ("ProtectClock", "yes"),
    ("ProtectHostname", "yes"),
    ("RestrictNamespaces", "yes"),
    ("RestrictRealtime", "yes"),
    ("RestrictSUIDSGID", "yes"),
    ("LockPersonality", "yes"),
    ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"),
    ("SystemCallArchitectures", "native"),
    ("SystemCallFilter", "@system-service"),
    ("UMask", "0077"),
]
_CLOSED_DEVICES: Section = [("PrivateDevices", "yes")]
_GPU_DEVICES: Section = [  # a GPU's device files, and nothing else
    ("DevicePolicy", "closed"),
    ("DeviceAllow", "char-nvidia-frontend rw"),
    ("DeviceAllow", "char-nvidia rw"),
    ("DeviceAllow", "char-nvidia-uvm rw"),
]
_SYSCTL = """\
# Valkey forks to write its file: without overcommit that fails when memory is half full
vm.overcommit_memory = 1
# connections that wait to be accepted, of Valkey, PostgreSQL and the API
net.core.somaxconn = 4096
"""


_GPU_UNIT = "batchsvc-gpu.service"
_DATA_UNITS = {service: f"batchsvc-{service}.service" for service in SERVICES}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFile:
    """A file of one host: its contents, or those of the secret of this name. `is_private`: it is our user's alone.
    `reader`: the unit that reads it (of a template without an instance), "ours" for all but the data services."""

    path: str
    text: str = ""
    secret: str = ""
    mode: int = 0o644
    is_private: bool = False
    reader: str = ""

    @property
    def name(self) -> str:
        """What it is called in the folder that is copied to the host."""
        return ("secret-" if self.secret else "") + self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """All of one host, in the order in which its units start."""

    host: str
    files: tuple[HostFile, ...]
    units: tuple[str, ...]

    @property
    def unwanted(self) -> list[str]:
        """Units that an earlier plan may have started here. Data services stay: whoever moves them knows when."""
        engines = [f"batchsvc-engine@{number}.service" for number in range(MOST_WORKERS)]
        known = ["batchsvc-api.service", "batchsvc-control.service", "batchsvc-migrate.service", _GPU_UNIT, *engines]
        return [unit for unit in known if unit not in self.units]

    def read_by(self, unit: str) -> list[str]:
        """Paths of the files that a unit has to be restarted for when they change."""
        template = re.sub(r"@\d+", "@", unit)
        readers = {template} if unit in _DATA_UNITS.values() else {template, _OURS}
        return [file.path for file in self.files if file.reader in readers]


def at(path: str, host: str) -> str:
    """A path on a host."""
    return path.replace("{host}", host)


class Systemd:
    """The units of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def hosts(self) -> list[HostSetup]:
        """Every host with its files and units, in the order in which they are brought up."""
        return [self._host(host) for host in self._plan.hosts]

    def _host(self, host: str) -> HostSetup:
        plan = self._plan
        config, units = at(plan.paths.config, host), at(plan.paths.units, host)
        files: list[HostFile] = []
        started: list[str] = []
        secrets: set[str] = set()
        if host == plan.data_host:
            for service in plan.services:
                unit = _DATA_UNITS[service]
                files += [replace(file, reader=unit) for file in self._data_service(service, host)]
                started.append(unit)
                secrets |= {name for name, owner in OF_SERVICE.items() if owner == service}
        is_api, is_worker = host == plan.api_host, host in plan.worker_hosts
        if is_api or is_worker:
            secrets |= set(SECRET_SETTINGS.values())
            files.append(HostFile(path=f"{config}/batchsvc.env", text=self._env(host), reader=_OURS))
            files.append(HostFile(path=f"{config}/here", text=self._here(host), mode=0o755))
        if is_api:
            files += [
                HostFile(path=f"{units}/{name}", text=text, reader=name) for name, text in self._api_units(host).items()
            ]
            started += ["batchsvc-migrate.service", "batchsvc-api.service", "batchsvc-control.service"]
        if is_worker:
            name = "batchsvc-engine@.service"
            files.append(HostFile(path=f"{units}/{name}", text=self._engine_unit(host), reader=name))
            if plan.device == "cuda":
                files.append(HostFile(path=f"{units}/{_GPU_UNIT}", text=self._gpu_unit(), reader=_GPU_UNIT))
                started.append(_GPU_UNIT)
            started += [f"batchsvc-engine@{number}.service" for number in range(plan.workers)]
        files.append(HostFile(path=f"{config}/90-batchsvc.conf", text=_SYSCTL))
        files += [
            HostFile(
                path=f"{config}/secrets/{name}",
                secret=name,
                mode=0o400,
                is_private=True,
                reader=_DATA_UNITS[OF_SERVICE[name]] if name in OF_SERVICE else _OURS,
            )
            for name in sorted(secrets)
        ]
        return HostSetup(host=host, files=tuple(files), units=tuple(started))

    def _env(self, host: str) -> str:
        plan = self._plan
        own = {
            **plan.secret_settings(at(plan.paths.config, host) + "/secrets"),
            "AWS_ENDPOINT_URL_S3": f"http://{authority(plan.data_host, S3_PORT)}",
            **plan.settings,
            "BATCHSVC_HOST": host,
            "BATCHSVC_SIGNALS_HOST": host,
        }
        if "s3" in plan.without and "AWS_ENDPOINT_URL_S3" not in plan.extra:
            own.pop("AWS_ENDPOINT_URL_S3")
        own |= plan.extra
        head = "# settings of this host's processes; secrets lie in files\n"
        return head + "".join(f'{name}="{value}"\n' for name, value in own.items())

    def _here(self, host: str) -> str:
        plan = self._plan
        config, state = at(plan.paths.config, host), at(plan.paths.state, host)
        return f"""\
#!/bin/sh
# batchsvc with the settings of this host and as its user, whose cache of models the processes share
set -eu
if [ "$(id -u)" = 0 ] && [ -z "${{is_user:-}}" ]; then
  is_user=1 exec runuser -u {plan.user} -- "$0" "$@"
fi
set -a; . "{config}/batchsvc.env"; set +a
export HOME="{state}"
exec {at(plan.paths.program, host)} "$@"
"""

    def _api_units(self, host: str) -> dict[str, str]:
        plan = self._plan
        program = at(plan.paths.program, host)
        after = ["batchsvc-migrate.service"]
        # not Requires: what that keeps down, nothing starts later. API and control refuse an old schema and try again
        wants = [("Wants", "batchsvc-migrate.service")]
        local = [f"batchsvc-{service}.service" for service in plan.services] if host == plan.data_host else []
        migrate = self._unit(
            "batchsvc: schema and prices",
            after=local,
            service=[
                ("Type", "oneshot"),
                ("RemainAfterExit", "yes"),
                *self._ours(host),
                ("ExecStart", f"{program} migrate --wait {MIGRATE_WAIT_S}"),
                ("TimeoutStartSec", "infinity"),
                ("Restart", "on-failure"),
                ("RestartSec", "5"),
                *_HARDENING,
                *_CLOSED_DEVICES,
            ],
        )
        api = self._unit(
            "batchsvc: API",
            after=after,
            wants=wants,
            service=[
                *self._serving(host, "api", stop_s=API_DRAIN_S),
                self._ready(host, plan.api_port),
                ("LimitNOFILE", "65536"),
                ("MemoryMax", "4G"),
                ("TasksMax", "512"),
                *_HARDENING,
                *_CLOSED_DEVICES,
            ],
        )
        control = self._unit(
            "batchsvc: planner, finalizer and reaper",
            after=after,
            wants=wants,
            service=[
                ("Environment", f"BATCHSVC_SIGNALS_PORT={SIGNALS_PORT}"),
                *self._serving(host, "control", stop_s=plan.stop_s),
                self._ready(host, SIGNALS_PORT),
                ("LimitNOFILE", "65536"),
                ("MemoryMax", "8G"),
                ("TasksMax", "512"),
                *_HARDENING,
                *_CLOSED_DEVICES,
            ],
        )
        return {
            "batchsvc-migrate.service": migrate,
            "batchsvc-api.service": api,
            "batchsvc-control.service": control,
        }

    def _engine_unit(self, host: str) -> str:
        """A template: its instances are counted from 0, and on a GPU host each has the GPU of its number."""
        plan = self._plan
        gpu = plan.device == "cuda"
        return self._unit(
            "batchsvc: engine worker %i",
            after=[
                *(["batchsvc-migrate.service"] if host == plan.api_host else []),
                *([_GPU_UNIT] if gpu else []),
            ],
            wants=[("Wants", _GPU_UNIT)] if gpu else None,
            service=[
                ("Environment", "BATCHSVC_SIGNALS_PORT=911%i"),
                ("Environment", f"BATCHSVC_WORKER_NAME={host.replace(':', '.')}-%i"),
                *([("Environment", "CUDA_VISIBLE_DEVICES=%i")] if gpu else []),
                *self._serving(host, "engine", stop_s=plan.stop_s),
                ("LimitNOFILE", "65536"),
                ("LimitMEMLOCK", "infinity"),
                ("OOMScoreAdjust", "200"),
                ("TasksMax", "4096"),
                *_HARDENING,
                *(_GPU_DEVICES if gpu else _CLOSED_DEVICES),
            ],
        )

    def _gpu_unit(self) -> str:
        """Loads the driver's modules and makes their device files, which after a boot whoever uses a GPU first does as
        root, and an engine can't; a unit of its own, because systemd looks up the devices of an engine's unit before it
        runs any command of it."""
        numbers = " ".join(f"-c {number}" for number in range(self._plan.workers))
        return self._unit(
            "batchsvc: device files of the GPUs",
            service=[
                ("Type", "oneshot"),
                ("RemainAfterExit", "yes"),
                ("ExecStart", f"-/usr/bin/nvidia-modprobe -c 255 {numbers}"),  # 255: nvidiactl
                ("ExecStart", "-/usr/bin/nvidia-modprobe -u -c 0 -c 1"),  # nvidia-uvm and its tools
                ("NoNewPrivileges", "yes"),
                ("ProtectSystem", "strict"),
                ("ProtectHome", "yes"),
            ],
        )

    def _data_service(self, service: str, host: str) -> list[HostFile]:
        plan = self._plan
        config, state = at(plan.paths.config, host), at(plan.paths.state, host)
        units = at(plan.paths.units, host)
        limits: Section = [("LimitNOFILE", "65536"), ("TasksMax", "4096"), *_HARDENING, *_CLOSED_DEVICES]
        if service == "postgres":
            folder = f"{state}/postgres"
            start = f"{config}/start-postgres"
            unit = self._unit(
                "batchsvc: PostgreSQL",
                service=[
                    *self._who(host),
                    ("Type", "exec"),
                    ("ExecStartPre", start),
                    (
                        "ExecStart",
                        f"{plan.paths.postgres}/postgres -D {folder} -c config_file={config}/postgresql.conf",
                    ),
                    ("ExecStartPost", f"{start} database"),
                    ("KillSignal", "SIGINT"),  # a fast shutdown: sessions are ended, nothing is lost
                    ("TimeoutStartSec", "infinity"),  # after a crash it replays its log, for as long as that takes
                    *_restarts(stop_s=120),
                    *limits,
                ],
            )
            return [
                HostFile(path=f"{units}/batchsvc-postgres.service", text=unit),
                HostFile(path=f"{config}/postgresql.conf", text=self._postgresql_conf(host, folder)),
                HostFile(path=f"{config}/pg_hba.conf", text=_PG_HBA),
                HostFile(path=start, text=self._start_postgres(host, folder), mode=0o755),
            ]
        if service == "valkey":
            text = (
                f"bind {host}\nport {VALKEY_PORT}\nprotected-mode yes\ndir {state}/valkey\nappendonly yes\n"
                'appendfsync everysec\nsave ""\nmaxmemory-policy noeviction\n'
                f"include {config}/secrets/valkey.conf\n"
            )
            unit = self._unit(
                "batchsvc: Valkey",
                service=[
                    *self._who(host),
                    ("Type", "exec"),
                    ("ExecStart", f"{plan.paths.valkey} {config}/valkey.conf"),
                    *_restarts(stop_s=60),
                    *limits,
                ],
            )
            return [
                HostFile(path=f"{units}/batchsvc-valkey.service", text=unit),
                HostFile(path=f"{config}/valkey.conf", text=text),
            ]
        argv = (
            # only the S3 gateway is reached from outside; what lies behind it asks for the keys of security.toml too
            f"{plan.paths.weed} server -dir={state}/s3 -ip=127.0.0.1 -ip.bind=127.0.0.1 -master.port={plan.weed_port} "
            f"-volume.port={plan.weed_port + 1} -filer -filer.port={plan.weed_port + 2} -s3 -s3.ip.bind={host} "
            f"-s3.port={S3_PORT} -s3.config={config}/secrets/s3.json -s3.port.iceberg=0 -s3.port.lance=0 "
            f"-s3.localSocket={state}/s3/s3.sock -filer.localSocket={state}/s3/filer.sock -master.telemetry=false "
            "-volume.max=0"
        )
        unit = self._unit(
            "batchsvc: S3 (SeaweedFS)",
            service=[
                *self._who(host),
                ("Type", "exec"),
                ("WorkingDirectory", f"{config}/secrets"),  # where weed looks for its security.toml
                ("ExecStart", argv),
                self._probe(f"http://{authority(host, S3_PORT)}/healthz", host),
                *_restarts(stop_s=60),
                *limits,
            ],
        )
        return [HostFile(path=f"{units}/batchsvc-s3.service", text=unit)]

    def _start_postgres(self, host: str, folder: str) -> str:
        bin_, config = self._plan.paths.postgres, at(self._plan.paths.config, host)
        return f"""\
#!/bin/sh
# Before the start: a cluster where there is none. With `database`: waits for the server, and makes role and database.
set -eu
if [ "${{1:-}}" = database ]; then
  export PGHOST={folder} PGPORT={POSTGRES_PORT} PGUSER=postgres PGDATABASE=postgres
  since=$(date +%s)
  until told=$({bin_}/pg_isready 2>&1); do
    case $? in 1|2) ;; *) echo "pg_isready: $told" >&2; exit 1 ;; esac  # 1: it starts, 2: it doesn't answer yet
    [ -d "/proc/$MAINPID" ] || exit 1  # it ended: systemd starts it again once this has ended too
    [ $(($(date +%s) - since)) -lt 60 ] || {{ echo "Still waiting for PostgreSQL: $told" >&2; since=$(date +%s); }}
    sleep 0.2
  done
  password=$(cat {config}/secrets/postgres_password)
  {bin_}/psql -Xq -v ON_ERROR_STOP=1 <<SQL
SELECT 'CREATE ROLE batchsvc LOGIN' WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'batchsvc') \\gexec
ALTER ROLE batchsvc PASSWORD '$password';
SELECT 'CREATE DATABASE batchsvc OWNER batchsvc'
  WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = 'batchsvc') \\gexec
SQL
elif [ ! -s {folder}/PG_VERSION ]; then
  rm -rf {folder}.new  # of a start that was cut off
  {bin_}/initdb -D {folder}.new -U postgres -E UTF8 --locale=C --auth-local=peer --auth-host=scram-sha-256 >/dev/null
  [ ! -d {folder} ] || rmdir {folder}
  mv {folder}.new {folder}
fi
"""  # noqa: S608  a script for psql; its one value is the password that we made

    def _postgresql_conf(self, host: str, folder: str) -> str:
        hba = at(self._plan.paths.config, host) + "/pg_hba.conf"
        return (
            f"listen_addresses = '{host}'\nport = {POSTGRES_PORT}\nunix_socket_directories = '{folder}'\n"
            f"hba_file = '{hba}'\nident_file = '{folder}/pg_ident.conf'\npassword_encryption = scram-sha-256\n"
            "max_connections = 200\nshared_buffers = 256MB\nwal_compression = on\n"
            "# a worker that vanished with its network is noticed\ntcp_keepalives_idle = 30\n"
            "tcp_keepalives_interval = 10\ntcp_keepalives_count = 3\n"
        )

    def _unit(self, title: str, *, after: Iterable[str] = (), wants: Section | None = None, service: Section) -> str:
        waits = " ".join(["network-online.target", "time-sync.target", *after])
        unit: Section = [
            ("Description", title),
            ("Wants", "network-online.target"),
            ("After", waits),
            *(wants or []),
            ("StartLimitIntervalSec", "0"),
        ]
        return _written({"Unit": unit, "Service": service, "Install": [("WantedBy", "multi-user.target")]})

    def _who(self, host: str) -> Section:
        state = at(self._plan.paths.state, host)
        return [("User", self._plan.user), ("ReadWritePaths", state)]

    def _ours(self, host: str) -> Section:
        state, config = at(self._plan.paths.state, host), at(self._plan.paths.config, host)
        return [
            *self._who(host),
            ("WorkingDirectory", state),
            ("EnvironmentFile", f"{config}/batchsvc.env"),
            ("Environment", f"HOME={state}"),
            ("Environment", "PYTHONUNBUFFERED=1"),
        ]

    def _serving(self, host: str, process: str, *, stop_s: float) -> Section:
        return [
            ("Type", "exec"),
            *self._ours(host),
            ("ExecStart", f"{at(self._plan.paths.program, host)} serve {process}"),
            *_restarts(stop_s=stop_s),
        ]

    def _ready(self, host: str, port: int) -> tuple[str, str]:
        return self._probe(f"http://{authority(host, port)}/readyz", host)

    def _probe(self, url: str, host: str) -> tuple[str, str]:
        """`systemctl start` returns when the process is ready; one that isn't yet goes on trying, and isn't killed."""
        python = PurePosixPath(at(self._plan.paths.program, host)).with_name("python")
        return ("ExecStartPost", f"-{python} -P -m batchsvc.deploy.probe {url} 60")


_PG_HBA = """\
# the socket lies in a folder that its owner alone can enter
local all postgres trust
host batchsvc batchsvc all scram-sha-256
"""


def _restarts(*, stop_s: float) -> Section:
    return [("Restart", "on-failure"), ("RestartSec", "5"), ("TimeoutStopSec", f"{stop_s:g}"), ("KillMode", "mixed")]


def _written(sections: Mapping[str, Section]) -> str:
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in lines) for name, lines in sections.items()
    )
