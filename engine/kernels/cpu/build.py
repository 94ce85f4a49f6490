"""Compiles the C++ kernels at first use and keeps the library in the user's cache, one a source, compiler and CPU.

Links against the OpenMP runtime that torch brings, so that both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import platformdirs
import torch

_SOURCES = ("attention.cpp", "fp8.cpp", "groups.cpp", "layers.cpp", "matmul.cpp", "rows.cpp")
_FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-w")
_COMPILERS = ("g++", "clang++", "c++")


class BuildError(Exception):
    """The kernels can't be had on this machine; the message is one sentence that says why."""


@functools.cache
def library(flags: tuple[str, ...] = _FLAGS) -> ctypes.CDLL:
    """The compiled kernels. Raises BuildError."""
    here = Path(__file__).parent
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError("there is no C++ compiler (g++ or clang++) on PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join((version, _cpu(), torch.__version__, *flags)).encode())
    for source in sorted(here.glob("*.cpp")) + sorted(here.glob("*.h")):
        digest.update(source.read_bytes())
    folder = platformdirs.user_cache_path("batchsvc", appauthor=False) / "kernels"
    target = folder / f"{digest.hexdigest()[:24]}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with target.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # processes that start together compile once
                if not target.exists():
                    _compile(compiler, here, target, flags)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"the compiled kernels can't be kept or loaded: {error}") from error


def _compile(compiler: str, here: Path, target: Path, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [str(Path(scratch) / f"{name}.o") for name in _SOURCES]
        commands = [
            [compiler, *flags, "-c", str(here / name), "-o", built]
            for name, built in zip(_SOURCES, objects, strict=True)
        ]
        runtime = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        linked = Path(scratch) / "kernels.so"
        commands.append(
            [compiler, "-shared", *objects, "-o", str(linked), *(map(str, runtime) if runtime else ["-lgomp"])]
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = next(iter(done.stderr.strip().splitlines()), "no message")
                raise BuildError(f"{Path(compiler).name} failed: {reason}")
        linked.replace(target)


def _cpu() -> str:
    """What -march=native sees: model and flags of the first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features", "CPU part")))
