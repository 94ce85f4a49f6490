"""What is printed with a deployment: the folder that is written, and the commands that bring it up, in their order.

Standard output is a shell script: run as it is, or read and typed, and again after any change. It holds no secret.
"""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path, PurePosixPath

from batchsvc.deploy import compose, images, k8s
from batchsvc.deploy.plan import Plan
from batchsvc.deploy.secrets import digest, made
from batchsvc.deploy.systemd import HostSetup, Systemd, at

_UPLOADED = "batchsvc-deploy"  # in the home directory of whom ssh logs in
_ADMIN = "admin_key"


def write_systemd(plan: Plan, folder: Path, *, ssh: str, wheel: Path | None = None) -> list[str]:
    """Write a folder a host; returns the commands. `ssh` is how a host is logged in to, such as root@{host}."""
    secrets = made(plan, folder / "secrets", database=plan.data_host, queue=plan.data_host)
    commands = []
    for host in Systemd(plan).hosts():
        place = folder / host.host
        _write_host(plan, host, place, secrets, wheel)
        login = ssh.replace("{host}", host.host)
        commands += [
            f"# {host.host}: {', '.join(host.units)}",
            f"ssh {login} rm -rf {_UPLOADED}",  # of a run that ended early: scp would copy into it
            f"scp -qr {shlex.quote(_with_slash(place))} {_for_scp(login)}:{_UPLOADED}",
            f"ssh {login} 'sh {_UPLOADED}/setup.sh && rm -rf {_UPLOADED}'",  # secrets lie in it
        ]
    here = f"ssh {ssh.replace('{host}', plan.api_host)} {at(plan.paths.config, plan.api_host)}/here"
    return [
        *_about_halves(plan, folder),
        *commands,
        "# the model that batches may name, and a key for whoever operates this",
        f"{here} models add {plan.model} --from-env",
        _admin_key(here, folder),
    ]


def write_compose(plan: Plan, folder: Path) -> list[str]:
    """Write compose.yaml, Dockerfile and secrets; returns the commands."""
    secrets = made(plan, folder / "secrets", database="postgres", queue="valkey")
    for name, path in secrets.items():  # compose mounts them as they are, and the containers are no root
        if name != _ADMIN:
            path.chmod(0o444)
    digest_of = partial(digest, folder / "secrets")
    _write(folder / "compose.yaml", compose.compose_file(plan, digest_of))
    for file, text in images.files(plan).items():
        _write(folder / file, text)
    docker = f"docker compose -f {shlex.quote(str(folder / 'compose.yaml'))}"
    run = f"{docker} exec -T api batchsvc"
    return [
        *_about_halves(plan, folder),
        f"docker build -t {plan.image} -f {shlex.quote(str(folder / 'Dockerfile'))} .",
        f"{docker} up --detach --wait api control",  # what they need comes with them
        f"{docker} up --detach",  # engines, which may pull their model for long
        f"{run} models add {plan.model} --from-env",
        _admin_key(run, folder),
    ]


