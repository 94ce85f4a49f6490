"""Compose files and manifests follow their schemas, and what no schema asks for: users, probes, patience, secrets.

`tests/data/compose-spec.json` is the schema of github.com/compose-spec/compose-spec (Apache-2.0).
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from batchsvc import health
from batchsvc.cli.app import app
from batchsvc.deploy import compose, images, k8s, probe, steps
from batchsvc.deploy.plan import Device, Plan, Service
from batchsvc.settings import Settings

SCHEMA = json.loads((Path(__file__).parents[2] / "data" / "compose-spec.json").read_text())
PLANS = [
    Plan(workers=2),
    Plan(workers=2, device="cuda"),
    Plan(
        without=frozenset[Service]({"postgres", "valkey", "s3"}),
        extra={"AWS_ENDPOINT_URL_S3": "https://s3.example.com"},
    ),
]
K8S_VERSIONS = ("1.33", "1.37")


@pytest.mark.parametrize("plan", PLANS, ids=["cpu", "cuda", "managed"])
def test_the_compose_file_follows_its_schema(plan: Plan) -> None:
    document = yaml.safe_load(compose.compose_file(plan))
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    wrong = copy.deepcopy(document)
    wrong["services"]["api"]["restrat"] = "always"
    with pytest.raises(jsonschema.ValidationError, match="restrat"):
        jsonschema.validate(wrong, SCHEMA, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("plan", PLANS, ids=["cpu", "cuda", "managed"])
def test_containers_are_no_root_can_gain_nothing_and_get_secrets_by_file(plan: Plan) -> None:
    document = yaml.safe_load(compose.compose_file(plan))
    declared = set(document["secrets"])
    for name, service in document["services"].items():
        if name == "s3-owner":
            continue  # which is root for a moment: tested below
        assert not service["user"].startswith("0"), name
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["restart"] in ("unless-stopped", "on-failure")
        used = {item if isinstance(item, str) else item["source"] for item in service["secrets"]}
        assert used <= declared
        assert set(service.get("depends_on", {})) <= set(document["services"])
        if name != "migrate":
            assert service["healthcheck"]["test"]
    for name, service in document["services"].items():
        if name.startswith(("engine", "control")):
            assert float(service["stop_grace_period"].removesuffix("s")) > plan.term_grace_s
            assert service["healthcheck"]["test"][-1].endswith("/readyz")
    engines = [service for name, service in document["services"].items() if name.startswith("engine")]
    if plan.device == "cuda":
        ids = [engine["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for engine in engines]
        assert ids == [["0"], ["1"]]
    else:
        assert [engine["deploy"]["replicas"] for engine in engines] == [plan.workers]


@pytest.mark.parametrize("version", K8S_VERSIONS)
@pytest.mark.parametrize("plan", PLANS, ids=["cpu", "cuda", "managed"])
def test_every_manifest_follows_the_strict_schema_of_its_kind(plan: Plan, version: str) -> None:
    documents = [one for part in (all_of(plan), k8s.backups(plan)) for one in yaml.safe_load_all(k8s.written(part))]
    assert documents == [*all_of(plan), *k8s.backups(plan)]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    wrong = copy.deepcopy(next(each for each in documents if each["kind"] == "Deployment"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def all_of(plan: Plan) -> list[dict[str, Any]]:
    return [*k8s.documents(plan), *k8s.engines(plan)]


def read(folder: Path) -> list[dict[str, Any]]:
    """The manifests that were written, without backups."""
    files = [folder / f"{name}.yaml" for name in ("batchsvc", "engines")]
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for document in documents:
        if template := document.get("spec", {}).get("template"):
            yield document["metadata"]["name"], document, template["spec"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pods_are_no_root_are_probed_and_get_time_to_drain(device: Device) -> None:
    plan = Plan(device=device, term_grace_s=600, workers=3)
    documents = all_of(plan)
    seen = {name: spec for name, _, spec in pods(documents)}
    migration = k8s.migration_name(plan)
    assert set(seen) == {
        "postgres", "valkey", "s3", migration, "batchsvc-api", "batchsvc-control", "batchsvc-engine"
    }  # fmt: skip
    for name, spec in seen.items():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # it would set BATCHSVC_API_PORT and the like
        [container] = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"]["memory"]
        mounted = {mount["name"] for mount in container["volumeMounts"]} - {"data"}
        assert mounted <= {volume["name"] for volume in spec["volumes"]}
        if name != migration:
            assert {"readinessProbe", "livenessProbe"} <= set(container)
    for role in ("control", "engine"):
        assert seen[f"batchsvc-{role}"]["terminationGracePeriodSeconds"] > plan.term_grace_s
    for role in ("api", "control", "engine"):
        [container] = seen[f"batchsvc-{role}"]["containers"]
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    gpu = seen["batchsvc-engine"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
    assert gpu == ("1" if device == "cuda" else None)


@pytest.mark.parametrize("plan", PLANS, ids=["cpu", "cuda", "managed"])
def test_our_processes_would_take_the_settings_that_they_get(plan: Plan) -> None:
    document = yaml.safe_load(compose.compose_file(plan))
    config = next(each for each in k8s.documents(plan) if each["kind"] == "ConfigMap")
    ours = [service for service in document["services"].values() if service["image"] == plan.image]
    for env in (config["data"], *(service["environment"] for service in ours)):
        plain = {name: value for name, value in env.items() if not name.endswith("_FILE")}
        settings = Settings.from_env({"DATABASE_URL": "postgresql://h/x", "REDIS_URL": "redis://h", **plain})
        assert settings.device == plan.device
        assert Settings.strangers(env) == []
        assert {name for name in env if name.endswith("_FILE")} <= Settings.known_variables()


@pytest.mark.parametrize(
    "image", ["batchsvc", "batchsvc:latest", "registry.example.com:5000/batchsvc", "registry.example.com/b:latest"]
)
def test_an_image_whose_name_would_stay_the_same_is_refused(tmp_path: Path, image: str) -> None:
    """Its next version would be pushed, and no pod would ever run it."""
    refused = CliRunner().invoke(app, ["deploy", "k8s", "--to", str(tmp_path / "to"), "--image", image])
    assert refused.exit_code != 0
    assert "a tag of its own" in str(refused.exception) + refused.output
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("image", ["registry.example.com:5000/batchsvc:1", f"batchsvc@sha256:{'0' * 64}"])
def test_an_engine_gets_the_memory_that_its_model_takes(tmp_path: Path, image: str) -> None:
    argv = ["deploy", "k8s", "--to", str(tmp_path), "--image", image, "--engine-memory", "160Gi"]
    written = CliRunner().invoke(app, argv)
    assert written.exit_code == 0, written.output
    specs = {name: spec for name, _, spec in pods(read(tmp_path))}
    resources = specs["batchsvc-engine"]["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "160Gi"
    assert specs["batchsvc-api"]["containers"][0]["image"] == image


def test_another_image_has_another_migration() -> None:
    """A Job that has run can't be changed: `kubectl apply` of the next version would fail."""
    names = {k8s.migration_name(Plan(image=f"batchsvc:{version}")) for version in (1, 2)}
    assert len(names) == 2
    assert k8s.migration_name(Plan()) == k8s.migration_name(Plan())


