"""Who does something that is audited: an API key, somebody at the command line, or the service itself. Pure but for
the name of this machine's user."""

from __future__ import annotations

import getpass
import socket
from dataclasses import dataclass
from enum import StrEnum

_CHARS = 128  # of the column


class ActorKind(StrEnum):
    """How somebody came to the service."""

    API_KEY = "api_key"
    CLI = "cli"
    SERVICE = "service"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who acts. `id` is a key's public part, `user@host` of the command line, or the name of a part of the service.

    `project_id` is the key's own project, `address` the IP address that the call came from.
    """

    kind: ActorKind
    id: str
    project_id: str | None = None
    address: str | None = None


def at_command_line() -> Actor:
    """Whoever runs this process, as the operating system names them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as containers have
        user = "unknown"
    return Actor(kind=ActorKind.CLI, id=f"{user}@{socket.gethostname()}"[:_CHARS])


def service(part: str) -> Actor:
    """A part of the service that acts by itself, such as `reaper`."""
    return Actor(kind=ActorKind.SERVICE, id=part[:_CHARS])