def write_k8s(plan: Plan, folder: Path) -> list[str]:
    """Write the manifests, Dockerfile and secrets; returns the commands."""
    secrets = made(plan, folder / "secrets", database="postgres", queue="valkey")
    digest_of = partial(digest, folder / "secrets")
    _write(folder / "batchsvc.yaml", k8s.written(k8s.documents(plan, digest_of)))
    _write(folder / "engines.yaml", k8s.written(k8s.engines(plan, digest_of)))
    _write(folder / "backups.yaml", k8s.written(k8s.backups(plan)))  # applied by whoever has a volume for them
    for file, text in images.files(plan).items():
        _write(folder / file, text)
    kubectl = f"kubectl -n {plan.namespace}"
    path, engines = (shlex.quote(str(folder / name)) for name in ("batchsvc.yaml", "engines.yaml"))
    sources = " ".join(f"--from-file={shlex.quote(str(file))}" for name, file in secrets.items() if name != _ADMIN)
    run = f"{kubectl} exec deploy/batchsvc-api -- batchsvc"
    return [
        *_about_halves(plan, folder),
        f"docker build -t {plan.image} -f {shlex.quote(str(folder / 'Dockerfile'))} .",
        f"docker push {plan.image}",
        # not by `apply`: without the labels of the manifest it would take them away
        f"kubectl get namespace {plan.namespace} >/dev/null 2>&1 || kubectl create namespace {plan.namespace}",
        f"{kubectl} create secret generic batchsvc {sources} --dry-run=client -o yaml | {kubectl} apply -f -",
        f"kubectl apply -f {path}",
        f"{kubectl} wait --for=condition=complete job/{k8s.migration_name(plan)} --timeout=300s",
        # backups that were applied would refuse the new schema each night; nothing else of them is touched: schedule
        # and volume may be whoever's who operates this
        f"jobs=$({kubectl} get cronjob -l 'app.kubernetes.io/name in ({', '.join(k8s.CRON_JOBS)})' -o name)",
        f'for job in $jobs; do {kubectl} set image "$job" {k8s.CRON_CONTAINER}={plan.image}; done',
        f"{kubectl} rollout status deploy/batchsvc-api --timeout=300s",
        f"kubectl apply -f {engines}",
        f"{run} models add {plan.model} --from-env",
        _admin_key(run, folder),
    ]


def _about_halves(plan: Plan, folder: Path) -> list[str]:
    """Where workers have roles: what they know each other by."""
    if "BATCHSVC_ROLE" not in plan.extra and "BATCHSVC_SPLIT_LISTEN" not in plan.extra:
        return []
    key = shlex.quote(str(folder / "secrets" / "split_key"))
    return [f"# prefill and decode workers know each other by {key}: all of them get it as BATCHSVC_SPLIT_KEY_FILE"]


def _with_slash(place: Path) -> str:
    """A path with a colon and no slash before it would be a host's for scp."""
    return str(place) if place.is_absolute() else f"./{place}"


def _for_scp(login: str) -> str:
    """scp takes what follows a colon for a path, unless the address is in brackets."""
    user, sign, host = login.rpartition("@")
    return f"{user}{sign}[{host}]" if ":" in host else login


def _admin_key(program: str, folder: Path) -> str:
    """Makes a key where none was made yet: an older one would stay valid, and nobody would have it."""
    key = shlex.quote(str(folder / "secrets" / _ADMIN))
    return f"[ -s {key} ] || (umask 077; {program} keys create ops --admin --from-env > {key})"


def setup_script(plan: Plan, host: HostSetup, *, wheel: str | None = None) -> str:
    """What puts a host's files in place and starts its units; run again, it restarts those whose files changed."""
    state, config = (at(path, host.host) for path in (plan.paths.state, plan.paths.config))
    program = at(plan.paths.program, host.host)
    installed = _venv(program, wheel)
    data = " ".join(f"{state}/{unit.split('-')[1].split('.')[0]}" for unit in host.units if _is_data(unit))
    lines = [
        "#!/bin/sh",
        "# Puts this host's files in place, and (re)starts the units that don't run or whose files changed.",
        "set -eu",
        'cd "$(dirname "$0")"',
        f"id -u {plan.user} >/dev/null 2>&1 || "
        f"useradd --system --user-group --home-dir {state} --shell /usr/sbin/nologin {plan.user}",
        *installed,
        f"install -d -m 0755 {config}",
        f"install -d -m 0700 {config}/applied",
        f"install -d -m 0700 -o {plan.user} {config}/secrets",
        f"install -d -m 0700 -o {plan.user} {state} {data}".rstrip(),
    ]
    for file in host.files:
        owner = f"-o {plan.user} " if file.is_private else ""
        lines.append(f"install -D -m {file.mode:04o} {owner}{file.name} {file.path}")
    units = " ".join(host.units)
    return "\n".join(
        [
            *lines,
            f"[ ! -w /etc/sysctl.d ] || install -m 0644 {config}/90-batchsvc.conf /etc/sysctl.d/90-batchsvc.conf",
            "sysctl --system >/dev/null 2>&1 || echo 'The kernel settings of 90-batchsvc.conf are not in force.' >&2",
            "systemctl daemon-reload",
            f"systemctl enable --quiet {units}",
            *_restarts(host, config, program),
            "",
        ]
    )


