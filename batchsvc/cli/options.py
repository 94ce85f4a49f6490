"""Options that several commands share, spelled once, alone or in groups.

A group is a dataclass whose fields are options. A command that is `grouped` takes it as one parameter and gets the
group's options in its place, in the order of the fields; what they say together is checked where the group is made.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.target import Session, Target, opened, select
from batchsvc.stack.options import Drafting, Role

DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="D", help="The stack in this data directory (default: your user's own)."),
]
UrlOption = Annotated[str | None, typer.Option("--url", help="A server, together with --api-key.")]
KeyOption = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="The key for --url.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
AllowErrorsOption = Annotated[
    str | None,
    typer.Option("--allow-errors", metavar="N|P%", help="Error lines that still count as success."),
]
FromEnvOption = Annotated[
    bool,
    typer.Option("--from-env", help="The deployment of DATABASE_URL and the other settings, not a data directory."),
]
ForceFormatOption = Annotated[
    bool,
    typer.Option("--force-format", help="Serve formats that are over their limits of quality, too (models eval)."),
]
SpecOption = Annotated[
    Literal["auto", "off", "ngram", "draft", "heads"] | None,
    typer.Option("--spec", help="What proposes tokens, of an engine started here (default: BATCHSVC_SPEC, else auto)."),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="D", help="A smaller model, or heads on this one, that propose tokens: a name or a path."
    ),
]
BatchArgument = Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch (batch_...).")]
ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="Its id or its name.")]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which service a command talks to, and how it prints what that says."""

    data_dir: DataDirOption = None
    url: UrlOption = None
    api_key: KeyOption = None
    as_json: JsonOption = False

    @cached_property
    def console(self) -> Console:
        return Console(as_json=self.as_json)

    @cached_property
    def target(self) -> Target:
        """Raises CommandError for a half-named one."""
        return select(self.data_dir, self.url, self.api_key, os.environ)

    def opened(
        self,
        *,
        roles: tuple[Role, ...],
        purpose: str,
        model: str | None = None,
        needs_model: bool = False,
        force_format: bool = False,
        drafting: Drafting | None = None,
    ) -> AbstractContextManager[Session]:
        """A client of the service: see target.opened."""
        return opened(
            self.target,
            self.console,
            roles=roles,
            purpose=purpose,
            model=model,
            needs_model=needs_model,
            force_format=force_format,
            drafting=drafting or Drafting(),
        )


@dataclass(frozen=True, kw_only=True)
class AdminOptions(ServerOptions):
    """The same for what an operator does, who may also mean the deployment of the environment's settings."""

    from_env: FromEnvOption = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of its groups in place of the groups."""
    signature = inspect.signature(command, eval_str=True)
    groups = {name: kind for name, kind in _kinds(signature) if inspect.isclass(kind) and is_dataclass(kind)}

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    parameters = [one for parameter in signature.parameters.values() for one in _spread(parameter, groups)]
    vars(called)["__signature__"] = signature.replace(parameters=parameters)
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _kinds(signature: inspect.Signature) -> Iterator[tuple[str, Any]]:
    return ((name, one.annotation) for name, one in signature.parameters.items())


def _spread(parameter: inspect.Parameter, groups: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    group = groups.get(parameter.name)
    if group is None:
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        return
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
