"""Where the values of settings come from: variables, files that variables name, an env file; and what only looks so.

A variable that begins with BATCHSVC_ and is no setting stops nothing, because a process of another version may know
it, but it is told with the nearest name that is one: a misspelt setting is otherwise a default that nobody wanted.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "BATCHSVC_"
ENVIRONMENT = "environment"
_OTHERS = ("BATCHSVC_FAILPOINTS", "BATCHSVC_FAILPOINTS_LOG")  # batchsvc/failpoints.py reads them; tests set them


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a variable: `kind` is environment, file, env file, flag or stack; `place` the file, if there is one."""

    kind: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.place}".rstrip()


@dataclass(frozen=True, slots=True)
class Gathered:
    """Values and origins by variable, and a sentence for each variable that can't be read, by its name."""

    values: dict[str, str]
    origins: dict[str, Origin]
    problems: dict[str, str] = field(default_factory=dict)


def gathered(env: Mapping[str, str], secrets: Iterable[str], origins: Mapping[str, Origin] | None = None) -> Gathered:
    """All that is set; an empty variable counts as unset. `secrets` may come as <NAME>_FILE. `origins` are those of the
    variables that don't simply stand in the environment."""
    values = {name: value for name, value in env.items() if value}
    known = origins or {}
    found = Gathered(values, {name: known.get(name, Origin(ENVIRONMENT)) for name in values})
    for name in secrets:
        pointer = f"{name}_FILE"
        if pointer not in values:
            continue
        if name in values:
            found.problems[name] = f"{name} and {pointer} are both set: keep one of them."
            continue
        try:
            text = Path(values[pointer]).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
            says = getattr(error, "strerror", None) or "it isn't text"
            found.problems[name] = f"{pointer} can't be read ({values[pointer]!r}: {says})."
            continue
        if not text:
            found.problems[name] = (
                f"{pointer} names {values[pointer]!r}, which is empty: put the value of {name} there."
            )
            continue
        values[name] = text
        found.origins[name] = Origin("file", values[pointer])
    return found


def env_file(path: Path) -> dict[str, str]:
    """Variables of a file as systemd's EnvironmentFile= and `docker --env-file` read it: NAME=VALUE, a line each.

    Raises ValueError with one sentence for a file that can't be read, or a line that is no assignment.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        says = getattr(error, "strerror", None) or "it isn't text"
        raise ValueError(f"{path} can't be read: {says}.") from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        name, equals, value = stripped.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ValueError(f"{path}, line {number}: this is not NAME=VALUE.")
        found[name.strip()] = _unquoted(value.strip())
    return found


def nearest(name: str, known: Collection[str]) -> str | None:
    """The setting that a name was probably meant to be; None if it resembles none."""
    short = {each.removeprefix(PREFIX): each for each in known if each.startswith(PREFIX)}
    found = difflib.get_close_matches(name.removeprefix(PREFIX), list(short), n=1, cutoff=0.6)
    return short[found[0]] if found else None


def unknown(env: Mapping[str, str], known: Collection[str]) -> dict[str, str | None]:
    """Variables that begin as ours do and are no settings, with what each was probably meant to be."""
    strange = sorted(name for name in env if name.startswith(PREFIX) and name not in known and name not in _OTHERS)
    return {name: nearest(name, known) for name in strange}


def unknown_sentence(name: str, near: str | None) -> str:
    """What is told of one of them."""
    return f"{name} is no setting, and has no effect{f': perhaps {near} is meant' if near else ''}."


def _unquoted(value: str) -> str:
    if value[:1] in "\"'":
        try:
            return "".join(shlex.split(value))
        except ValueError:
            return value
    return value
