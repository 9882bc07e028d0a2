"""The short causal convolution in PyTorch, one block of tokens at a time, on any device.

Forward and backward each pass over the tokens once. The backward pass recomputes the sum inside `silu`.
Shape suffixes: T tokens (batch and sequence flattened), D channels, C taps of a kernel.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_gdn.ops.documents import check_documents

ELEMENTS_AT_ONCE = {"cpu": 2**17, "cuda": 2**26}
"""Tokens times channels of a block: what fits into a CPU's cache, or keeps a GPU busy."""


class _Block(NamedTuple):
    """The tokens `[first, last)`, and the tokens up to `end` whose gradients they contribute to.

    `since_start_T1` is the number of tokens of the same document before each token. It is None if every token
    has enough of them to fill the kernel.
    """

    first: int
    last: int
    end: int
    since_start_T1: Tensor | None

    def of_same_document(self, x_TD: Tensor, back: int) -> Tensor:
        """Zero the rows of tokens that have fewer than `back` tokens of their document before them."""
        return x_TD if self.since_start_T1 is None else x_TD.masked_fill(self.since_start_T1 < back, 0)


def _blocks(x_BTD: Tensor, taps: int, cu_seqlens_cpu: Tensor | None, after: int = 0) -> Iterator[_Block]:
    batch, length, channels = x_BTD.shape
    offsets = torch.arange(batch + 1) * length if cu_seqlens_cpu is None else cu_seqlens_cpu
    check_documents(offsets, batch * length)
    since_start = torch.arange(batch * length) - offsets[:-1].repeat_interleave(offsets.diff())
    size = max(1, ELEMENTS_AT_ONCE.get(x_BTD.device.type, ELEMENTS_AT_ONCE["cuda"]) // channels)
    for first in range(0, batch * length, size):
        last = min(first + size, batch * length)
        end = min(last + after, batch * length)
        mine = since_start[first:end]
        starts = bool((mine < taps - 1).any())
        yield _Block(first, last, end, mine.unsqueeze(1).to(x_BTD.device) if starts else None)


def _earlier(x_TD: Tensor, block: _Block, taps: int, dtype: torch.dtype) -> list[Tensor]:
    """For each tap, the tokens `[T, D]` that it multiplies for the block's tokens up to `end`."""
    begin, past = max(0, block.first - taps + 1), taps - 1
    x = F.pad(x_TD[begin : block.end].to(dtype), (0, 0, past - (block.first - begin), 0))
    count = block.end - block.first
    return [block.of_same_document(x[past - back :][:count], back) for back in range(past, -1, -1)]


def _sum(earlier: list[Tensor], weight_CD: Tensor) -> Tensor:
    y = earlier[0] * weight_CD[0]
    for x, weight_D in zip(earlier[1:], weight_CD[1:], strict=True):
        y.addcmul_(x, weight_D)
    return y


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@torch.library.custom_op("titan_gdn::causal_conv1d", mutates_args=())
def conv_forward(x: Tensor, weight: Tensor, cu_seqlens_cpu: Tensor | None) -> Tensor:
    """See `causal_conv1d`."""
    dtype, taps = _compute_dtype(x), weight.shape[1]
    weight_CD, x_TD = weight.mT.to(dtype).contiguous(), x.flatten(0, 1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for block in _blocks(x, taps, cu_seqlens_cpu):
        y = _sum(_earlier(x_TD, block, taps, dtype), weight_CD)
        out.view_as(x_TD)[block.first : block.last] = F.silu(y, inplace=True)
    return out


@conv_forward.register_fake
def _(x, weight, cu_seqlens_cpu):  # noqa: ANN001, ANN202
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("titan_gdn::causal_conv1d_backward", mutates_args=())
def conv_backward(
    x: Tensor, weight: Tensor, cu_seqlens_cpu: Tensor | None, d_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` and `weight`."""
    dtype, taps = _compute_dtype(x), weight.shape[1]
    weight_CD, x_TD, d_out_TD = weight.mT.to(dtype).contiguous(), x.flatten(0, 1), d_out.flatten(0, 1)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_weight_CD = torch.zeros_like(weight_CD)
    for block in _blocks(x, taps, cu_seqlens_cpu, after=taps - 1):
        earlier = _earlier(x_TD, block, taps, dtype)
        d_out_block = d_out_TD[block.first : block.end].to(dtype)
        d_sum = torch.ops.aten.silu_backward(d_out_block, _sum(earlier, weight_CD))
        count = block.last - block.first
        dx_block = torch.zeros_like(d_sum[:count])
        for back, tap in zip(range(taps), reversed(range(taps)), strict=True):
            d_weight_CD[tap] += (d_sum[:count] * earlier[tap][:count]).sum(0)
            later = block.of_same_document(d_sum, back)[back : back + count]
            dx_block[: len(later)].addcmul_(later, weight_CD[tap])
        dx.view_as(x_TD)[block.first : block.last] = dx_block
    return dx, d_weight_CD.mT.to(weight.dtype).contiguous()


@conv_backward.register_fake
def _(x, weight, cu_seqlens_cpu, d_out):  # noqa: ANN001, ANN202
    return tuple(torch.empty_like(y, memory_format=torch.contiguous_format) for y in (x, weight))


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_out):  # noqa: ANN001, ANN202
    return *conv_backward(*ctx.saved_tensors, d_out), None


conv_forward.register_autograd(_backward, setup_context=_setup_context)
