"""The secrets of a deployment: made once in a folder that only its owner reads, kept from then on, never printed.

What follows from them, as the address of the database with its password, is written anew when they or a host change,
so that a secret is rotated by removing its file. Such a file that isn't as we wrote it is somebody else's, and stays;
it is refused where it holds another password than the service gets, and where nothing tells whose it is.

What a data service reads itself (a password file, a configuration with keys in it) lies there too, so that no secret
is ever an argument or a variable of a process.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from batchsvc.deploy.plan import POSTGRES_PORT, VALKEY_PORT, Plan, PlanError, Service, authority

DigestOf = Callable[[Iterable[str]], str]  # of files of secrets, by their names

_PARTS = (
    *("postgres_password", "valkey_password", "s3_access_key", "s3_secret_key", "s3_jwt_key"),
    *("secret_key", "split_key"),
)
_JWT = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
OF_SERVICE: dict[str, Service] = {  # files that only one data service reads, with the service
    "postgres_password": "postgres",
    "valkey.conf": "valkey",
    "s3.json": "s3",
    "security.toml": "s3",
}
_PASSWORDS = {"database_url": "postgres_password", "redis_url": "valkey_password"}
_KEEPS = {"database_url": "?application_name=batchsvc", "redis_url": "?client_name=batchsvc"}  # makes it another form
_OF_US = ".written"  # sums of the derived files as we wrote them
# what differs between two files of one shape: password and host of an address, and the values of keys; it tells whose a
# file is that has no such sum
_VALUES = re.compile(r':[^:@/\s]*@(\[[^]\s]*\]|[^:/\s]+)|(?<=requirepass )\S+|(?<=Key": ")[^"]*|(?<=key = ")[^"]*')


def made(plan: Plan, folder: Path, *, database: str, queue: str) -> dict[str, Path]:
    """The files by name; secrets that are there already stay. `database` and `queue` are the hosts in the URLs.

    Raises PlanError where a service is somebody else's, and the file with its address or key isn't there yet; and where
    an address that somebody else wrote, or may have written, has a password that the service no longer takes, or a host
    that the plan hasn't.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    absent = [name for name in _foreign(plan) if not _held(folder / name)]
    if absent:
        raise PlanError(
            f"Put {' and '.join(str(folder / name) for name in absent)} in place first: with --without they belong to "
            "a service that is there already."
        )
    parts = {name: _held(folder / name) or _write(folder / name, _fresh(name)) for name in _PARTS}
    sums = json.loads(_held(folder / _OF_US) or "{}")
    for name, text in _derived(parts, database, queue).items():
        held = _held(folder / name)
        if name in _foreign(plan):
            continue
        if held == text.strip():
            sums[name] = _sum(text)
        elif held is None or (name in sums and _sum(held) == sums[name]):
            _write(folder / name, text)
            sums[name] = _sum(text)
        elif name in _PASSWORDS and not _has_password_of(held, text):
            raise PlanError(
                f"{folder / name} was edited, and has another password than {_PASSWORDS[name]} beside it: put that in, "
                "or remove the file for a new one."
            )
        elif name not in sums and _shape(held) == _shape(text):  # of a folder from before the sums
            ours = {host.lower() for host in (*plan.hosts, database, queue)}
            if name in _PASSWORDS and (host := urlsplit(held).hostname) not in ours:
                raise PlanError(
                    f"{folder / name} names the host {host}, where this plan has none: remove the file for a new one; "
                    f"if you wrote that host yourself, end the address with {_KEEPS[name]}, and it stays."
                )
            _write(folder / name, text)
            sums[name] = _sum(text)
    _write(folder / _OF_US, json.dumps(sums))
    # one whose name begins with a dot is ours, or of a run that was killed while it wrote
    return {path.name: path for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def digest(folder: Path, names: Iterable[str]) -> str:
    """What differs when one of these files does. It tells nothing of them: the key of the deployment is in it."""
    texts = [_held(folder / name) for name in ("secret_key", *sorted(names))]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def no_digest(_names: Iterable[str]) -> str:
    """For whoever has no folder of secrets."""
    return ""


def _foreign(plan: Plan) -> list[str]:
    owned = {"postgres": ["database_url"], "valkey": ["redis_url"], "s3": ["s3_access_key", "s3_secret_key"]}
    return [name for service in sorted(plan.without) for name in owned[service]]


def _fresh(name: str) -> str:
    return ("batchsvc" if name == "s3_access_key" else "") + secrets.token_hex(24)


def _derived(parts: Mapping[str, str], database: str, queue: str) -> dict[str, str]:
    at_database, at_queue = authority(database, POSTGRES_PORT), authority(queue, VALKEY_PORT)
    identity = {
        "name": "batchsvc",
        "credentials": [{"accessKey": parts["s3_access_key"], "secretKey": parts["s3_secret_key"]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    jwt = "".join(f'[{name}]\nkey = "{parts["s3_jwt_key"]}{number}"\n' for number, name in enumerate(_JWT))
    return {
        "database_url": f"postgresql://batchsvc:{parts['postgres_password']}@{at_database}/batchsvc",
        "redis_url": f"redis://:{parts['valkey_password']}@{at_queue}/0",
        "valkey.conf": f"requirepass {parts['valkey_password']}\n",
        "s3.json": json.dumps({"identities": [identity]}) + "\n",
        "security.toml": jwt,
    }


def _shape(text: str) -> str:
    return _VALUES.sub("", text).strip()


def _sum(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()


def _has_password_of(held: str, text: str) -> bool:
    """Whether an address that goes in as the user of ours has the password of ours, too."""
    theirs, ours = urlsplit(held), urlsplit(text)
    if (theirs.username or "default") != (ours.username or "default"):
        return True
    return unquote(theirs.password or "") == unquote(ours.password or "")


def _held(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


def _write(path: Path, text: str) -> str:
    """In one step, also over a file that nobody may write: those of a compose folder can only be read."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    fresh.replace(path)
    return text.strip()
