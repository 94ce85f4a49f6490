"""Manifests of Kubernetes: data services as StatefulSets, our processes as Deployments, all of it in one namespace.

Secrets are keys of the Secret `batchsvc`, mounted as files. Pods run as users without privileges on a read-only root,
without a token of the cluster's API and without service links: those would set variables that begin with BATCHSVC_,
as our settings do. Engine workers get longer to stop than they drain.
"""

from __future__ import annotations

import hashlib
from typing import Any

import yaml

from batchsvc.deploy import images
from batchsvc.deploy.plan import (
    API_DRAIN_S,
    MIGRATE_WAIT_S,
    POSTGRES_PORT,
    S3_PORT,
    SECRET_SETTINGS,
    SIGNALS_PORT,
    VALKEY_PORT,
    Plan,
)
from batchsvc.deploy.probe import TIMEOUT_S
from batchsvc.deploy.secrets import DigestOf, no_digest

CRON_JOBS = ("batchsvc-backup", "batchsvc-restore")
CRON_CONTAINER = "backups"  # of both

_SECRETS = "/secrets"
_HOME = "/var/lib/batchsvc"
_PORTS = {"postgres": POSTGRES_PORT, "valkey": VALKEY_PORT, "s3": S3_PORT}
_PATIENT = {"failureThreshold": 8640}  # a day: killed in its recovery a data service would begin it anew


def written(manifests: list[dict[str, Any]]) -> str:
    """Manifests as a file, in their order."""
    return str(yaml.safe_dump_all(manifests, sort_keys=False, width=120))


def documents(plan: Plan, digest_of: DigestOf = no_digest) -> list[dict[str, Any]]:
    """All manifests of a deployment but its engines and backups, in the order in which they are applied. Where
    `digest_of` the files of secrets that a pod reads changes, it is rolled out."""
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    found: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": plan.namespace, "labels": restricted}},
        _made(plan, "v1", "ConfigMap", "batchsvc-settings", data=_settings(plan)),
    ]
    for service in plan.services:
        found += [_service(plan, service, _PORTS[service], is_headless=True), _stateful(plan, service)]
    found.append(_migration(plan))
    found += [_service(plan, "batchsvc-api", plan.api_port), _deployment(plan, "api", replicas=2)]
    found += [_budget(plan, "api"), _deployment(plan, "control", replicas=2), _budget(plan, "control")]
    found += [_closed(plan, service) for service in plan.services]
    for each in found:
        if each["kind"] in ("Deployment", "StatefulSet"):
            _annotate(plan, each, digest_of)
    return found


def engines(plan: Plan, digest_of: DigestOf = no_digest) -> list[dict[str, Any]]:
    """The engine workers, which are replaced once no API process is older than they: that one would lose the end of a
    streamed answer of theirs."""
    deployment = _deployment(plan, "engine", replicas=plan.workers)
    _annotate(plan, deployment, digest_of)
    return [deployment]


def backups(plan: Plan) -> list[dict[str, Any]]:
    """A volume with a nightly backup into it; and a restore, which only starts as a Job that is made of it."""
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}
    nightly = ["backup", "/backups", "--keep", "14", "--from-env"]
    restore = ["restore", "/backups", "--overwrite", "--from-env"]
    backup, restored = CRON_JOBS
    return [
        _made(plan, "v1", "PersistentVolumeClaim", "batchsvc-backups", spec=claim),
        _cron(plan, backup, nightly, {"schedule": "30 3 * * *", "concurrencyPolicy": "Forbid"}),
        _cron(plan, restored, restore, {"schedule": "0 0 1 1 *", "suspend": True}),
    ]


def _settings(plan: Plan) -> dict[str, str]:
    endpoint = {} if "s3" in plan.without else {"AWS_ENDPOINT_URL_S3": f"http://s3:{S3_PORT}"}
    everywhere = "0.0.0.0"  # noqa: S104  of the pod
    own = {"BATCHSVC_HOST": everywhere, "BATCHSVC_SIGNALS_HOST": everywhere, "BATCHSVC_SIGNALS_PORT": str(SIGNALS_PORT)}
    return {**plan.secret_settings(_SECRETS), **endpoint, **own, "HOME": _HOME, **plan.settings}


def _made(plan: Plan, version: str, kind: str, name: str, **rest: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "batchsvc"}
    meta = {"name": name, "namespace": plan.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": meta, **rest}


def _selector(name: str) -> dict[str, Any]:
    return {"matchLabels": {"app.kubernetes.io/name": name}}


def _service(plan: Plan, name: str, port: int, *, is_headless: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"selector": {"app.kubernetes.io/name": name}, "ports": [{"name": "main", "port": port}]}
    return _made(plan, "v1", "Service", name, spec=spec | ({"clusterIP": "None"} if is_headless else {}))


def _pod(name: str, spec: dict[str, Any], *, user: int, grace_s: float) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "batchsvc"}},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": int(grace_s),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **spec,
        },
    }