_CHECK = """\
check() { # UNIT FILE...: it is due if it doesn't run, or was last started with other files
  unit=$1; shift
  cat "$@" | sha256sum > "$applied/$unit.new"
  [ "$(cat "$applied/$unit.new")" = "$(cat "$applied/$unit" 2>/dev/null)" ] &&
    systemctl is-active --quiet "$unit" || due="$due $unit"
}
restart() {
  for unit in "$@"; do echo "starting $unit (its log: journalctl -fu $unit)"; done
  systemctl restart "$@"
  for unit in "$@"; do mv "$applied/$unit.new" "$applied/$unit"; done
}"""


def _restarts(host: HostSetup, config: str, program: str) -> list[str]:
    """Restarts only what must be: a changed setting is no reason to stop PostgreSQL, and engines go one by one."""
    installed = PurePosixPath(program).parent.parent / "lib/python*/site-packages/batchsvc-*.dist-info/RECORD"

    def check(unit: str) -> str:
        ours = [] if _is_data(unit) else ["$version"]
        return " ".join(["check", unit, *host.read_by(unit), *ours])

    def due(units: list[str], *, one_by_one: bool = False) -> list[str]:
        if not units:
            return []
        restart = 'for one in $due; do restart "$one"; done' if one_by_one else '[ -z "$due" ] || restart $due'
        return ["due=", *(check(unit) for unit in units), restart]

    engines = [unit for unit in host.units if "@" in unit]
    data = [unit for unit in host.units if _is_data(unit)]
    schema = [unit for unit in host.units if unit == "batchsvc-migrate.service"]
    others = [unit for unit in host.units if unit not in {*engines, *data, *schema}]
    return [
        f"applied={config}/applied",
        f"version=$(ls {installed} 2>/dev/null || true)",  # has a checksum of each file of our program
        _CHECK,
        *due(data),
        *due(schema),  # while the API still runs: old processes bear a new schema
        *due(others),
        *due(engines, one_by_one=True),
        f"for unit in {' '.join(host.unwanted)}; do  # of fewer workers than before, or of another host's now",
        '  systemctl is-enabled --quiet "$unit" 2>/dev/null || continue',
        '  systemctl disable --quiet --now "$unit"',
        "done",
    ]


def _venv(program: str, wheel: str | None) -> list[str]:
    folder = str(Path(program).parent.parent)
    if wheel is None:
        says = f"{program} is missing: python3 -m venv {folder} && {folder}/bin/pip install batchsvc"
        return [f"[ -x {program} ] || {{ echo {shlex.quote(says)} >&2; exit 1; }}"]
    return [f"[ -x {folder}/bin/python ] || python3 -m venv {folder}", f"{folder}/bin/pip install -q {wheel}"]


def _is_data(unit: str) -> bool:
    return unit in ("batchsvc-postgres.service", "batchsvc-valkey.service", "batchsvc-s3.service")


def _write_host(plan: Plan, host: HostSetup, place: Path, secrets: dict[str, Path], wheel: Path | None) -> None:
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    place.chmod(0o700)
    for file in host.files:
        text = secrets[file.secret].read_text(encoding="utf-8") if file.secret else file.text
        _write(place / file.name, text, mode=0o600)
    if wheel is not None:
        (place / wheel.name).write_bytes(wheel.read_bytes())
    extra = "" if plan.device == "cpu" else "[gpu]"
    named = None if wheel is None else shlex.quote(f"./{wheel.name}{extra}")
    _write(place / "setup.sh", setup_script(plan, host, wheel=named))


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
