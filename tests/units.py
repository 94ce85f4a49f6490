"""Units of systemd as tests read them: a strict parser, and what a unit's commands and variables are once expanded.

Only what our units use is known, so a misspelt directive is an error here even where `systemd-analyze` is missing.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

KNOWN = {
    "Unit": {"Description", "Wants", "After", "Requires", "StartLimitIntervalSec"},
    "Service": {
        *("Type", "User", "WorkingDirectory", "EnvironmentFile", "Environment", "RemainAfterExit", "ReadWritePaths"),
        *("ExecStartPre", "ExecStart", "ExecStartPost", "Restart", "RestartSec", "TimeoutStartSec", "TimeoutStopSec"),
        *("KillMode", "KillSignal", "LimitNOFILE", "LimitMEMLOCK", "MemoryMax", "TasksMax", "OOMScoreAdjust"),
        *("NoNewPrivileges", "CapabilityBoundingSet", "AmbientCapabilities", "ProtectSystem", "ProtectHome"),
        *("PrivateTmp", "PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectKernelTunables", "UMask"),
        *("ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups", "ProtectClock", "ProtectHostname"),
        *("RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality"),
        *("RestrictAddressFamilies", "SystemCallArchitectures", "SystemCallFilter"),
    },
    "Install": {"WantedBy"},
}


class Command(NamedTuple):
    """One Exec line. `may_fail`: it began with a minus sign."""

    argv: list[str]
    may_fail: bool


class Unit(NamedTuple):
    """A unit file, its values in the order of their lines."""

    sections: dict[str, dict[str, list[str]]]
    instance: str

    def all(self, key: str, section: str = "Service") -> list[str]:
        return [self._expanded(value) for value in self.sections[section].get(key, [])]

    def one(self, key: str, default: str | None = None) -> str:
        found = self.all(key)
        assert len(found) == 1 or (not found and default is not None), f"{key} occurs {len(found)} times"
        return found[0] if found else str(default)

    def commands(self, key: str) -> list[Command]:
        return [Command(shlex.split(line.removeprefix("-")), line.startswith("-")) for line in self.all(key)]

    def environment(self) -> dict[str, str]:
        """As systemd sets it: what files say comes over what the unit says."""
        found = dict(item.split("=", 1) for item in self.all("Environment"))
        for path in self.all("EnvironmentFile"):
            lines = (line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines())
            pairs = (line.split("=", 1) for line in lines if line and not line.startswith("#"))
            found |= {name: "".join(shlex.split(value)) for name, value in pairs}
        return found

    def seconds(self, key: str, default: str) -> float:
        return float(self.one(key, default))

    def _expanded(self, value: str) -> str:
        assert not re.search(r"%[^i%]", value), f"a specifier that isn't known here: {value}"
        return value.replace("%i", self.instance).replace("%%", "%")


def parse(text: str, instance: str = "") -> Unit:
    """Raises AssertionError for whatever systemd would refuse or ignore."""
    sections: dict[str, dict[str, list[str]]] = {}
    here: dict[str, list[str]] | None = None
    name = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.startswith(("#", ";")):
            continue
        if (head := re.fullmatch(r"\[(\w+)\]", line)) is not None:
            name = head[1]
            assert name in KNOWN, f"line {number}: no section [{name}]"
            here = sections.setdefault(name, {})
            continue
        key, equals, value = line.partition("=")
        assert equals and here is not None, f"line {number}: {line!r} is no assignment in a section"
        assert key in KNOWN[name], f"line {number}: [{name}] knows no {key}"
        here.setdefault(key, []).append(value)
    assert set(sections) == set(KNOWN), f"sections are {sorted(sections)}"
    unit = Unit(sections, instance)
    assert unit.commands("ExecStart"), "a service has an ExecStart"
    for key in ("ExecStartPre", "ExecStart", "ExecStartPost"):
        for command in unit.commands(key):
            assert command.argv[0].startswith("/"), f"{key} isn't absolute: {command.argv[0]}"
    return unit