def _container(name: str, image: str, **rest: Any) -> dict[str, Any]:
    closed = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return {"name": name, "image": image, "securityContext": closed, **rest}


def _stateful(plan: Plan, name: str) -> dict[str, Any]:
    container, user, files = _DATA[name]()
    secret = {"secretName": "batchsvc", "defaultMode": 0o440, "items": [{"key": key, "path": key} for key in files]}
    container["volumeMounts"] = [
        {"name": "data", "mountPath": "/data"},
        {"name": "secrets", "mountPath": _SECRETS, "readOnly": True},
        {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108  in the pod
        *container.pop("more_mounts", []),
    ]
    container["ports"] = [{"name": "main", "containerPort": _PORTS[name]}]
    container["resources"] = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
    spec = {
        "containers": [container],
        "volumes": [{"name": "secrets", "secret": secret}, {"name": "scratch", "emptyDir": {}}],
    }
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}
    return _made(
        plan,
        "apps/v1",
        "StatefulSet",
        name,
        spec={
            "serviceName": name,
            "replicas": 1,
            "selector": _selector(name),
            "template": _pod(name, spec, user=user, grace_s=120),
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
        },
    )


def _postgres() -> tuple[dict[str, Any], int, list[str]]:
    env = {
        "POSTGRES_USER": "batchsvc",
        "POSTGRES_DB": "batchsvc",
        "POSTGRES_PASSWORD_FILE": f"{_SECRETS}/postgres_password",
        "PGDATA": "/data/main",
    }
    probe = _exec(["pg_isready", "-q", "-h", "127.0.0.1", "-U", "batchsvc"])
    container = _container(
        "postgres",
        images.POSTGRES,
        # no flag may move the socket: the image starts a server with these flags to make the database, by the usual one
        args=["postgres", "-c", "max_connections=200"],
        env=[{"name": name, "value": value} for name, value in env.items()],
        readinessProbe=probe,
        startupProbe=probe | _PATIENT,
        livenessProbe=probe | {"failureThreshold": 12},
        more_mounts=[{"name": "scratch", "mountPath": "/var/run/postgresql", "subPath": "run"}],
    )
    return container, images.POSTGRES_UID, ["postgres_password"]


def _valkey() -> tuple[dict[str, Any], int, list[str]]:
    # it listens before it loads its file
    probe = {"tcpSocket": {"port": "main"}, "periodSeconds": 10, "timeoutSeconds": 5}
    flags = ["--appendonly", "yes", "--dir", "/data", "--maxmemory-policy", "noeviction"]
    container = _container(
        "valkey",
        images.VALKEY,
        command=["valkey-server", f"{_SECRETS}/valkey.conf", *flags],
        readinessProbe=probe,
        livenessProbe=probe | {"failureThreshold": 12},
    )
    return container, images.VALKEY_UID, ["valkey.conf"]


def _s3() -> tuple[dict[str, Any], int, list[str]]:
    probe = {"httpGet": {"path": "/healthz", "port": "main"}, "periodSeconds": 10, "timeoutSeconds": 5}
    args = [
        *("server", "-dir=/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.ip.bind=0.0.0.0"),
        *(f"-s3.port={S3_PORT}", f"-s3.config={_SECRETS}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-s3.localSocket=/tmp/s3.sock", "-filer.localSocket=/tmp/filer.sock"),
        *("-master.telemetry=false", "-volume.max=0"),
    ]
    container = _container(
        "s3",
        images.SEAWEEDFS,
        command=["weed", *args],
        workingDir=_SECRETS,  # where weed looks for security.toml, whose keys close the ports behind the gateway
        readinessProbe=probe,
        startupProbe=probe | _PATIENT,
        livenessProbe=probe | {"failureThreshold": 12},
    )
    return container, images.UID, ["s3.json", "security.toml"]


_DATA = {"postgres": _postgres, "valkey": _valkey, "s3": _s3}