def test_other_settings_are_rolled_out_to_every_pod_that_reads_them() -> None:
    """A pod reads its settings at its start alone."""

    def templates(plan: Plan) -> dict[str, Any]:
        kinds = [each for each in all_of(plan) if each["kind"] in ("Deployment", "StatefulSet")]
        return {each["metadata"]["name"]: each["spec"]["template"] for each in kinds}

    before, after = templates(Plan()), templates(Plan(extra={"BATCHSVC_LEASE_S": "30"}))
    assert {name for name in before if before[name] != after[name]} == {
        f"batchsvc-{role}" for role in ("api", "control", "engine")
    }
    assert templates(Plan()) == before


@pytest.mark.parametrize(
    ("removed", "of_data"),
    [
        ("postgres_password", set()),
        ("valkey_password", {"valkey"}),
        ("s3_secret_key", {"s3"}),
        ("secret_key", None),
        ("split_key", set()),
    ],
)
def test_a_rotated_secret_starts_anew_what_reads_it(tmp_path: Path, removed: str, of_data: set[str] | None) -> None:
    """Else containers go on with the old one, which the service no longer takes."""

    def written() -> tuple[dict[str, Any], dict[str, Any]]:
        steps.write_compose(Plan(workers=2), tmp_path / "compose")
        steps.write_k8s(Plan(), tmp_path / "k8s")
        services = yaml.safe_load((tmp_path / "compose" / "compose.yaml").read_text())["services"]
        kinds = [each for each in read(tmp_path / "k8s") if each["kind"] in ("Deployment", "StatefulSet")]
        return services, {each["metadata"]["name"].removeprefix("batchsvc-"): each["spec"] for each in kinds}

    first = written()
    assert written() == first
    for folder in (tmp_path / "compose", tmp_path / "k8s"):
        (folder / "secrets" / removed).unlink()
    for before, after in zip(first, written(), strict=True):
        assert set(before) == set(after)
        changed = {name for name in before if before[name] != after[name]}
        assert {"api", "control", "engine"} <= changed
        assert of_data is None or changed - {"api", "control", "engine"} == of_data


