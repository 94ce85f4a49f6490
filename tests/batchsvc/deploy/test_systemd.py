"""Units are right for systemd, hardened, and wait longer for a process than it drains; secrets are only in files."""

from __future__ import annotations

import getpass
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from batchsvc.deploy import steps
from batchsvc.deploy.plan import Device, Paths, Plan, PlanError
from batchsvc.deploy.systemd import Systemd
from tests.units import Unit, parse

THREE = ("10.9.0.1", "10.9.0.2", "10.9.0.3")


def unit_files(plan: Plan) -> dict[str, str]:
    return {
        Path(file.path).name: file.text
        for host in Systemd(plan).hosts()
        for file in host.files
        if file.path.startswith(plan.paths.units)
    }


def units_of(plan: Plan) -> dict[str, Unit]:
    return {name: parse(text, "0" if "@" in name else "") for name, text in unit_files(plan).items()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("hosts", [THREE, ("10.9.0.1",), ("10.9.0.1", "db.example.com")])
def test_every_unit_is_hardened_restarts_and_stops_later_than_its_process(
    hosts: tuple[str, ...], device: Device
) -> None:
    plan = Plan(hosts=hosts, device=device, term_grace_s=300, workers=2)
    units = units_of(plan)
    assert (units.pop("batchsvc-gpu.service", None) is not None) == (device == "cuda")
    assert set(units) == {
        *("batchsvc-postgres.service", "batchsvc-valkey.service", "batchsvc-s3.service"),
        *("batchsvc-migrate.service", "batchsvc-api.service", "batchsvc-control.service", "batchsvc-engine@.service"),
    }
    for name, unit in units.items():
        assert unit.one("User") == "batchsvc"
        assert unit.one("NoNewPrivileges") == "yes"
        assert unit.one("ProtectSystem") == "strict"
        assert unit.one("CapabilityBoundingSet") == ""
        assert unit.one("SystemCallFilter") == "@system-service"
        assert not any("hunter" in value or "password=" in value.lower() for value in unit.all("Environment"))
        if "migrate" not in name:
            assert (unit.one("Restart"), unit.all("StartLimitIntervalSec", "Unit")) == ("on-failure", ["0"])
            assert unit.one("LimitNOFILE") == "65536"
    for name in ("batchsvc-control.service", "batchsvc-engine@.service"):
        assert units[name].seconds("TimeoutStopSec", "0") > plan.term_grace_s
    for name, path in (("batchsvc-api.service", "8080/readyz"), ("batchsvc-control.service", "9100/readyz")):
        assert units[name].commands("ExecStartPost")[0].argv[-2].endswith(path)
    engine = units["batchsvc-engine@.service"]
    is_gpu = device == "cuda"
    assert ("CUDA_VISIBLE_DEVICES=0" in engine.all("Environment")) == is_gpu
    assert bool(engine.all("DeviceAllow")) == is_gpu
    assert engine.all("PrivateDevices") == ([] if is_gpu else ["yes"])


def test_after_a_boot_without_its_database_a_host_comes_up_all_the_same() -> None:
    """A migration waits for PostgreSQL and is tried again; nothing stays down because it failed once."""
    units = units_of(Plan(hosts=THREE))
    migrate = units["batchsvc-migrate.service"]
    assert migrate.commands("ExecStart")[0].argv[1:] == ["migrate", "--wait", "120"]
    assert (migrate.one("Type"), migrate.one("Restart"), migrate.one("RestartSec")) == ("oneshot", "on-failure", "5")
    assert migrate.all("StartLimitIntervalSec", "Unit") == ["0"]
    for name in ("batchsvc-api.service", "batchsvc-control.service"):
        assert units[name].all("Requires", "Unit") == []
        assert "batchsvc-migrate.service" in units[name].all("Wants", "Unit")
        assert "batchsvc-migrate.service" in units[name].all("After", "Unit")[0].split()


def test_the_devices_of_gpus_are_there_before_an_engine_starts() -> None:
    """Its unit may gain no privilege, so it can't load the driver's modules; nor may a missing program keep it down."""
    plan = Plan(hosts=THREE, device="cuda", workers=2)
    units = units_of(plan)
    gpu, engine = units["batchsvc-gpu.service"], units["batchsvc-engine@.service"]
    assert [command.may_fail for command in gpu.commands("ExecStart")] == [True, True]
    assert [command.argv[1:] for command in gpu.commands("ExecStart")] == [
        ["-c", "255", "-c", "0", "-c", "1"],
        ["-u", "-c", "0", "-c", "1"],
    ]
    assert gpu.all("User") == gpu.all("PrivateDevices") == []
    assert "batchsvc-gpu.service" in engine.all("After", "Unit")[0].split()
    assert "batchsvc-gpu.service" in engine.all("Wants", "Unit")
    assert [host.units[0] for host in Systemd(plan).hosts() if "batchsvc-gpu.service" in host.units] == [
        "batchsvc-gpu.service"
    ]
    assert not any("batchsvc-gpu.service" in text for text in unit_files(Plan(hosts=THREE)).values())


def wait_for_postgres(programs: Path, *, ready: str, main_pid: int | str) -> subprocess.CompletedProcess[str]:
    """`start-postgres database` beside a pg_isready that does `ready`, a psql that fails, and a clock that runs."""
    [start] = [file for file in Systemd(Plan()).hosts()[0].files if file.path.endswith("start-postgres")]
    (programs / "password").write_text("p")
    for name, text in (
        ("pg_isready", ready),
        ("psql", "echo 'psql: too many clients' >&2; exit 2"),
        ("date", f"echo . >> {programs}/ticks; echo $((30 * $(wc -l < {programs}/ticks)))"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    script = start.text.replace(Paths().postgres, str(programs))
    script = script.replace(f"{Paths().config}/secrets/postgres_password", str(programs / "password"))
    argv, env = ["sh", "-c", script, "start-postgres", "database"], {"PATH": f"{programs}:/usr/bin:/bin"}
    env["MAINPID"] = str(main_pid)
    return subprocess.run(argv, env=env, timeout=20, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("state", [1, 2], ids=["starting", "no answer"])
def test_who_waits_for_postgres_gives_up_when_it_has_ended(tmp_path: Path, state: int) -> None:
    """Its unit waits for ever, for a long recovery; systemd starts it again only once its last command has ended."""
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    assert wait_for_postgres(tmp_path, ready=f"exit {state}", main_pid=nobody).returncode == 1
    assert units_of(Plan())["batchsvc-postgres.service"].one("TimeoutStartSec") == "infinity"


def test_who_waits_for_postgres_says_each_minute_what_it_waits_for_and_fails_aloud(tmp_path: Path) -> None:
    """No failure but that of a server that starts is waited out: the unit fails with it, in the log."""
    ready = f"echo . >> {tmp_path}/asked; echo 'socket - rejecting'; [ $(wc -l < {tmp_path}/asked) -gt 5 ]"
    waited = wait_for_postgres(tmp_path, ready=ready, main_pid="self")
    assert waited.returncode == 2
    told = waited.stderr.splitlines()
    assert told[-1] == "psql: too many clients"
    assert set(told[:-1]) == {"Still waiting for PostgreSQL: socket - rejecting"}
    assert 1 <= len(told[:-1]) < 5
    missing = wait_for_postgres(tmp_path, ready="echo 'no attempt' >&2; exit 3", main_pid="self")
    assert (missing.returncode, missing.stderr) == (1, "pg_isready: no attempt\n")


def test_a_worker_host_needs_nothing_of_the_others_units() -> None:
    data, api, worker = Systemd(Plan(hosts=THREE, workers=2)).hosts()
    assert data.units == ("batchsvc-postgres.service", "batchsvc-valkey.service", "batchsvc-s3.service")
    assert api.units == ("batchsvc-migrate.service", "batchsvc-api.service", "batchsvc-control.service")
    assert worker.units == ("batchsvc-engine@0.service", "batchsvc-engine@1.service")
    for host in (api, worker):
        here = {Path(file.path).name for file in host.files}
        named = {
            name
            for file in host.files
            if file.path.endswith(".service")
            for name in re.findall(r"[\w@-]+\.service", file.text)
        }
        assert named <= here
        secrets = {file.secret for file in host.files if file.secret}
        assert secrets == {"database_url", "redis_url", "s3_access_key", "s3_secret_key", "secret_key", "split_key"}
    assert {file.secret for file in data.files if file.secret} == {
        *("postgres_password", "valkey.conf", "s3.json", "security.toml"),
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_unit_has_only_directives_that_systemd_knows(device: Device) -> None:
    """By a strict parser, which knows just those that we use: also where systemd's own program is missing."""
    for name, text in unit_files(Plan(hosts=THREE, device=device)).items():
        parse(text, "0" if "@" in name else "")


def test_systemd_itself_finds_nothing_wrong(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is missing here: the strict parser above alone has read the units")
    program = tmp_path / "bin" / "x"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in ("postgres", "python"):
        shutil.copy(program, program.with_name(name))
    for device in ("cpu", "cuda"):
        paths = Paths(
            program=str(program), config=str(program.parent), postgres=str(program.parent), valkey=str(program),
            weed=str(program), units="/units",
        )  # fmt: skip
        shutil.copy(program, program.with_name("start-postgres"))
        folder = tmp_path / device
        folder.mkdir()
        files = unit_files(Plan(hosts=THREE, device=device, paths=paths))
        for name, text in files.items():
            (folder / name).write_text(text)
        names = [str(folder / name.replace("@", "@0")) for name in files]
        (folder / "batchsvc-engine@0.service").write_text(files["batchsvc-engine@.service"])
        seen = subprocess.run(
            [analyze, "verify", "--man=no", *names], capture_output=True, text=True, timeout=60, check=False
        )
        ours = [line for line in seen.stderr.splitlines() if "batchsvc" in line]
        assert (seen.returncode, ours) == (0, []), seen.stderr


@pytest.mark.parametrize("wrong", ["Retsart=always", "NoNewPrivilege=yes", "ExecStart=relative/path", "[Services]"])
def test_the_parser_of_tests_refuses_what_systemd_would(wrong: str) -> None:
    text = unit_files(Plan())["batchsvc-api.service"]
    with pytest.raises(AssertionError):
        parse(text.replace("[Install]", f"{wrong}\n[Install]"))


@pytest.mark.parametrize("setting", ["BATCHSVC_ROLE=decode", "BATCHSVC_SPLIT_LISTEN=gloo://10.0.0.5:4100"])
def test_where_workers_have_roles_it_is_told_what_they_know_each_other_by(tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    plain, halves = Plan(hosts=THREE), Plan(hosts=THREE, extra={name: value})
    writers: list[Callable[[Plan], list[str]]] = [
        lambda plan: steps.write_systemd(plan, tmp_path / "systemd", ssh="root@{host}"),
        lambda plan: steps.write_compose(plan, tmp_path / "compose"),
        lambda plan: steps.write_k8s(plan, tmp_path / "k8s"),
    ]
    for write in writers:
        assert not any("BATCHSVC_SPLIT_KEY_FILE" in line for line in write(plain))
        (told,) = (line for line in write(halves) if "BATCHSVC_SPLIT_KEY_FILE" in line)
        assert told.startswith("# prefill and decode workers know each other by ")
        (path,) = tmp_path.glob("*/secrets/split_key") if write is writers[0] else [None]
        assert path is None or (str(path) in told and path.read_text().strip() not in told)
    with pytest.raises(PlanError, match="BATCHSVC_SPLIT_KEY, which is a secret"):
        Plan(extra={"BATCHSVC_SPLIT_KEY": "0123456789abcdef" * 2})


def test_secrets_are_made_once_and_are_nowhere_but_in_their_files(tmp_path: Path) -> None:
    plan = Plan(hosts=THREE)
    printed = "\n".join(steps.write_systemd(plan, tmp_path, ssh="root@{host}"))
    folder = tmp_path / "secrets"
    assert folder.stat().st_mode & 0o777 == 0o700
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    password = first["postgres_password"].strip()
    assert first["database_url"] == f"postgresql://batchsvc:{password}@10.9.0.1:5432/batchsvc\n"
    own = ("s3_jwt_key", "secret_key", "split_key")
    parts = ("postgres_password", "valkey_password", "s3_access_key", "s3_secret_key", *own)
    secret = [first[name].strip() for name in parts]
    assert len(set(secret)) == len(parts)
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.parent.name != "secrets" and not path.name.startswith("secret-"):
            assert not any(value in path.read_text() for value in secret), path
    assert not any(value in printed for value in secret)
    assert steps.write_systemd(plan, tmp_path, ssh="root@{host}") == printed.split("\n")
    assert {path.name: path.read_text() for path in folder.iterdir()} == first


def test_addresses_follow_hosts_and_passwords_but_what_others_wrote_stays(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"

    def written(*hosts: str) -> dict[str, str]:
        steps.write_systemd(Plan(hosts=hosts), tmp_path, ssh="root@{host}")
        return {path.name: path.read_text().strip() for path in folder.iterdir()}

    first = written("127.0.0.1")
    second = written(*THREE)
    assert second["database_url"] == first["database_url"].replace("127.0.0.1", THREE[0])
    assert second["redis_url"] == first["redis_url"].replace("127.0.0.1", THREE[0])
    for name in ("postgres_password", "valkey_password", "s3_secret_key", "s3_jwt_key"):
        (folder / name).unlink()
    third = written(*THREE)
    assert third["database_url"] == f"postgresql://batchsvc:{third['postgres_password']}@{THREE[0]}:5432/batchsvc"
    assert third["redis_url"] == f"redis://:{third['valkey_password']}@{THREE[0]}:6379/0"
    assert third["valkey.conf"] == f"requirepass {third['valkey_password']}"
    assert json.loads(third["s3.json"])["identities"][0]["credentials"][0]["secretKey"] == third["s3_secret_key"]
    assert third["s3_jwt_key"] in third["security.toml"]
    changed = [name for name in second if second[name] != third[name]]
    assert sorted(set(second) - set(changed)) == ["s3_access_key", "secret_key", "split_key"]
    own = {
        "database_url": f"{third['database_url']}?sslmode=verify-full",
        "valkey.conf": "requirepass mine\nmaxmemory 4gb",
    }
    for name, text in own.items():
        (folder / name).write_text(text + "\n")
    assert {name: text for name, text in written("10.9.0.9").items() if name in own} == own
    (folder / "postgres_password").unlink()
    with pytest.raises(PlanError, match=r"database_url was edited, and has another password than postgres_password"):
        written("10.9.0.9")
    (folder / "database_url").unlink()
    assert (folder / "postgres_password").read_text().strip() in written("10.9.0.9")["database_url"]


@pytest.mark.parametrize("place", ["pool:6432", "db.example.com:5432"])
def test_an_address_of_the_same_form_with_another_host_or_port_is_not_ours(tmp_path: Path, place: str) -> None:
    folder, plan = tmp_path / "secrets", Plan(hosts=THREE)
    steps.write_systemd(plan, tmp_path, ssh="root@{host}")
    edited = (folder / "database_url").read_text().replace("10.9.0.1:5432", place)
    (folder / "database_url").write_text(edited)
    steps.write_systemd(plan, tmp_path, ssh="root@{host}")
    assert (folder / "database_url").read_text() == edited


def test_a_folder_from_before_its_sums_is_brought_up_to_date_too(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    steps.write_systemd(Plan(), tmp_path, ssh="root@{host}")
    (folder / ".written").unlink()
    steps.write_systemd(Plan(hosts=("fd00::1", "127.0.0.1")), tmp_path, ssh="root@{host}")
    assert "@[fd00::1]:6379/0" in (folder / "redis_url").read_text()
    (folder / ".written").unlink()
    (folder / "s3_secret_key").unlink()
    steps.write_systemd(Plan(hosts=("fd00::2", "fd00::1")), tmp_path, ssh="root@{host}")
    assert "@[fd00::2]:6379/0" in (folder / "redis_url").read_text()
    assert (folder / "s3_secret_key").read_text().strip() in (folder / "s3.json").read_text()


@pytest.mark.parametrize("name", ["database_url", "redis_url"])
def test_an_address_that_nobody_knows_to_be_ours_is_never_overwritten(tmp_path: Path, name: str) -> None:
    """In a folder from before its sums only the host or password may tell: an edited one is somebody's."""
    folder, plan = tmp_path / "secrets", Plan(hosts=THREE)
    steps.write_systemd(plan, tmp_path, ssh="root@{host}")
    ours = (folder / name).read_text()
    for edited, says in (
        (ours.replace(THREE[0], "pool"), f"{name} names the host pool, where this plan has none"),
        (re.sub(r":[^:@]+@", ":other@", ours), f"{name} was edited, and has another password"),
    ):
        (folder / ".written").unlink()
        (folder / name).write_text(edited)
        with pytest.raises(PlanError, match=says) as refused:
            steps.write_systemd(plan, tmp_path, ssh="root@{host}")
        assert (folder / name).read_text() == edited
        (folder / name).unlink()
        steps.write_systemd(plan, tmp_path, ssh="root@{host}")
        assert (folder / name).read_text() == ours
        if ending := re.search(r"with (\?\S+),", str(refused.value)):
            kept = edited.strip() + ending[1]
            (folder / ".written").unlink()
            (folder / name).write_text(kept)
            steps.write_systemd(plan, tmp_path, ssh="root@{host}")
            assert (folder / name).read_text() == kept


@pytest.mark.parametrize("write", [steps.write_compose, steps.write_k8s])
def test_what_a_killed_run_left_is_no_secret_of_the_deployment(
    tmp_path: Path, write: Callable[[Plan, Path], list[str]]
) -> None:
    write(Plan(), tmp_path)
    left = tmp_path / "secrets" / ".redis_url.new"
    left.write_text("redis://:half")
    left.chmod(0o600)
    assert not any(".new" in line or ".written" in line for line in write(Plan(), tmp_path))
    assert left.stat().st_mode & 0o777 == 0o600


def test_a_host_may_be_an_ipv6_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all that is printed and written: scp and URLs want brackets, ssh and what listens want none."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    commands = steps.write_systemd(Plan(hosts=("fd00::1", "fd00::2")), Path(), ssh="root@{host}")
    assert f"scp -qr {shlex.quote('./fd00::1')} root@[fd00::1]:batchsvc-deploy" in commands
    logins = {word for line in commands for word in shlex.split(line, comments=True) if "root@" in word}
    assert logins == {
        *("root@fd00::1", "root@fd00::2", "root@[fd00::1]:batchsvc-deploy", "root@[fd00::2]:batchsvc-deploy")
    }
    data, api = here / "fd00::1", here / "fd00::2"
    assert "bind fd00::1\n" in (data / "valkey.conf").read_text()
    assert "listen_addresses = 'fd00::1'" in (data / "postgresql.conf").read_text()
    assert "-s3.ip.bind=fd00::1 " in (data / "batchsvc-s3.service").read_text()
    env = (api / "batchsvc.env").read_text()
    assert 'AWS_ENDPOINT_URL_S3="http://[fd00::1]:8333"' in env
    assert 'BATCHSVC_HOST="fd00::2"' in env
    assert "@[fd00::1]:5432/" in (api / "secret-database_url").read_text()
    assert "http://[fd00::2]:8080/readyz" in (api / "batchsvc-api.service").read_text()


def test_services_that_are_there_already_bring_their_own_address(tmp_path: Path) -> None:
    plan = Plan(hosts=THREE, without=frozenset({"postgres", "s3"}))
    with pytest.raises(PlanError, match=r"database_url and .*s3_access_key and .*s3_secret_key in place first"):
        steps.write_systemd(plan, tmp_path, ssh="root@{host}")
    for name in ("database_url", "s3_access_key", "s3_secret_key"):
        (tmp_path / "secrets" / name).write_text(f"postgresql://u@managed/{name}\n")
    steps.write_systemd(plan, tmp_path, ssh="root@{host}")
    assert (tmp_path / "secrets" / "database_url").read_text() == "postgresql://u@managed/database_url\n"
    assert "AWS_ENDPOINT_URL_S3" not in (tmp_path / THREE[1] / "batchsvc.env").read_text()
    assert set(units_of(plan)) & {"batchsvc-postgres.service", "batchsvc-s3.service"} == set()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hosts": ()}, "--hosts names at least one host"),
        ({"hosts": ("a", "a")}, "each once"),
        ({"hosts": ("a b",)}, "neither an address nor a name"),
        ({"hosts": ("10.0.0.1:22",)}, "neither an address nor a name"),
        ({"hosts": ("[fd00::1]",)}, "neither an address nor a name"),
        ({"hosts": ("fe80::1%eth0",)}, "neither an address nor a name"),
        ({"hosts": ("a;rm -rf /",)}, "neither an address nor a name"),
        ({"workers": 0}, "--workers"),
        ({"workers": 10}, "--workers"),
        ({"model": "a$(b)"}, "--model can't be"),
        *(({"engine_memory": size}, "--engine-memory is such as 16Gi") for size in ("16 GB", "16K", "16", "16e1", "0")),
        ({"image": 'x"y'}, "--image can't be"),
        ({"extra": {"BATCHSVC_X": "a\nb"}}, "--set takes NAME=VALUE"),
        ({"extra": {"BATCHSVC_TLS_CERT": "/a.pem"}}, "a proxy speaks TLS"),
        ({"extra": {"DATABASE_URL": "postgresql://u:p@h/x"}}, "which is a secret"),
        ({"extra": {"BATCHSVC_TERM_GRACE_S": "300"}}, "can't take BATCHSVC_TERM_GRACE_S: say --term-grace-s"),
        ({"extra": {"BATCHSVC_TERM_GRACE": "300"}}, "say --term-grace-s"),
        ({"extra": {"BATCHSVC_TERM_GRACE_S_FILE": "/x"}}, "say --term-grace-s"),
        ({"extra": {"BATCHSVC_PORT": "9000"}}, "say --port"),
        ({"extra": {"BATCHSVC_DEVICE": "cuda"}}, "say --device"),
        ({"extra": {"BATCHSVC_MODEL": "other"}}, "say --model"),
        ({"extra": {"BATCHSVC_BUCKET": "other"}}, "say --bucket"),
        ({"extra": {"BATCHSVC_SIGNALS_PORT": "9000"}}, "each process has one of its own"),
        ({"extra": {"BATCHSVC_WORKER_NAME": "w"}}, "each worker has one of its own"),
    ],
)
def test_what_cannot_be_deployed_is_refused_by_the_name_of_its_flag(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        Plan(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["16Gi", "1.5Ti", "500M", "16000000k", "17179869184", "16e9", "1.6E10", "16Ki"])
def test_memory_is_any_quantity_of_kubernetes_that_an_engine_may_need(size: str) -> None:
    assert Plan(engine_memory=size).engine_memory == size


def set_up(place: Path, programs: Path) -> list[str]:
    """Run a host's script; returns the units that it restarted, in one call a line."""
    calls = programs / "restarts"
    calls.write_text("")
    env = {"PATH": f"{programs}:/usr/bin:/bin"}
    done = subprocess.run(["sh", str(place / "setup.sh")], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines()


def test_setup_restarts_only_what_does_not_run_or_whose_files_changed(tmp_path: Path) -> None:
    programs, venv, installed = tmp_path / "bin", tmp_path / "venv", tmp_path / "installed"
    record = venv / "lib/python3.11/site-packages/batchsvc-1.0.dist-info/RECORD"
    for folder in (programs, venv / "bin", record.parent, installed):
        folder.mkdir(parents=True)
    record.write_text("version 1")
    log, dead, enabled = programs / "restarts", programs / "dead", programs / "enabled"
    systemctl = (
        f'#!/bin/sh\ncase $1 in restart) shift; echo "$*" >> {log} ;;\n'
        f'is-active) ! grep -qx "$3" {dead} 2>/dev/null ;;\n'
        f'is-enabled) grep -q " $3 " {enabled} ;;\n'
        f'enable) shift 2; echo " $* " >> {enabled} ;;\n'
        f'disable) echo "off $4" >> {log}; sed -i "s/ $4 / /" {enabled} ;; esac\n'
    )
    for path, text in (
        (venv / "bin" / "batchsvc", "#!/bin/sh\n"), (programs / "systemctl", systemctl),
        (programs / "sysctl", "#!/bin/sh\n"),
    ):  # fmt: skip
        path.write_text(text)
        path.chmod(0o755)
    paths = Paths(
        program=str(venv / "bin" / "batchsvc"), config=str(installed / "etc"), state=str(installed / "state"),
        units=str(installed / "units"),
    )  # fmt: skip

    def again(workers: int = 2, **changed: str) -> list[str]:
        plan = Plan(hosts=("10.9.0.1",), workers=workers, user=getpass.getuser(), paths=paths, extra=changed)
        steps.write_systemd(plan, tmp_path / "to", ssh="root@{host}")
        return set_up(tmp_path / "to" / "10.9.0.1", programs)

    data = "batchsvc-postgres.service batchsvc-valkey.service batchsvc-s3.service"
    ours = ["batchsvc-migrate.service", "batchsvc-api.service batchsvc-control.service"]
    engines = ["batchsvc-engine@0.service", "batchsvc-engine@1.service"]
    assert again() == [data, *ours, *engines]
    assert again() == []
    assert again(BATCHSVC_LEASE_S="30") == [*ours, *engines]
    record.write_text("version 2")
    assert again(BATCHSVC_LEASE_S="30") == [*ours, *engines]
    (tmp_path / "to" / "secrets" / "valkey_password").unlink()  # it is rotated
    assert again(BATCHSVC_LEASE_S="30") == ["batchsvc-valkey.service", *ours, *engines]
    dead.write_text("batchsvc-control.service\nbatchsvc-engine@1.service\n")
    assert again(BATCHSVC_LEASE_S="30") == ["batchsvc-control.service", "batchsvc-engine@1.service"]
    dead.unlink()
    assert again(1, BATCHSVC_LEASE_S="30") == ["off batchsvc-engine@1.service"]
    assert again(1, BATCHSVC_LEASE_S="30") == []


def test_what_another_host_does_now_is_stopped_where_it_was_but_no_data_service() -> None:
    data, api, worker = Systemd(Plan(hosts=THREE, workers=2)).hosts()
    assert {"batchsvc-api.service", "batchsvc-engine@0.service", "batchsvc-engine@8.service"} <= set(data.unwanted)
    assert "batchsvc-api.service" not in api.unwanted
    assert not {"batchsvc-engine@0.service", "batchsvc-engine@1.service"} & set(worker.unwanted)
    assert not any("postgres" in unit for host in (data, api, worker) for unit in host.unwanted)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_wheel_is_copied_to_each_host_and_installed_there(tmp_path: Path, device: Device) -> None:
    wheel = tmp_path / "batchsvc-1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    plan = Plan(hosts=THREE, device=device)
    steps.write_systemd(plan, tmp_path / "to", ssh="root@{host}", wheel=wheel)
    named = f"./{wheel.name}{'[gpu]' if device == 'cuda' else ''}"
    for host in THREE:
        assert (tmp_path / "to" / host / wheel.name).read_bytes() == b"a wheel"
        script = (tmp_path / "to" / host / "setup.sh").read_text()
        assert f"/opt/batchsvc/bin/pip install -q {shlex.quote(named)}\n" in script
        checked = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