def _ours(plan: Plan, name: str, command: list[str], **rest: Any) -> dict[str, Any]:
    container = _container(
        name,
        plan.image,
        args=command,
        envFrom=[{"configMapRef": {"name": "batchsvc-settings"}}],
        volumeMounts=[
            {"name": "secrets", "mountPath": _SECRETS, "readOnly": True},
            {"name": "home", "mountPath": _HOME},
            {"name": "scratch", "mountPath": "/tmp"},  # noqa: S108  in the pod
        ],
        **rest,
    )
    keys = [{"key": key, "path": key} for key in SECRET_SETTINGS.values()]
    return {
        "containers": [container],
        "volumes": [
            {"name": "secrets", "secret": {"secretName": "batchsvc", "defaultMode": 0o440, "items": keys}},
            {"name": "home", "emptyDir": {}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }


def is_rolled_out(image: str) -> bool:
    """Whether another version of it has another name: the same manifest applied again changes nothing."""
    tag = image.rpartition("/")[2].partition(":")[2]
    return "@" in image or tag not in ("", "latest")


def migration_name(plan: Plan) -> str:
    """Another name for each image: a Job that has run can't be changed, only followed by another one."""
    return f"batchsvc-migrate-{_digest((plan.image, plan.settings))}"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def _migration(plan: Plan) -> dict[str, Any]:
    name = migration_name(plan)
    resources = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    container = _ours(plan, "migrate", ["migrate", "--wait", str(MIGRATE_WAIT_S)], resources=resources) | {
        "restartPolicy": "OnFailure"
    }
    pod = _pod(name, container, user=images.UID, grace_s=60)
    spec = {"backoffLimit": 30, "ttlSecondsAfterFinished": 3600, "template": pod}
    return _made(plan, "batch/v1", "Job", name, spec=spec)


def _cron(plan: Plan, name: str, command: list[str], when: dict[str, Any]) -> dict[str, Any]:
    resources = {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}}
    spec = _ours(plan, CRON_CONTAINER, command, resources=resources) | {"restartPolicy": "Never"}
    spec["containers"][0]["volumeMounts"].append({"name": "backups", "mountPath": "/backups"})
    spec["volumes"].append({"name": "backups", "persistentVolumeClaim": {"claimName": "batchsvc-backups"}})
    pod = _pod(name, spec, user=images.UID, grace_s=60)
    # else each night begins with a change of the owner of every file there
    pod["spec"]["securityContext"]["fsGroupChangePolicy"] = "OnRootMismatch"
    job = {"backoffLimit": 0, "template": pod}
    return _made(plan, "batch/v1", "CronJob", name, spec=when | {"jobTemplate": {"spec": job}})


def _deployment(plan: Plan, role: str, *, replicas: int) -> dict[str, Any]:
    name, port = f"batchsvc-{role}", plan.api_port if role == "api" else SIGNALS_PORT
    grace_s = API_DRAIN_S if role == "api" else plan.stop_s
    more: dict[str, Any] = {}
    if role == "engine":
        gpu = {"nvidia.com/gpu": "1"} if plan.device == "cuda" else {}
        memory = {"memory": plan.engine_memory}  # all of it, for the engine sizes its pool by what it may take
        more["resources"] = {"requests": {"cpu": "2", **memory, **gpu}, "limits": {**memory, **gpu}}
    else:
        more["resources"] = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "8Gi"}}
    if role == "api":  # its address is taken from the Service first, and calls that are on their way still arrive
        more["lifecycle"] = {"preStop": {"sleep": {"seconds": 5}}}
    container = _ours(
        plan,
        role,
        ["serve", role],
        ports=[{"name": "main", "containerPort": port}],
        startupProbe=_http("/livez", failures=120 if role == "engine" else 30),
        readinessProbe=_http("/readyz", failures=3),
        livenessProbe=_http("/livez", failures=6),
        **more,
    )
    strategy = {"maxUnavailable": 1, "maxSurge": 0} if role == "engine" else {"maxUnavailable": 0, "maxSurge": 1}
    return _made(
        plan,
        "apps/v1",
        "Deployment",
        name,
        spec={
            "replicas": replicas,
            "selector": _selector(name),
            "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy},
            "template": _pod(name, container, user=images.UID, grace_s=grace_s),
        },
    )


def _annotate(plan: Plan, workload: dict[str, Any], digest_of: DigestOf) -> None:
    """Settings and secrets are read at the start alone: with others it is another template, which is rolled out."""
    if workload["metadata"]["name"] == "postgres":
        return  # its image reads the password when it makes the database, and never again
    template = workload["spec"]["template"]
    files = [
        item["path"] for volume in template["spec"]["volumes"] for item in volume.get("secret", {}).get("items", [])
    ]
    found = {"batchsvc/secrets": digest_of(files)}
    if workload["kind"] == "Deployment":
        found["batchsvc/settings"] = _digest(sorted(_settings(plan).items()))
    template["metadata"]["annotations"] = found


def _budget(plan: Plan, role: str) -> dict[str, Any]:
    name = f"batchsvc-{role}"
    spec = {"maxUnavailable": 1, "selector": _selector(name)}
    return _made(plan, "policy/v1", "PodDisruptionBudget", name, spec=spec)


def _closed(plan: Plan, service: str) -> dict[str, Any]:
    """Only our own pods reach a data service."""
    ours = {"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "batchsvc"}}}
    spec = {
        "podSelector": _selector(service),
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [ours], "ports": [{"port": _PORTS[service]}]}],
    }
    return _made(plan, "networking.k8s.io/v1", "NetworkPolicy", service, spec=spec)


def _http(path: str, *, failures: int) -> dict[str, Any]:
    where = {"path": path, "port": "main"}
    return {"httpGet": where, "periodSeconds": 5, "timeoutSeconds": TIMEOUT_S, "failureThreshold": failures}


def _exec(command: list[str]) -> dict[str, Any]:
    return {"exec": {"command": command}, "periodSeconds": 10, "timeoutSeconds": 5}
