"""Which device is taken, and what is said of one that can't be used or fails."""

from __future__ import annotations

from subprocess import CalledProcessError

import pytest
import torch

from engine.config import EngineConfig, Formats
from engine.device import CPU, Gpu, NoGpuError, errors_told, find_device, is_of_device, why_it_failed
from engine.errors import ConfigError, DeviceError, MemoryShortageError, ModelError
from engine.memory.plan import plan_memory
from engine.model.config import ModelConfig

T4 = Gpu(name="Tesla T4", capability=(7, 5), free_bytes=15 << 30)
A100 = Gpu(name="NVIDIA A100", capability=(8, 0), free_bytes=80 << 30)
H200 = Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=140 << 30)
BF16, FP8, FP8_KV = Formats("bf16", "bf16"), Formats("fp8", "bf16"), Formats("bf16", "fp8")


@pytest.mark.parametrize(
    ("gpu", "formats", "words"),
    [
        (T4, BF16, ["Tesla T4 (sm_75)", "too old", "sm_80"]),
        (A100, FP8, ["NVIDIA A100 (sm_80)", "fp8 weights", "sm_89", "int8"]),
        (A100, FP8_KV, ["fp8 KV", "sm_89"]),
    ],
)
def test_a_gpu_that_is_too_old_is_refused_in_a_sentence(gpu: Gpu, formats: Formats, words: list[str]) -> None:
    said: list[str] = []
    assert find_device("auto", formats, said.append, lambda: gpu) == CPU
    (sentence,) = said
    assert all(word in sentence for word in words) and sentence.endswith("Running on the CPU.")
    with pytest.raises(DeviceError) as error:
        find_device("cuda", formats, said.append, lambda: gpu)
    assert str(error.value) + " Running on the CPU." == sentence


def test_a_gpu_that_can_is_taken_unless_the_cpu_is_asked_for() -> None:
    said: list[str] = []
    for gpu, formats in ((A100, BF16), (H200, FP8), (H200, FP8_KV), (A100, Formats("int8", "int8"))):
        assert find_device("auto", formats, said.append, lambda gpu=gpu: gpu).type == "cuda"
    assert find_device("cpu", BF16, said.append, lambda: H200) == CPU
    assert not said


def test_no_gpu_and_a_driver_that_refuses() -> None:
    said: list[str] = []

    def nothing() -> Gpu:
        raise NoGpuError("torch sees no NVIDIA GPU, or no driver for it")

    def refusing() -> Gpu:
        raise DeviceError("The driver of NVIDIA H200 refuses our kernels (device kernel image is invalid).")

    assert find_device("auto", BF16, said.append, nothing) == CPU
    assert not said, "most machines have none, and nobody needs to hear of it"
    with pytest.raises(DeviceError, match=r"There is no GPU to run on: torch sees no NVIDIA GPU.*--device cpu"):
        find_device("cuda", BF16, said.append, nothing)
    assert find_device("auto", BF16, said.append, refusing) == CPU
    assert "refuses our kernels" in said[0]
    with pytest.raises(DeviceError, match="refuses our kernels"):
        find_device("cuda", BF16, said.append, refusing)


def test_a_first_kernel_that_fails_says_what_to_do() -> None:
    for error in (RuntimeError("Failed to find C compiler. Please specify"), CalledProcessError(1, ["gcc", "main.c"])):
        assert "install gcc and python3-dev" in why_it_failed("NVIDIA H200", error)
    said = why_it_failed("NVIDIA H200", RuntimeError("Triton Error [CUDA]: device kernel image is invalid"))
    assert (
        said.startswith("The driver of NVIDIA H200 refuses our kernels (Triton Error") and "update the driver" in said
    )


def test_answers_that_may_not_depend_on_others_are_not_given_on_a_gpu() -> None:
    said: list[str] = []
    assert find_device("auto", BF16, said.append, lambda: H200, reproducible=True) == CPU
    assert "reproducible" in said[0]
    with pytest.raises(DeviceError, match="reproducible needs --device cpu"):
        find_device("cuda", BF16, said.append, lambda: H200, reproducible=True)


def test_this_machine_says_which_of_both_it_has() -> None:
    if torch.cuda.is_available():
        assert find_device("cuda", BF16, print).type == "cuda"
    else:
        with pytest.raises(DeviceError, match="There is no GPU"):
            find_device("cuda", BF16, print)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for this error"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    ],
)
def test_what_a_gpu_says_becomes_one_sentence(error: Exception) -> None:
    with pytest.raises(DeviceError) as told, errors_told():
        raise error
    assert "\n" not in str(told.value) and str(told.value).startswith("The GPU failed in the middle of a step: ")
    assert str(error).splitlines()[0] in str(told.value)


def test_what_is_no_device_error_stays_itself() -> None:
    assert not is_of_device(RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"), errors_told():
        raise RuntimeError("shape mismatch")
    for error in (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        with pytest.raises(MemoryShortageError), errors_told():
            raise error
    with pytest.raises(ConfigError), errors_told():
        raise ConfigError("CUDA error in a sentence of ours")


def test_too_little_memory_says_of_what_and_what_would_fit() -> None:
    model = ModelConfig(
        vocab_size=128_256, hidden=4096, mlp=14_336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, context_tokens=8192, norm_eps=1e-5, rope_theta=5e5,
    )  # fmt: skip
    with pytest.raises(ModelError) as error:
        plan_memory(EngineConfig(model=""), model, available=14 << 30, kv_share=0.9, place="Tesla T4's memory")
    assert "of Tesla T4's memory is free" in str(error.value)
    assert "weights with bf16 KV would fit" in str(error.value)
    assert "90%" in plan_memory(EngineConfig(model=""), model, available=40 << 30, kv_share=0.9).sentence


def test_the_setting_knows_three_devices() -> None:
    with pytest.raises(ConfigError, match="device is 'gpu'; it must be one of auto, cpu, cuda"):
        EngineConfig(model="", device="gpu")
