"""Offsets of packed documents, and whether they are some."""

from torch import Tensor


def check_documents(cu_seqlens_cpu: Tensor, tokens: int) -> None:
    """Refuse offsets that do not cut `tokens` tokens into documents.

    The operators call it: what the offsets are is not known while a caller is compiled.

    Raises:
        ValueError: offsets that are no integers, do not begin at 0, do not end with the tokens, or fall.
    """
    integers = not cu_seqlens_cpu.is_floating_point() and cu_seqlens_cpu.ndim == 1
    if not integers or len(cu_seqlens_cpu) < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] integers, not {_told(cu_seqlens_cpu)}")
    if cu_seqlens_cpu[0] != 0 or cu_seqlens_cpu[-1] != tokens or (cu_seqlens_cpu.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {tokens} tokens of the batch, not {_told(cu_seqlens_cpu)}"
        )


def check_offsets(batch: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> None:
    """Refuse what contradicts itself before any offset is read.

    Raises:
        ValueError: documents in more than one row, or offsets on the host that are not those on the device.
    """
    if cu_seqlens is not None and batch != 1:
        raise ValueError(
            f"packed documents (cu_seqlens) need a batch of 1, not {batch}: fold [B, T] to [1, B*T]"
        )
    if cu_seqlens_cpu is not None and (cu_seqlens is None or cu_seqlens.shape != cu_seqlens_cpu.shape):
        given = None if cu_seqlens is None else tuple(cu_seqlens.shape)
        raise ValueError(
            f"cu_seqlens_cpu {tuple(cu_seqlens_cpu.shape)} must be the same offsets as cu_seqlens {given}"
        )


def _told(x: Tensor) -> str:
    return f"{x.dtype} {x.tolist() if x.numel() <= 16 else list(x.shape)}".removeprefix("torch.")