def run(commands: list[str], programs: Path) -> list[str]:
    """What docker and kubectl were told; fakes of them, which refuse to make twice what is there."""
    there, calls = programs / "there", programs / "calls"
    fake = f"""#!/bin/sh
echo "${{0##*/}} $*" >> {calls}
case "$*" in
*"create secret"*--dry-run=client*) echo kind: Secret ;;
*"get namespace"*) [ -e {there} ] ;;
*"keys create"*) echo key-$(wc -l < {calls}) ;;
*"create namespace"*|*"create secret"*) [ ! -e {there} ] && touch {there} ;;
*"get cronjob"*)
  [ ! -e {programs / "refused"} ] || exit 1
  [ ! -e {programs / "backups"} ] || printf 'cronjob.batch/batchsvc-%s\\n' backup restore ;;
esac
"""
    for name in ("docker", "kubectl"):
        (programs / name).write_text(fake)
        (programs / name).chmod(0o755)
    calls.write_text("")
    env = {"PATH": f"{programs}:/usr/bin:/bin"}
    script = "\n".join(["set -eu", *commands])
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines()


@pytest.mark.parametrize("write", [steps.write_compose, steps.write_k8s])
def test_the_printed_commands_may_be_run_again(tmp_path: Path, write: Callable[[Plan, Path], list[str]]) -> None:
    """The admin key is made once, and stays closed."""
    key = tmp_path / "to" / "secrets" / "admin_key"
    seen = []
    for _ in range(2):
        run(write(Plan(), tmp_path / "to"), tmp_path)
        seen.append((key.read_text(), key.stat().st_mode & 0o777))
    assert seen[0] == seen[1]
    assert seen[0][1] == 0o600


def test_an_upgrade_in_kubernetes_replaces_the_api_before_engines_and_takes_the_backups_along(tmp_path: Path) -> None:
    """An old API process loses the end of a new worker's stream; an old backup refuses a new schema, each night."""
    plan, folder = Plan(image="batchsvc:2"), tmp_path / "to"
    ours = [
        f"kubectl apply -f {folder}/batchsvc.yaml",
        f"kubectl -n batchsvc wait --for=condition=complete job/{k8s.migration_name(plan)} --timeout=300s",
        "kubectl -n batchsvc rollout status deploy/batchsvc-api --timeout=300s",
        f"kubectl apply -f {folder}/engines.yaml",
    ]
    kinds = ("kubectl apply -f /", "kubectl -n batchsvc wait", "kubectl -n batchsvc rollout", "kubectl -n batchsvc set")
    told = run(steps.write_k8s(plan, folder), tmp_path)
    assert [line for line in told if line.startswith(kinds)] == ours, "there are no backups"
    for name, holds in (("batchsvc", False), ("engines", True)):
        documents = list(yaml.safe_load_all((folder / f"{name}.yaml").read_text()))
        assert ("batchsvc-engine" in {one["metadata"]["name"] for one in documents}) is holds
    (tmp_path / "backups").touch()
    told = run(steps.write_k8s(plan, folder), tmp_path)
    jobs = k8s.backups(plan)[1:]
    containers = [job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"] for job in jobs]
    assert [line for line in told if line.startswith(kinds)] == [
        *ours[:2],
        *(
            f"kubectl -n batchsvc set image cronjob.batch/{job['metadata']['name']} {container['name']}=batchsvc:2"
            for job, [container] in zip(jobs, containers, strict=True)
        ),
        *ours[2:],
    ]
    (tmp_path / "refused").touch()
    with pytest.raises(AssertionError):  # jobs that can't be looked for might stay as they are
        run(steps.write_k8s(plan, folder), tmp_path)


def test_each_secret_that_is_mounted_is_made(tmp_path: Path) -> None:
    plan = Plan()
    printed = steps.write_k8s(plan, tmp_path)
    made = {path.name for path in (tmp_path / "secrets").iterdir()}
    for _, _, spec in pods(all_of(plan)):
        for volume in spec["volumes"]:
            assert {item["key"] for item in volume.get("secret", {}).get("items", [])} <= made
    assert set(yaml.safe_load(compose.compose_file(plan))["secrets"]) <= made
    assert any("--from-file=" in line and "valkey.conf" in line for line in printed)
    values = [path.read_text().strip() for path in (tmp_path / "secrets").iterdir()]
    for text in ["\n".join(printed), *(path.read_text() for path in tmp_path.iterdir() if path.is_file())]:
        assert not any(value in text for value in values)


def test_the_extra_for_a_gpu_pins_what_the_project_does_and_adds_nothing_to_a_cpu() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    base = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}
    extra = {Requirement(text).name: Requirement(text) for text in project["optional-dependencies"]["gpu"]}
    assert "triton" in extra
    assert {name: one.specifier for name, one in extra.items()} == {name: base[name].specifier for name in extra}
    assert not any(one.extras for one in base.values() if one.name == "batchsvc")


