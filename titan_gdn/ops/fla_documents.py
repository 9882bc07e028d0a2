"""Describes packed documents in the form that FLA's kernels expect."""

from typing import Any

import torch
from torch import Tensor

from titan_gdn.ops.documents import check_documents

FLA_CHUNK = 64
"""The tokens of a chunk in FLA's rule and in its convolution."""


def fla_documents(tokens: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> dict[str, Any]:
    """Return the keyword arguments that tell FLA's functions about documents and their chunks.

    FLA would compute `chunk_indices` on the host, copy them and wait for the stream. Here the device computes
    them, and only their number comes from the host.

    Args:
        tokens: the number of tokens of the row that holds the documents.
        cu_seqlens: `[N + 1]` offsets of packed documents, or None.
        cu_seqlens_cpu: the same on the CPU.

    Returns:
        `cu_seqlens` `[N + 1]` and `chunk_indices` `[chunks, 2]`: the document of each chunk, and the chunk's
        index in it. Both are None without documents.

    Raises:
        ValueError: see `check_documents`.
    """
    if cu_seqlens is None:
        return {"cu_seqlens": None, "chunk_indices": None}
    assert cu_seqlens_cpu is not None, "callers copy the offsets to the host"
    check_documents(cu_seqlens_cpu, tokens)
    chunks_N = _chunks(cu_seqlens)
    document = torch.repeat_interleave(chunks_N, output_size=int(_chunks(cu_seqlens_cpu).sum()))
    before_N = chunks_N.cumsum(0) - chunks_N
    place = torch.arange(len(document), device=document.device) - before_N[document]
    # FLA caches what it computes from this tensor by the tensor's identity. A new tensor each time prevents
    # it from using the chunks of old offsets that were overwritten in place.
    return {"cu_seqlens": cu_seqlens.clone(), "chunk_indices": torch.stack([document, place], 1)}


def _chunks(cu_seqlens: Tensor) -> Tensor:
    return (cu_seqlens.diff() + FLA_CHUNK - 1) // FLA_CHUNK
