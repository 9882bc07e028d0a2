"""Splits packed documents into chunks, in the order in which a chunked rule processes them."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_gdn.ops.documents import check_documents

CHUNK = 64
"""The most tokens of a chunk. Every document starts a new chunk."""

MATRICES_AT_ONCE = {"cpu": 64, "cuda": 4096}
"""Chunks times value heads of a batched product: what fits into a CPU's cache, or keeps a GPU busy."""


class Piece(NamedTuple):
    """Chunks `[first, last)` of a block, all of one step, which read and write the states `[low, high)`."""

    first: int
    last: int
    low: int
    high: int


class Block(NamedTuple):
    """Consecutive chunks of the plan, whose products are computed in one batch.

    Attributes:
        first: the index of the block's first chunk in the plan.
        pieces: the steps of the block, in order of time.
        tokens: `[N * CHUNK]` int64, the token of each row; 0 for padding rows.
        rows: int64, the rows that are tokens; None if every row is.
        filling: int64, the padding rows; None if there are none.
    """

    first: int
    pieces: list[Piece]
    tokens: Tensor
    rows: Tensor | None
    filling: Tensor | None

    @property
    def chunks(self) -> slice:
        """The block's chunks among those of the plan."""
        return slice(self.first, self.first + self.pieces[-1].last)

    def gather(self, x: Tensor) -> Tensor:
        """Gather tokens `[tokens, ...]` into chunks `[N, CHUNK, ...]`; padding rows are zero."""
        out = x.index_select(0, self.tokens)
        if self.filling is not None:
            out.index_fill_(0, self.filling, 0)
        return out.unflatten(0, (-1, CHUNK))

    def scatter(self, out: Tensor, x_NC: Tensor) -> None:
        """Write chunks `[N, CHUNK, ...]` to the rows of `out` `[tokens, ...]` that they came from."""
        x, tokens = x_NC.flatten(0, 1).to(out.dtype), self.tokens
        if self.rows is not None:
            x, tokens = x.index_select(0, self.rows), tokens.index_select(0, self.rows)
        out.index_copy_(0, tokens, x)


class ChunkPlan(NamedTuple):
    """The chunks of `N` documents, step by step: step `s` holds chunk `s` of every document that has one.

    The documents are sorted by their number of chunks, longest first, so that the documents that are not
    finished at a step are a prefix of the states.

    Attributes:
        documents: `[N]` int64, the document of each state.
        blocks: the chunks in order of time.
    """

    documents: Tensor
    blocks: list[Block]


def max_chunks(tokens: int, documents: int) -> int:
    """An upper bound on the number of chunks, without the offsets: `ceil(tokens / CHUNK) + documents`."""
    return (tokens + CHUNK - 1) // CHUNK + documents


def plan_chunks(cu_seqlens_cpu: Tensor, tokens: int, heads: int, device: torch.device) -> ChunkPlan:
    """Split documents into chunks.

    Args:
        cu_seqlens_cpu: `[N + 1]` integers on the CPU, the offsets of the documents.
        tokens: the total number of tokens.
        heads: value heads, each of which has its own matrices in every chunk.
        device: the device of the index tensors in the result.

    Raises:
        ValueError: see `check_documents`.
    """
    check_documents(cu_seqlens_cpu, tokens)
    at_once = max(1, MATRICES_AT_ONCE.get(device.type, MATRICES_AT_ONCE["cuda"]) // heads)
    starts, ends = cu_seqlens_cpu[:-1].long(), cu_seqlens_cpu[1:].long()
    chunks_N = (ends - starts + CHUNK - 1) // CHUNK
    documents = torch.argsort(chunks_N, descending=True, stable=True)
    # running[s] documents have a chunk s: those with more than s chunks.
    running = len(chunks_N) - torch.bincount(chunks_N).cumsum(0)[:-1]
    first = running.cumsum(0) - running

    step = torch.repeat_interleave(torch.arange(len(running)), running)
    document = documents[torch.arange(len(step)) - first[step]]
    index_NC = (starts[document] + step * CHUNK)[:, None] + torch.arange(CHUNK)
    valid_NC = index_NC < ends[document][:, None]
    index_NC = index_NC.masked_fill_(~valid_NC, 0)

    blocks, begin = [], 0
    for pieces in _pieces(running.tolist(), at_once):
        end = begin + pieces[-1].last
        index, valid = (x[begin:end].flatten() for x in (index_NC, valid_NC))
        rows = filling = None
        if not valid.all():
            rows, filling = (x.nonzero().flatten().to(device) for x in (valid, ~valid))
        blocks.append(Block(begin, pieces, index.to(device), rows, filling))
        begin = end
    return ChunkPlan(documents.to(device), blocks)


def _pieces(running: list[int], at_once: int) -> list[list[Piece]]:
    """Group the steps, of `running[s]` chunks each, into blocks of at most `at_once` chunks."""
    blocks: list[list[Piece]] = []
    room = 0
    for count in running:
        for low in range(0, count, at_once):
            high = min(low + at_once, count)
            if high - low > room:
                blocks.append([])
                room = at_once
            first = at_once - room
            blocks[-1].append(Piece(first, first + high - low, low, high))
            room -= high - low
    return blocks
