"""Chooses the kernels of an operator: FLA's (Triton) or PyTorch's."""

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import warnings
from typing import Literal, get_args

import torch
from torch.torch_version import TorchVersion

Backend = Literal["auto", "fla", "torch"]

OLDEST_FLA = "0.6"


def resolve(backend: Backend, device: torch.device, unfit: str | None = None) -> Literal["fla", "torch"]:
    """Choose the backend for tensors on a device.

    Args:
        backend: "fla", "torch", or "auto", which chooses FLA's kernels on a GPU that can run them and PyTorch
            elsewhere. On a GPU that cannot run them, it warns once and says why.
        device: the device of the tensors.
        unfit: a sentence that says why FLA's kernels take these tensors on no device, None if they do.

    Raises:
        ValueError: the backend is unknown, or it is "fla" and FLA's kernels cannot run.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r} is unknown: expected 'auto', 'fla' or 'torch'")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch"
    reason = unfit or why_not_fla(device)
    if reason is None:
        return "fla"
    if backend == "fla":
        raise ValueError(f"backend = 'fla': {reason} Possible are 'auto' and 'torch'.")
    _warn_once(reason)
    return "torch"


# torch.compile then calls the function while it traces and treats the result as a constant.
# torch.compiler.assume_constant_result sets the same attribute, but importing it takes 2 s (torch._dynamo).
resolve._dynamo_marked_constant = True


@functools.cache
def why_not_fla(device: torch.device) -> str | None:
    """Return a sentence that says why FLA's kernels cannot run on this device, or None if they can."""
    hopper = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] == 9
    )
    return reason_against_fla(
        gpu=device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1",
        hopper=hopper,
        fla=_version("fla-core", "flash-linear-attention"),
        triton=_version("triton", "pytorch-triton", "pytorch-triton-rocm"),
        tilelang=importlib.util.find_spec("tilelang") is not None and _has_nvcc(),
    )


def reason_against_fla(
    *, gpu: bool, hopper: bool, fla: str | None, triton: str | None, tilelang: bool
) -> str | None:
    """Return a sentence that says why FLA's kernels cannot run, or None if they can.

    Args:
        gpu: the tensors are on a GPU, or Triton's interpreter replaces it.
        hopper: the GPU is an NVIDIA GPU of compute capability 9.
        fla: the installed version of FLA, None if it is not installed.
        triton: the installed version of Triton, None if it is not installed.
        tilelang: TileLang is installed, and so is the compiler that it needs.
    """
    if fla is None:
        return f"FLA is not installed: pip install 'flash-linear-attention>={OLDEST_FLA}'."
    if TorchVersion(fla) < OLDEST_FLA:
        return f"FLA {fla} is too old: pip install 'flash-linear-attention>={OLDEST_FLA}'."
    if triton is None:
        return "FLA needs triton, which is not installed."
    if not gpu:
        return "FLA needs a GPU."
    # fla/ops/common/chunk_o.py, chunk_bwd_dqkwg: FLA raises in the backward (its issue 640).
    if hopper and "3.4" <= TorchVersion(triton) < "3.7.1" and not tilelang:
        return (
            f"Triton {triton} computes wrong gradients in FLA's gated kernels on Hopper GPUs: install triton "
            "3.7.1 or later, or tilelang and nvcc."
        )
    return None


def _version(*names: str) -> str | None:
    """Return the version of the first package that is installed. Importing FLA to ask it takes seconds."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def _has_nvcc() -> bool:
    """FLA uses TileLang only if it finds this compiler."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders)) is not None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason} The PyTorch backend, which is slower, runs instead.", stacklevel=2)
