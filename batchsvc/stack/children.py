"""The five processes of a stack, and one more for each further model: how they start, and when they are ready."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchsvc.stack import services
from batchsvc.stack.child import ChildSpec, inherited
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import StackOptions

BUCKET = "batchsvc"
_DRAIN_S = 35.0  # BATCHSVC_TERM_GRACE_S and a little


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """What the services of one stack share."""

    valkey: str
    s3_key: str
    s3_secret: str
    jwt: str
    sealing: str

    @classmethod
    def of(cls, directory: DataDir) -> Secrets:
        """The secrets of this directory, made on first use."""
        return cls(
            valkey=directory.secret("valkey_password", lambda: secrets.token_hex(24)),
            s3_key=directory.secret("s3_access_key", lambda: "batchsvc" + secrets.token_hex(8)),
            s3_secret=directory.secret("s3_secret_key", lambda: secrets.token_hex(24)),
            jwt=directory.secret("s3_jwt_key", lambda: secrets.token_hex(24)),
            sealing=directory.secret("secret_key", lambda: secrets.token_hex(32)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHooks:
    """What only the database can tell about an engine worker, asked with its pid."""

    is_alive: Callable[[int], bool]
    free_leases: Callable[[int], None]


def api_url(options: StackOptions, ports: dict[str, int]) -> str:
    """The base URL that a client uses, with /v1."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(options.host, options.host)  # noqa: S104
    return f"http://{f'[{host}]' if ':' in host else host}:{ports['api']}/v1"


def service_env(directory: DataDir, options: StackOptions, ports: dict[str, int], keys: Secrets) -> dict[str, str]:
    """The settings of the embedded deployment: the same variables that any other deployment sets."""
    return {
        "DATABASE_URL": directory.database_url,
        "REDIS_URL": f"redis://:{keys.valkey}@127.0.0.1:{ports['valkey']}/0",
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{ports['s3']}",
        "AWS_ACCESS_KEY_ID": keys.s3_key,
        "AWS_SECRET_ACCESS_KEY": keys.s3_secret,
        "AWS_REGION": "us-east-1",
        "BATCHSVC_BUCKET": BUCKET,
        "BATCHSVC_SECRET_KEY": keys.sealing,
        "BATCHSVC_MODEL": options.model,
        "BATCHSVC_HOST": options.host,
        "BATCHSVC_PORT": str(ports["api"]),
        **({"BATCHSVC_FORCE_FORMAT": "true"} if options.force_format else {}),
    }


def engine_names(options: StackOptions) -> tuple[str, ...]:
    """The names of the engine workers: one for each model, or one for all."""
    numbers = range(1, 2 if options.one_engine else len(options.models) + 1)
    return tuple("engine" if number == 1 else f"engine-{number}" for number in numbers)


def worker_names(options: StackOptions) -> tuple[str, ...]:
    """The names of the processes that serve their signals on ports of their own."""
    return ("control", *engine_names(options))


def specs(
    directory: DataDir, options: StackOptions, ports: dict[str, int], keys: Secrets, hooks: EngineHooks
) -> list[ChildSpec]:
    """The processes of the wanted roles, in the order of their start."""
    env = service_env(directory, options, ports, keys)

    def ours(*module: str, **settings: str) -> services.Command:
        # -P: the data directory is the working directory, and nothing in it may pass for our code
        argv = (sys.executable, "-P", "-m", *module)
        return services.Command(argv=argv, env=env | settings, cwd=directory.root)

    api = api_url(options, ports).removesuffix("/v1")

    def worker(name: str, role: str, **settings: str) -> services.Command:
        return ours("workers", role, BATCHSVC_SIGNALS_PORT=str(ports[name]), **settings)

    every = [
        ChildSpec(
            name="valkey",
            command=services.valkey(directory.root / "valkey", port=ports["valkey"], password=keys.valkey),
            is_ready=lambda _pid: services.valkey_is_ready(ports["valkey"], keys.valkey),
            is_data=True,
        ),
        store_spec(directory, ports, keys),
        ChildSpec(
            name="api",
            command=ours("batchsvc.app"),
            is_ready=lambda _pid: _answers(f"{api}/livez"),
            grace_s=10,
            signals=api,
        ),
        ChildSpec(
            name="control",
            command=worker("control", "control"),
            is_ready=lambda _pid: True,
            grace_s=_DRAIN_S,
            signals=_signals("control", ports),
        ),
        *(
            ChildSpec(
                name=name,
                command=worker(
                    name,
                    "engine",
                    BATCHSVC_MODEL=model,
                    BATCHSVC_MODELS=",".join(options.models[1:]) if options.one_engine else "",
                    BATCHSVC_WORKER_NAME=name,
                    **(options.drafting.env() if number == 1 else {}),  # a draft is for one model
                ),
                is_ready=hooks.is_alive,
                grace_s=_DRAIN_S,
                on_death=hooks.free_leases,
                signals=_signals(name, ports),
            )
            for number, (name, model) in enumerate(zip(engine_names(options), options.models, strict=False), start=1)
        ),
    ]
    return [spec for spec in every if spec.role in options.roles]


def store_spec(directory: DataDir, ports: dict[str, int], keys: Secrets) -> ChildSpec:
    """The object store, which also runs alone."""
    weed_ports = {name: ports[name] for name in services.WEED_PORTS}
    return ChildSpec(
        name="seaweedfs",
        command=services.seaweedfs(
            directory.root / "s3",
            ports=weed_ports,
            access_key=keys.s3_key,
            secret_key=keys.s3_secret,
            jwt_key=keys.jwt,
        ),
        is_ready=lambda _pid: services.seaweedfs_is_ready(weed_ports),
        is_data=True,
    )


def checked(specs: list[ChildSpec]) -> list[str]:
    """A sentence for each variable that only looks like a setting. Raises SettingsError for a setting that one of our
    processes would refuse, before anything has started."""
    from batchsvc.settings import Settings

    env = inherited(os.environ)
    for spec in specs:
        if not spec.is_data:
            Settings.from_env({**env, **spec.command.env})
    return Settings.strangers(env)


def _signals(name: str, ports: dict[str, int]) -> str:
    return f"http://127.0.0.1:{ports[name]}"


def remove_sockets(ports: dict[str, int]) -> None:
    """SeaweedFS leaves its gRPC sockets in /tmp; ours have our ports in their names."""
    for name in services.WEED_PORTS:
        for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{ports[name] + services.GRPC_OFFSET}.sock"):  # noqa: S108
            path.unlink(missing_ok=True)


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
