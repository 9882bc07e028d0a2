"""Checks of the offsets of packed documents."""

from torch import Tensor


def check_documents(cu_seqlens_cpu: Tensor, tokens: int) -> None:
    """Check that offsets split `tokens` tokens into documents.

    The operators call this function when they run: while a caller is compiled, the offsets have no values.

    Raises:
        ValueError: the offsets are not integers, do not start at 0, do not end at `tokens`, or decrease.
    """
    integers = not cu_seqlens_cpu.is_floating_point() and cu_seqlens_cpu.ndim == 1
    if not integers or len(cu_seqlens_cpu) < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] integers, not {_describe(cu_seqlens_cpu)}")
    if cu_seqlens_cpu[0] != 0 or cu_seqlens_cpu[-1] != tokens or (cu_seqlens_cpu.diff() < 0).any():
        given = _describe(cu_seqlens_cpu)
        raise ValueError(f"cu_seqlens must increase from 0 to {tokens}, the number of tokens, not {given}")


def check_offsets(batch: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> None:
    """Check that the batch and both copies of the offsets fit, without reading any offset.

    Raises:
        ValueError: the documents are in more than one row, or the offsets on the host cannot be those on the
            device.
    """
    if cu_seqlens is not None and batch != 1:
        raise ValueError(
            f"packed documents (cu_seqlens) need a batch of 1, not {batch}: reshape [B, T] to [1, B*T]"
        )
    if cu_seqlens_cpu is not None and (cu_seqlens is None or cu_seqlens.shape != cu_seqlens_cpu.shape):
        given = None if cu_seqlens is None else tuple(cu_seqlens.shape)
        raise ValueError(
            f"cu_seqlens_cpu {tuple(cu_seqlens_cpu.shape)} must be the same offsets as cu_seqlens {given}"
        )


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {x.tolist() if x.numel() <= 16 else list(x.shape)}".removeprefix("torch.")
