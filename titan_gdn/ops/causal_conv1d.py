"""The short causal convolution that stands before the rule."""

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Convolve every channel with its own kernel over the past of its document, then `silu`.

    `y_t = silu(sum_j weight[C-1-j] * x_{t-j})`, where tokens before the document's first are zero.

    Args:
        x: `[B, T, D]` channels.
        weight: `[D, C]` kernels, the present token's weight last, as `torch.nn.Conv1d` has them.
        cu_seqlens: `[N + 1]` offsets of packed documents; needs `B = 1`. Without, every row is a document.

    Returns:
        `[B, T, D]` in the dtype of `x`; sums are float32 for narrower dtypes.

    Raises:
        ValueError: `cu_seqlens` with a batch other than 1.
    """
    batch, length, _ = x.shape
    if cu_seqlens is not None and batch != 1:
        raise ValueError(
            f"packed documents (cu_seqlens) need a batch of 1, not {batch}: fold [B, T] to [1, B*T]"
        )
    kernel = weight.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    past = F.pad(x, (0, 0, kernel - 1, 0))
    since_start = None if cu_seqlens is None else _tokens_since_start(cu_seqlens, length)
    y = x.to(dtype) * weight[:, -1].to(dtype)
    for back in range(1, kernel):
        earlier = past[:, kernel - 1 - back : kernel - 1 - back + length]
        if since_start is not None:
            earlier = earlier.masked_fill((since_start < back)[None, :, None], 0)
        y = torch.addcmul(y, earlier.to(dtype), weight[:, kernel - 1 - back].to(dtype))
    return F.silu(y).to(x.dtype)


def _tokens_since_start(cu_seqlens: Tensor, length: int) -> Tensor:
    """`[T]`, how many tokens of its document stand before each token."""
    token = torch.arange(length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return token - cu_seqlens[document]