@pytest.mark.parametrize("write", [steps.write_compose, steps.write_k8s])
def test_an_image_is_built_from_the_project_alone_and_holds_no_secret(
    tmp_path: Path, write: Callable[[Plan, Path], list[str]]
) -> None:
    """The folder that is written lies in the one that the image is built from: a copy of all would have its secrets."""
    write(Plan(), tmp_path)
    lines = (tmp_path / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith(("COPY", "ADD")) for name in line.split()[1:-1]]
    tool = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in tool["tool"]["setuptools"]["packages"]["find"]["include"]}
    needed = {"pyproject.toml", tool["project"]["readme"], *tool["project"]["license-files"]} | packages
    assert sorted(copied) == sorted(needed)
    ignored = (tmp_path / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == needed
    assert "**/secrets" in ignored[len(needed) + 1 :], "the last pattern that fits is the one that counts"


def test_the_socket_of_postgres_is_where_its_image_looks_for_it() -> None:
    """The image starts a server with the same flags to make the database, and reaches it by the usual socket."""
    [container] = next(spec for name, _, spec in pods(k8s.documents(Plan())) if name == "postgres")["containers"]
    assert not any("unix_socket" in flag for flag in container["args"])
    assert "/var/run/postgresql" in {mount["mountPath"] for mount in container["volumeMounts"]}
    postgres = yaml.safe_load(compose.compose_file(Plan()))["services"]["postgres"]
    assert not any("unix_socket" in flag for flag in postgres["command"])
    # by TCP: that other server is no sign of health
    for check in (postgres["healthcheck"]["test"], container["readinessProbe"]["exec"]["command"]):
        assert check[check.index("-h") + 1] == "127.0.0.1"


def test_a_fresh_volume_of_s3_belongs_to_its_user_before_it_starts() -> None:
    services = yaml.safe_load(compose.compose_file(Plan()))["services"]
    owner, s3 = services["s3-owner"], services["s3"]
    assert s3["depends_on"] == {"s3-owner": {"condition": "service_completed_successfully"}}
    assert owner["entrypoint"] == ["chown", "-R", s3["user"], "/data"]
    assert owner["volumes"] == s3["volumes"] == ["s3:/data"]
    assert (owner["user"], owner["cap_drop"], "CHOWN" in owner["cap_add"]) == ("0:0", ["ALL"], True)
    assert (owner["restart"], owner["network_mode"], owner["read_only"]) == ("on-failure", "none", True)
    assert "secrets" not in owner
    managed = yaml.safe_load(compose.compose_file(Plan(without=frozenset[Service]({"s3"}))))
    assert not {"s3", "s3-owner"} & set(managed["services"])


def test_probes_are_more_patient_than_what_they_ask() -> None:
    """/readyz waits for a part that hangs before it names it, and an engine pulls its model before it is ready."""
    assert probe.TIMEOUT_S > health.PATIENCE_S + 1
    services = yaml.safe_load(compose.compose_file(Plan()))["services"]
    for name in ("api", "control", "engine"):
        assert float(services[name]["healthcheck"]["timeout"].removesuffix("s")) > probe.TIMEOUT_S
    assert services["engine"]["healthcheck"]["start_period"] == "3600s"
    for name, _, spec in pods(all_of(Plan())):
        for kind in ("readinessProbe", "livenessProbe"):
            if name.startswith("batchsvc-") and (asked := spec["containers"][0].get(kind)):
                assert asked["timeoutSeconds"] == probe.TIMEOUT_S


def test_a_data_service_may_recover_for_long() -> None:
    """PostgreSQL replays its log and SeaweedFS reads its volumes first: whoever kills them then has them begin anew."""
    for name, _, spec in pods(k8s.documents(Plan())):
        if name in ("postgres", "s3"):
            asked = spec["containers"][0]["startupProbe"]
            assert asked["failureThreshold"] * asked["periodSeconds"] == 24 * 3600
            container = yaml.safe_load(compose.compose_file(Plan()))["services"][name]
            assert container["healthcheck"]["start_period"] == "3600s"


def test_compose_waits_for_the_api_and_then_starts_engines(tmp_path: Path) -> None:
    """Waiting for all would wait for engines too, and calls the one-shot containers failed that have ended well."""
    starts = [line.partition("compose.yaml ")[2] for line in steps.write_compose(Plan(), tmp_path) if " up " in line]
    assert starts == ["up --detach --wait api control", "up --detach"]


def test_an_image_for_a_gpu_installs_the_extra_and_the_builder_may_name_an_index() -> None:
    cpu, gpu = images.dockerfile(Plan()), images.dockerfile(Plan(device="cuda"))
    assert "[gpu]" in gpu
    assert "[gpu]" not in cpu
    before_the_install = cpu.partition("RUN pip install")[0]
    assert "\nARG PIP_EXTRA_INDEX_URL=\n" in before_the_install, "pip reads it while the image is built"
    assert "USER 10001:10001" in cpu


def test_backups_and_restores_are_jobs_with_a_volume_and_flags_that_exist() -> None:
    volume, *jobs = k8s.backups(Plan())
    for job in jobs:
        spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        [container] = spec["containers"]
        assert {"persistentVolumeClaim": {"claimName": volume["metadata"]["name"]}, "name": "backups"} in spec[
            "volumes"
        ]
        assert {"name": "backups", "mountPath": container["args"][1]} in container["volumeMounts"]
        assert (spec["securityContext"]["runAsNonRoot"], spec["restartPolicy"]) == (True, "Never")
        told = CliRunner().invoke(app, [container["args"][0], "--help"]).output
        assert all(flag in told for flag in container["args"] if flag.startswith("--"))
    assert [job["spec"].get("suspend", False) for job in jobs] == [False, True], "nothing is restored by the clock"


def test_what_readme_says_to_kubectl_and_compose_exists() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    kinds = {"deploy": "Deployment", "cronjob": "CronJob"}
    there = {(one["kind"], one["metadata"]["name"]) for one in (*all_of(Plan()), *k8s.backups(Plan()))}
    named = {(kinds[kind], name) for kind, name in re.findall(r"\b(deploy|cronjob)/(batchsvc-[a-z]+)\b", text)}
    assert named == {one for one in there if one[0] in kinds.values()}
    (scaled,) = re.findall(r"scale (.+) --replicas 0", text)
    ours = {name for kind, name in there if kind == "Deployment"}
    assert set(scaled.replace("deploy/", "").split()) == ours, "all of them, else the restore is refused"
    (waited,) = re.findall(r"app\.kubernetes\.io/name in \((.+?)\)", text)
    assert set(waited.split(", ")) == ours
    (stopped,) = re.findall(r"grep -E '(.+?)'", text)
    for plan in PLANS:
        services = yaml.safe_load(compose.compose_file(plan))["services"]
        processes = {name for name, one in services.items() if one["command"][:1] == ["serve"]}
        assert {name for name in services if re.search(stopped, name)} == processes
