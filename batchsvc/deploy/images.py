"""The Dockerfile of our own image, and the images of the data services that compose and Kubernetes run."""

from __future__ import annotations

from batchsvc.deploy.plan import Plan

# all that an image is built from; a folder of secrets may well lie beside it
_FILES = ("pyproject.toml", "README.md", "LICENSE")
_FOLDERS = ("batchsvc", "engine", "migrations", "workers")

POSTGRES = "postgres:17"
VALKEY = "valkey/valkey:9.0"
SEAWEEDFS = "chrislusf/seaweedfs:4.48"
UID = 10001  # of our own processes
POSTGRES_UID = VALKEY_UID = 999  # as those images have them


def files(plan: Plan) -> dict[str, str]:
    """What the image is built by, by file name; the second is what BuildKit reads beside the first."""
    return {"Dockerfile": dockerfile(plan), "Dockerfile.dockerignore": dockerignore()}


def dockerignore() -> str:
    """Nothing goes to the builder but what is copied: whatever else lies there stays out of layers and caches."""
    let = "".join(f"!{name}\n" for name in (*_FILES, *_FOLDERS))
    return f"*\n{let}**/secrets\n**/__pycache__\n"


def dockerfile(plan: Plan) -> str:
    """An image of this version: built beside the project's source, for a CPU or, with the extra `gpu`, for NVIDIA."""
    gpu = plan.device == "cuda"
    extra = "[gpu]" if gpu else ""
    folders = "\n".join(f"COPY {name} /src/{name}" for name in _FOLDERS)
    return f"""\
# docker build -t {plan.image} -f Dockerfile SOURCE   (SOURCE is the folder with pyproject.toml)
FROM python:3.12-slim
# a C++ compiler: kernels for the CPU are compiled at first use, and Triton needs one to launch its own
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# pip's own setting: name an index with torch's builds for CPUs where no GPU is used, else CUDA's libraries come along
ARG PIP_EXTRA_INDEX_URL=
COPY {" ".join(_FILES)} /src/
{folders}
RUN pip install --no-cache-dir "/src{extra}" && rm -rf /src \\
 && useradd --uid {UID} --user-group --home-dir /var/lib/batchsvc --create-home --shell /usr/sbin/nologin batchsvc
USER {UID}:{UID}
WORKDIR /var/lib/batchsvc
ENTRYPOINT ["batchsvc"]
"""
