"""Checks of the offsets of packed documents."""

import torch
from torch import Tensor

from titan_gdn.ops.arguments import dtype_of

CPU = torch.device("cpu")


def check_documents(cu_seqlens_cpu: Tensor, tokens: int) -> None:
    """Check that offsets split `tokens` tokens into documents.

    The operators call this function when they run: while a caller is compiled, the offsets have no values.

    Raises:
        ValueError: the offsets are not integers, do not start at 0, do not end at `tokens`, or decrease.
    """
    integers = cu_seqlens_cpu.dtype in (torch.int64, torch.int32) and cu_seqlens_cpu.ndim == 1
    if not integers or not len(cu_seqlens_cpu):
        raise ValueError(f"cu_seqlens must be [N + 1] integers, not {_describe(cu_seqlens_cpu)}")
    if cu_seqlens_cpu[0] != 0 or cu_seqlens_cpu[-1] != tokens or (cu_seqlens_cpu.diff() < 0).any():
        given = _describe(cu_seqlens_cpu)
        raise ValueError(f"cu_seqlens must increase from 0 to {tokens}, the number of tokens, not {given}")


def check_offsets(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    """Check that `x` `[B, T, ...]` and both copies of the offsets fit, without reading any offset.

    Returns:
        The offsets on the CPU, copied there if only those on the device are given. None without documents.

    Raises:
        ValueError: an argument is no tensor or is on another device, the documents are in more than one row,
            or the offsets on the host cannot be those on the device.
    """
    if cu_seqlens is not None:
        check_indices("cu_seqlens", cu_seqlens, x.device)
    if cu_seqlens_cpu is not None:
        check_indices("cu_seqlens_cpu", cu_seqlens_cpu, CPU)
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(
            f"packed documents (cu_seqlens) need a batch of 1, not {x.shape[0]}: reshape [B, T] to [1, B*T]"
        )
    if cu_seqlens_cpu is not None and (cu_seqlens is None or cu_seqlens.shape != cu_seqlens_cpu.shape):
        given = None if cu_seqlens is None else tuple(cu_seqlens.shape)
        raise ValueError(
            f"cu_seqlens_cpu {tuple(cu_seqlens_cpu.shape)} must be the same offsets as cu_seqlens {given}"
        )
    return cu_seqlens.cpu() if cu_seqlens is not None and cu_seqlens_cpu is None else cu_seqlens_cpu


def check_indices(name: str, x: Tensor, device: torch.device) -> None:
    """Check that an argument is a tensor on a device.

    Raises:
        ValueError: it is not. The message shows how to make it one.
    """
    if not isinstance(x, Tensor):
        right = f"torch.tensor({name}, device={str(device)!r})"
        raise ValueError(f"{name} must be a tensor of integers, not {type(x).__name__}: {right}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, not on {x.device}: {name}.to({str(device)!r})")


def _describe(x: Tensor) -> str:
    return f"{dtype_of(x)} {x.tolist() if x.numel() <= 16 else list(x.shape)}"
