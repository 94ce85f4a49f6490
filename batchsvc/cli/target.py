"""Which service a command talks to, and how it comes to answer: a server, a running stack, or one started for it.

By flags first (--data-dir, or --url with --api-key), then by OPENAI_BASE_URL together with OPENAI_API_KEY, else the
user's data directory. A key alone is never sent anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.stack.datadir import DataDir, InUseError, Lock
from batchsvc.stack.launch import Launched, launch, wait_until_usable
from batchsvc.stack.options import DEFAULT_HOST, DEFAULT_MODEL, Drafting, Role, StackOptions, read_state
from engine.load.wheels import KNOWN_MODELS

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

_NO_WISH = Drafting()
_PATIENCE_S = 300.0  # another command's stack may be pulling a model


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Either a server (`url` and `api_key`) or a data directory."""

    directory: DataDir | None = None
    url: str = ""
    api_key: str = ""

    def flags(self) -> str:
        """How a follow-up command names the same place."""
        if self.directory is None:
            return ""
        return "" if self.directory == DataDir.at(None) else f" --data-dir {self.directory.root}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """An open target. `is_own`: the stack was started for this command and ends with it; its engine has `model`."""

    client: Client
    target: Target
    is_own: bool
    model: str = ""


def select(data_dir: Path | None, url: str | None, api_key: str | None, env: Mapping[str, str]) -> Target:
    """The target by the rules of this module. Raises CommandError for a half-named one."""
    if data_dir is not None and (url or api_key):
        raise CommandError("Name either --data-dir or --url with --api-key, not both.", Exit.USAGE)
    if bool(url) != bool(api_key):
        missing = "--api-key" if url else "--url"
        raise CommandError(f"--url and --api-key belong together: {missing} is missing.", Exit.USAGE)
    if url and api_key:
        return Target(url=_checked(url), api_key=api_key)
    if data_dir is None and env.get("OPENAI_BASE_URL") and env.get("OPENAI_API_KEY"):
        return Target(url=_checked(env["OPENAI_BASE_URL"]), api_key=env["OPENAI_API_KEY"])
    return Target(directory=DataDir.at(data_dir))


@contextmanager
def opened(
    target: Target,
    console: Console,
    *,
    roles: tuple[Role, ...],
    purpose: str,
    model: str | None = None,
    needs_model: bool = False,
    force_format: bool = False,
    drafting: Drafting = _NO_WISH,
) -> Iterator[Session]:
    """A client of the target. With no stack running in a data directory, one with `roles` is started and stopped.

    `needs_model`: that one registers `model`, or the default one, even without an engine. `force_format`: its engine
    serves formats that are over their limits, and `drafting` is what proposes tokens there; what runs already is as it
    was started, which is said.
    """
    from batchsvc.cli.client import Client

    if target.directory is None:
        if force_format:
            console.say("--force-format has no effect: which formats are served is up to the server.")
        if drafting != _NO_WISH:
            console.say("--spec and --draft have no effect: what proposes tokens is up to the server.")
        with Client(target.url, target.api_key, is_local=False) as client:
            yield Session(client=client, target=target, is_own=False)
        return
    directory = target.directory
    launched: Launched | None = None
    joined: Lock | None = None
    try:
        while True:
            state = wait_until_usable(directory, roles, _PATIENCE_S)
            if state is not None:
                joined = directory.join()
                if read_state(directory) == state:
                    break
                joined.release()
                continue
            try:
                options = stack_options(
                    directory,
                    roles=roles,
                    purpose=purpose,
                    model=model,
                    needs_model=needs_model,
                    force_format=force_format,
                    drafting=drafting,
                )
                launched = launch(options, console.say)
            except InUseError:  # another command was faster
                continue
            launched.listen(console.say)
            state = launched.state
            break
        if force_format and launched is None and not state.force_format:
            console.say(
                "--force-format has no effect on the stack that runs here, which serves no format over its limits: "
                f"stop it with `batchsvc down{target.flags()}` and repeat the command."
            )
        if launched is None and drafting not in (_NO_WISH, state.drafting):
            console.say(
                "--spec and --draft have no effect on the stack that runs here: "
                f"stop it with `batchsvc down{target.flags()}` and repeat the command."
            )
        key = directory.api_key.read_text(encoding="utf-8").strip()
        with Client(state.url, key, is_local=True) as client:
            own = launched.state.model if launched else ""
            yield Session(client=client, target=target, is_own=launched is not None, model=own)
    except (KeyboardInterrupt, CommandError) as error:
        is_interrupt = isinstance(error, KeyboardInterrupt) or error.code == Exit.INTERRUPTED
        if launched is not None and is_interrupt:
            console.say("Stopping the stack: the engine ends the lines that it has begun (Ctrl-C again: at once).")
        raise
    except OSError as error:
        if error.filename and str(error.filename).startswith(str(directory.root)):
            raise directory.explain(error) from error
        raise
    finally:
        if joined is not None:
            joined.release()
        if launched is not None:
            _leave(launched, directory, console)


def _leave(launched: Launched, directory: DataDir, console: Console) -> None:
    """Stop the stack, when no other command uses it any more; Ctrl-C stops it now."""
    closed: Lock | None = None
    with suppress(KeyboardInterrupt):
        closed = directory.close_to_others(
            lambda: console.say("Another command uses this stack, which stops when that ends (Ctrl-C: now).")
        )
    launched.stop()
    if closed is not None:
        closed.release()


def stack_options(
    directory: DataDir,
    *,
    roles: tuple[Role, ...],
    purpose: str,
    model: str | None,
    more_models: Sequence[str] = (),
    host: str | None = None,
    port: int | None = None,
    needs_model: bool = False,
    one_engine: bool = False,
    force_format: bool = False,
    drafting: Drafting = _NO_WISH,
) -> StackOptions:
    """Options of a start, with what the environment says where no flag does."""
    if port is None and (text := os.environ.get("BATCHSVC_PORT")):
        if not text.isdigit() or int(text) > 65535:
            raise CommandError(f"BATCHSVC_PORT can't be {text!r}: it is a port number.", Exit.USAGE)
        port = int(text)
    return StackOptions(
        root=directory.root,
        host=host or os.environ.get("BATCHSVC_HOST") or DEFAULT_HOST,
        port=port,
        model=_served_model(directory, model or os.environ.get("BATCHSVC_MODEL") or DEFAULT_MODEL),
        more_models=tuple(_served_model(directory, name) for name in more_models),
        purpose=purpose,
        roles=roles,
        needs_model=needs_model,
        one_engine=one_engine,
        force_format=force_format,
        drafting=replace(drafting, draft=None if drafting.draft is None else absolute_model(drafting.draft)),
    )


def absolute_model(name: str) -> str:
    """A model given by path, spelled so that it means the same from any folder; other names stay."""
    path = Path(name).expanduser()
    return str(path.absolute()) if not name.startswith("hf:") and path.exists() else name


def names_itself(spelled: str) -> bool:
    """Whether a model can be found by this spelling alone, without the registry."""
    return spelled in KNOWN_MODELS or spelled.startswith("hf:") or Path(spelled).exists()


def _served_model(directory: DataDir, name: str) -> str:
    """What an engine worker loads for this name: a name or alias that was registered here is its model."""
    spelled = absolute_model(name)
    if names_itself(spelled):
        return spelled
    from batchsvc.stack.prepare import registered_path

    return registered_path(directory, spelled) or spelled


def _checked(url: str) -> str:
    base = url.rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise CommandError(f"{url!r} is not a URL: it starts with http:// or https://.", Exit.USAGE)
    return base if base.endswith("/v1") else base + "/v1"
