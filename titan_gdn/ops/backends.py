"""Which kernels an operator runs: FLA's (Triton) or PyTorch's."""

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


def resolve(backend: Backend, device: torch.device) -> Literal["fla", "torch"]:
    """Choose the backend for tensors on a device.

    Args:
        backend: "fla", "torch", or "auto": FLA's kernels on a GPU that they run on, PyTorch elsewhere. Where
            a GPU has to do without them, a warning says why, once.
        device: where the tensors are.

    Raises:
        ValueError: an unknown backend, or "fla" where its kernels do not run.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r} is unknown; possible are 'auto', 'fla' and 'torch'")
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch"
    reason = why_not_fla(device)
    if reason is None:
        return "fla"
    if backend == "fla":
        raise ValueError(f"backend = 'fla': {reason}")
    _warn_once(reason)
    return "torch"


# torch.compile calls the function while it traces and takes the answer for a constant. This is what
# torch.compiler.assume_constant_result sets, but that imports torch._dynamo, which takes 2 s.
resolve._dynamo_marked_constant = True


@functools.cache
def why_not_fla(device: torch.device) -> str | None:
    """Why FLA's kernels cannot run on a device of this process, in a sentence; None if they can."""
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
    """Why FLA's kernels cannot run, in a sentence; None if they can.

    Args:
        gpu: tensors are on a GPU, or Triton's interpreter takes its place.
        hopper: it is an NVIDIA GPU of compute capability 9.
        fla: the version that is installed, None without.
        triton: likewise.
        tilelang: TileLang is installed, with the compiler that it needs.
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
    """The version of the first of these packages that is installed. Importing FLA would take seconds."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return None


def _has_nvcc() -> bool:
    """FLA takes TileLang only where it finds this compiler."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders = [os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders)) is not None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"{reason} The PyTorch backend runs instead, which is slower.", stacklevel=2)
