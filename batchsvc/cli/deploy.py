"""`deploy systemd|compose|k8s`: writes what a deployment consists of, and prints the commands that bring it up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from batchsvc import __version__
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import grouped
from batchsvc.deploy.plan import SERVICES, Paths, Plan, PlanError

app = typer.Typer(
    no_args_is_help=True,
    help="What a deployment consists of. Each command writes a folder, and prints the commands that bring it up.",
    rich_markup_mode=None,
)
_USUAL = Paths()


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What all three have in common."""

    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder that is written.")] = Path("deploy")
    model: Annotated[str, typer.Option("--model", metavar="M", help="What the engine workers serve.")] = "smollm2-135m"
    workers: Annotated[int, typer.Option("--workers", help="Engine workers, of each worker host.")] = 1
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where they compute.")] = "cpu"
    without: Annotated[
        str, typer.Option("--without", metavar="LIST", help="Of postgres,valkey,s3: those that are there already.")
    ] = ""
    bucket: Annotated[str, typer.Option("--bucket", help="The bucket in S3.")] = "batchsvc"
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the API.")] = 8080
    term_grace_s: Annotated[
        float, typer.Option("--term-grace-s", min=1, help="Time to drain after SIGTERM; who stops them waits longer.")
    ] = 30.0
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of all our processes.")
    ] = None

    def plan(
        self,
        *,
        hosts: tuple[str, ...] = ("127.0.0.1",),
        image: str = "batchsvc:latest",
        namespace: str = "batchsvc",
        engine_memory: str = "16Gi",
        user: str = "batchsvc",
        paths: Paths = _USUAL,
        weed_port: int = 9333,
    ) -> Plan:
        """Raises CommandError for a flag that can't be used, and for a setting that our processes would refuse."""
        absent = frozenset(filter(None, self.without.split(",")))
        if strange := absent - set(SERVICES):
            raise CommandError(f"--without knows {', '.join(SERVICES)}, not {', '.join(sorted(strange))}.", Exit.USAGE)
        extra = dict(text.partition("=")[::2] for text in self.settings or [])
        try:
            plan = Plan(
                hosts=hosts,
                model=self.model,
                workers=self.workers,
                device=self.device,
                without=frozenset(name for name in SERVICES if name in absent),
                image=image,
                namespace=namespace,
                engine_memory=engine_memory,
                api_port=self.port,
                bucket=self.bucket,
                term_grace_s=self.term_grace_s,
                user=user,
                paths=paths,
                weed_port=weed_port,
                extra=extra,
            )
        except PlanError as error:
            raise CommandError(error.message, Exit.USAGE) from error
        from batchsvc.settings import Settings

        needed = {"DATABASE_URL": "postgresql://h/x", "REDIS_URL": "redis://h"}
        Settings.from_env(needed | plan.settings)
        if strangers := Settings.strangers(plan.settings):
            raise CommandError(" ".join(strangers), Exit.USAGE)
        return plan


ImageOption = Annotated[str, typer.Option("--image", metavar="I", help="The image of our processes, which is built.")]


@app.command()
@grouped
def systemd(
    *,
    hosts: Annotated[
        str,
        typer.Option(
            "--hosts",
            metavar="A,B,C...",
            help="Addresses of the hosts: PostgreSQL, Valkey and S3 on the first, API and control on the second, "
            "engines on the others; what has no host of its own is on the last.",
        ),
    ] = "127.0.0.1",
    user: Annotated[str, typer.Option("--user", help="The system's user that all of it runs as.")] = "batchsvc",
    ssh: Annotated[str, typer.Option("--ssh", metavar="LOGIN", help="How a host is logged in to.")] = "root@{host}",
    wheel: Annotated[
        Path | None, typer.Option("--wheel", metavar="F", help="Our wheel, which is installed on each host.")
    ] = None,
    program: Annotated[str, typer.Option("--program", help="Our program on each host.")] = _USUAL.program,
    config_dir: Annotated[str, typer.Option("--config-dir", help="Settings; {host} stands for it.")] = _USUAL.config,
    state_dir: Annotated[str, typer.Option("--state-dir", help="Data; {host} stands for it.")] = _USUAL.state,
    unit_dir: Annotated[str, typer.Option("--unit-dir", help="Units; {host} stands for it.")] = _USUAL.units,
    postgres: Annotated[
        str, typer.Option("--postgres", metavar="DIR", help="Where PostgreSQL's programs are.")
    ] = _USUAL.postgres,
    valkey: Annotated[str, typer.Option("--valkey", help="Valkey's or Redis's server.")] = _USUAL.valkey,
    weed_port: Annotated[
        int, typer.Option("--weed-port", min=1024, max=55000, help="First of three ports on loopback behind S3.")
    ] = 9333,
    weed: Annotated[str, typer.Option("--weed", help="SeaweedFS's program.")] = _USUAL.weed,
    options: PlanOptions,
) -> None:
    """Units of systemd for one or several hosts, each with a script that puts them in place."""
    if wheel is not None and not wheel.is_file():
        raise CommandError(f"--wheel: there is no file {wheel}.", Exit.USAGE)
    paths = Paths(
        program=program,
        config=config_dir,
        state=state_dir,
        units=unit_dir,
        postgres=postgres,
        valkey=valkey,
        weed=weed,
    )
    plan = options.plan(hosts=tuple(hosts.split(",")), user=user, paths=paths, weed_port=weed_port)
    from batchsvc.deploy import steps

    _print(options, steps.write_systemd(plan, options.to, ssh=ssh, wheel=wheel))


@app.command("compose")
@grouped
def compose_command(
    *,
    image: ImageOption = "batchsvc:latest",
    options: PlanOptions,
) -> None:
    """A compose file: all of it in containers of one machine."""
    from batchsvc.deploy import steps

    _print(options, steps.write_compose(options.plan(image=image), options.to))


@app.command()
@grouped
def k8s(
    *,
    image: ImageOption = f"batchsvc:{__version__}",
    engine_memory: Annotated[
        str, typer.Option("--engine-memory", metavar="SIZE", help="Memory of an engine worker's pod; its pool fits in.")
    ] = "16Gi",
    namespace: Annotated[str, typer.Option("--namespace", help="The namespace of all of it.")] = "batchsvc",
    options: PlanOptions,
) -> None:
    """Manifests of Kubernetes."""
    from batchsvc.deploy import steps
    from batchsvc.deploy.k8s import is_rolled_out

    if not is_rolled_out(image):
        raise CommandError(
            f"--image {image}: give each version a tag of its own, or a digest; Kubernetes rolls nothing out where the "
            "name of the image stays the same.",
            Exit.USAGE,
        )
    plan = options.plan(image=image, namespace=namespace, engine_memory=engine_memory)
    _print(options, steps.write_k8s(plan, options.to))


def _print(options: PlanOptions, commands: list[str]) -> None:
    console = Console()
    console.say(f"Written to {options.to}. Its secrets are made once and kept: guard that folder.")
    console.out("\n".join(["set -eu", *commands]))
