"""How packed documents are cut into chunks, in the order in which a chunked rule runs over them."""

from typing import NamedTuple

import torch

CHUNK = 64
"""Tokens a chunk, at most. Chunks start afresh at each document."""

CHUNKS_AT_ONCE = 64
"""Chunks whose batched products are formed together. It bounds the memory that is in use for a moment."""


class Piece(NamedTuple):
    """Chunks of one step, which run side by side: `[first, last)` of all, with the states `[low, high)`."""

    first: int
    last: int
    low: int
    high: int


class ChunkPlan(NamedTuple):
    """The chunks of `N` documents, step by step: step `s` holds chunk `s` of every document that has one.

    Documents stand in the order of their number of chunks, longest first, so that the documents that
    are still running at a step are a prefix of the states.

    Attributes:
        tokens: `[chunks, CHUNK]` int64, the token of each row, 0 where `valid` is False.
        valid: `[chunks, CHUNK]` bool, False for the rows that fill up a document's last chunk.
        documents: `[N]` int64, the document that each state belongs to.
        blocks: pieces in the order of time, grouped so that a block has about `CHUNKS_AT_ONCE` chunks.
    """

    tokens: torch.Tensor
    valid: torch.Tensor
    documents: torch.Tensor
    blocks: list[list[Piece]]


def max_chunks(tokens: int, documents: int) -> int:
    """A bound on the number of chunks that needs no offsets: `ceil(tokens / CHUNK) + documents`."""
    return (tokens + CHUNK - 1) // CHUNK + documents


def plan_chunks(cu_seqlens_cpu: torch.Tensor, device: torch.device) -> ChunkPlan:
    """Cut documents into chunks.

    Args:
        cu_seqlens_cpu: `[N + 1]` integers on the CPU, the offsets of the documents.
        device: where the index tensors are wanted.
    """
    starts, ends = cu_seqlens_cpu[:-1].long(), cu_seqlens_cpu[1:].long()
    chunks_N = (ends - starts + CHUNK - 1) // CHUNK
    documents = torch.argsort(chunks_N, descending=True, stable=True)
    # running[s] documents have a chunk s: those with more than s chunks.
    running = len(chunks_N) - torch.bincount(chunks_N).cumsum(0)[:-1]
    first = running.cumsum(0) - running

    step = torch.repeat_interleave(torch.arange(len(running)), running)
    document = documents[torch.arange(len(step)) - first[step]]
    tokens = (starts[document] + step * CHUNK)[:, None] + torch.arange(CHUNK)
    valid = tokens < ends[document][:, None]

    blocks: list[list[Piece]] = []
    room = 0
    for offset, count in zip(first.tolist(), running.tolist(), strict=True):
        for low in range(0, count, CHUNKS_AT_ONCE):
            high = min(low + CHUNKS_AT_ONCE, count)
            if high - low > room:
                blocks.append([])
                room = CHUNKS_AT_ONCE
            blocks[-1].append(Piece(offset + low, offset + high, low, high))
            room -= high - low
    tokens = tokens.masked_fill(~valid, 0)
    return ChunkPlan(tokens.to(device), valid.to(device), documents.to(device), blocks)
