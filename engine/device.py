"""Which device the engine runs on, what it must be able to do, and what its errors mean in one sentence.

A GPU is taken if torch can use one, if it isn't too old for the formats, and if its driver runs a kernel of ours: each
refusal is a sentence. `auto` then says it and runs on the CPU; who asked for the GPU gets a DeviceError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import CalledProcessError

import torch

from engine.config import Formats
from engine.errors import DeviceError, EngineError, MemoryShortageError

CPU = torch.device("cpu")
FIRST = (8, 0)
"""The oldest architecture (sm_80) that our kernels are made for: it has bf16 and copies beside computing."""
FIRST_FP8 = (8, 9)

# torch has a type of its own where its allocator finds none; drivers, streams and graphs take theirs elsewhere
_NO_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
_OF_DEVICE = ("CUDA error", "Triton Error [CUDA]", "CUDA driver error", "CUBLAS_STATUS", "out of resource:")
_WAY_OUT = "update the driver, or run on the CPU with --device cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as its driver tells it."""

    name: str
    capability: tuple[int, int]
    free_bytes: int

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


def find_device(
    wanted: str,
    formats: Formats,
    say: Callable[[str], None],
    look: Callable[[], Gpu] | None = None,
    *,
    reproducible: bool = False,
) -> torch.device:
    """The device for `wanted` (auto, cpu or cuda). Raises DeviceError when the GPU was asked for and can't serve."""
    if wanted == "cpu":
        return CPU
    why: str | None
    try:
        why = refusal((look or look_at_gpu)(), formats, reproducible=reproducible)
    except NoGpuError as error:
        if wanted == "auto":
            return CPU
        raise DeviceError(f"There is no GPU to run on: {error}; run on the CPU with --device cpu.") from error
    except DeviceError as error:
        why = str(error)
    if why is None:
        return torch.device("cuda")
    if wanted == "cuda":
        raise DeviceError(why)
    say(f"{why} Running on the CPU.")
    return CPU


class NoGpuError(DeviceError):
    """Torch can use none; the message is a clause."""


def look_at_gpu() -> Gpu:
    """The current GPU, on which a kernel ran unless it is too old. Raises NoGpuError, or DeviceError if its driver
    refuses."""
    if torch.version.cuda is None:
        raise NoGpuError("this torch was built without CUDA")
    if not torch.cuda.is_available():
        raise NoGpuError("torch sees no NVIDIA GPU, or no driver for it")
    name = "the GPU"
    try:
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        free, _ = torch.cuda.mem_get_info()
        if capability >= FIRST:
            from engine.kernels.gpu.common import prove

            prove(torch.device("cuda"))
    except ImportError as error:
        raise NoGpuError(f"its kernels need triton, which isn't there ({error})") from error
    except Exception as error:  # whatever the driver, its loader or triton raise: none of them can be gone on from
        raise DeviceError(why_it_failed(name, error)) from error
    return Gpu(name=name, capability=capability, free_bytes=free)


def why_it_failed(name: str, error: Exception) -> str:
    """What hinders the first kernel on this GPU."""
    if isinstance(error, CalledProcessError) or "C compiler" in str(error):
        needs = f"Triton needs a C compiler and Python's headers to launch kernels on {name}"
        return f"{needs} ({first_line(error)}); install gcc and python3-dev, or run on the CPU with --device cpu."
    return f"The driver of {name} refuses our kernels ({first_line(error)}); {_WAY_OUT}."


def refusal(gpu: Gpu, formats: Formats, *, reproducible: bool = False) -> str | None:
    """Why this GPU can't run these formats; None if it can. `reproducible`: no answer may depend on others."""
    if reproducible:
        return "On a GPU an answer depends on what is computed beside it, so reproducible needs --device cpu."
    if gpu.capability < FIRST:
        return f"{gpu.name} ({gpu.arch}) is too old: our kernels need an Ampere GPU (sm_80) or a later one."
    if "fp8" in formats and gpu.capability < FIRST_FP8:
        what = "weights" if formats.weights == "fp8" else "KV"
        return f"{gpu.name} ({gpu.arch}) is too old for fp8 {what}, which need sm_89 or later; use int8."
    return None


@contextmanager
def errors_told(what: str = "a step") -> Iterator[None]:
    """Whatever says that memory ran out becomes a MemoryShortageError, whatever else a GPU says a DeviceError."""
    short = f"{what[:1].upper()}{what[1:]} needs more memory than there is."
    try:
        yield
    except EngineError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryShortageError(short) from error
    except Exception as error:
        if any(mark in str(error) for mark in _NO_MEMORY):
            raise MemoryShortageError(short) from error
        if not is_of_device(error):
            raise
        raise DeviceError(f"The GPU failed in the middle of {what}: {first_line(error)}.") from error


def is_of_device(error: Exception) -> bool:
    """Whether a GPU, its driver or a library on it said so."""
    return isinstance(error, torch.AcceleratorError) or any(mark in str(error) for mark in _OF_DEVICE)


def first_line(error: Exception) -> str:
    """What an exception says, without the advice below it."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(". ")
