"""Packed documents as FLA's kernels take them."""

import torch
from torch import Tensor

from titan_gdn.ops.documents import check_documents

FLA_CHUNK = 64
"""Tokens a chunk in FLA's rule and in its convolution."""


def fla_documents(
    tokens: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> dict[str, Tensor | None]:
    """The arguments by which FLA's functions know documents and their chunks.

    FLA would copy `chunk_indices` from the host and wait for the stream. Here the device makes them, and
    the host contributes their number.

    Args:
        tokens: of the row that they cut.
        cu_seqlens: `[N + 1]` offsets of packed documents, or None.
        cu_seqlens_cpu: the same on the CPU.

    Returns:
        `cu_seqlens` `[N + 1]` and `chunk_indices` `[chunks, 2]`, for each chunk its document and its place
        there; None without documents.

    Raises:
        ValueError: see `check_documents`.
    """
    if cu_seqlens is None:
        return {"cu_seqlens": None, "chunk_indices": None}
    check_documents(cu_seqlens_cpu, tokens)
    chunks_N = _chunks(cu_seqlens)
    document = torch.repeat_interleave(chunks_N, output_size=int(_chunks(cu_seqlens_cpu).sum()))
    before_N = chunks_N.cumsum(0) - chunks_N
    place = torch.arange(len(document), device=document.device) - before_N[document]
    # FLA remembers what it computes from this tensor by the tensor's identity: a fresh one each time, lest
    # offsets that were overwritten in place meet the chunks of those before.
    return {"cu_seqlens": cu_seqlens.clone(), "chunk_indices": torch.stack([document, place], 1)}


def _chunks(cu_seqlens: Tensor) -> Tensor:
    return (cu_seqlens.diff() + FLA_CHUNK - 1) // FLA_CHUNK
