"""Causal softmax attention inside packed documents, for devices on which FlexAttention has no backward pass.

It computes the scores of one block of queries at a time, so memory is linear in the sequence. The backward
pass recomputes the scores.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_gdn.ops.arguments import check_tensors
from titan_gdn.ops.documents import CPU, check_documents, check_indices

QUERIES = 128
"""The most queries of a block."""


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    tokens_cpu: Tensor | None = None,
) -> Tensor:
    """Attend to the earlier tokens of the same document.

    Args:
        q: `[B, T, N, H]` queries, or `[B, L, N, H]` queries of some of the tokens.
        k: `[B, T, M, H]` keys. `N` is a multiple of `M`; key head `m` belongs to the query heads from `m*N/M`
            to `(m+1)*N/M - 1`.
        v: `[B, T, M, V]` values.
        scale: factor of the scores, `H ** -0.5` by default.
        cu_seqlens_cpu: `[D + 1]` offsets of the documents in the flattened sequence `[B*T]`, on the CPU. None
            makes every row one document.
        tokens_cpu: `[L]` indices in a row of the tokens that the queries belong to, on the CPU. Few and long
            runs of consecutive tokens are fastest. None means all tokens.

    Returns:
        `[B, L, N, V]` in the dtype of `q`, computed in float32, or in float64 for float64 inputs.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit.
    """
    _check(q, k, v)
    batch, length = k.shape[:2]
    for name, x in (("cu_seqlens_cpu", cu_seqlens_cpu), ("tokens_cpu", tokens_cpu)):
        if x is not None:
            check_indices(name, x, CPU)
    if cu_seqlens_cpu is None:
        cu_seqlens_cpu = torch.arange(batch + 1) * length
    if tokens_cpu is not None:
        tokens_cpu = (torch.arange(batch)[:, None] * length + tokens_cpu).flatten()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attention_forward(q, k, v, scale, cu_seqlens_cpu, tokens_cpu)[0]


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tensors(q=q, k=k, v=v)
    fits = q.ndim == k.ndim == v.ndim == 4 and all(n > 0 for n in (*q.shape[2:], *k.shape[2:], *v.shape[2:]))
    fits = fits and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} must be [B, T, N, H], k {tuple(k.shape)} [B, T, M, H] and v "
            f"{tuple(v.shape)} [B, T, M, V], where N is a multiple of M, and all but B and T are at least 1"
        )


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _blocks(
    cu_seqlens_cpu: Tensor, tokens_cpu: Tensor | None, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the query rows, the range of keys and the mask `[queries, keys]` (True: hidden) of each block.

    A block has at most `QUERIES` rows, and their tokens are consecutive.
    """
    starts = cu_seqlens_cpu[:-1].repeat_interleave(cu_seqlens_cpu.diff())
    tokens = torch.arange(len(starts)) if tokens_cpu is None else tokens_cpu
    breaks = (tokens.diff() != 1).nonzero().flatten() + 1
    runs = [0, *breaks.tolist(), len(tokens)]
    for begin, end in zip(runs, runs[1:], strict=False):
        for first in range(begin, end, QUERIES):
            rows = slice(first, min(first + QUERIES, end))
            query = tokens[rows, None]
            keys = slice(int(starts[query[0, 0]]), int(query[-1, 0]) + 1)
            key = torch.arange(keys.start, keys.stop)
            yield rows, keys, ((key > query) | (key < starts[query])).to(device)


def _heads_first(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Select rows of `[tokens, M, G, width]` and move the heads to the front: `[M, G, rows, width]`."""
    return x[rows].to(dtype).permute(1, 2, 0, 3)


def _fold(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten to `[tokens, M, G, width]`, with `G` query heads per key head (1 for `k` and `v`)."""
    return (
        q.flatten(0, 1).unflatten(1, (k.shape[2], -1)),
        k.flatten(0, 1).unsqueeze(2),
        v.flatten(0, 1).unsqueeze(2),
    )


@torch.library.custom_op("titan_gdn::document_attention", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens_cpu: Tensor, tokens_cpu: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the output `[B, L, N, V]` and the log-sum-exp of each query's scores `[B*L, M, G]`."""
    check_documents(cu_seqlens_cpu, k.shape[0] * k.shape[1])
    tokens = k.shape[0] * k.shape[1] if tokens_cpu is None else len(tokens_cpu)
    if q.shape[0] * q.shape[1] != tokens:
        raise ValueError(f"q {tuple(q.shape)} must be [B, L, N, H] for {tokens} tokens in all rows")
    dtype = _compute_dtype(q)
    q_TMGH, k_TM1H, v_TM1V = _fold(q, k, v)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(q_TMGH.shape[:3], dtype=dtype)
    out_TMGV = out.view(*q_TMGH.shape[:3], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        for rows, keys, hidden in _blocks(cu_seqlens_cpu, tokens_cpu, q.device):
            scores = _scores(q_TMGH, k_TM1H, rows, keys, hidden, scale, dtype)
            lse_MGr = scores.logsumexp(-1)
            values = _heads_first(v_TM1V, keys, dtype)
            out_MGrV = _matmul(scores.sub_(lse_MGr.unsqueeze(-1)).exp_(), values)
            out_TMGV[rows] = out_MGrV.permute(2, 0, 1, 3).to(out.dtype)
            lse[rows] = lse_MGr.permute(2, 0, 1)
    return out, lse


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """`[M, G, r, x] @ [M, 1, x, y]`, with the `G` heads as more rows so that `b` is not repeated."""
    return (a.flatten(1, 2) @ b.squeeze(1)).unflatten(1, a.shape[1:3])


def _scores(
    q_TMGH: Tensor, k_TM1H: Tensor, rows: slice, keys: slice, hidden: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    scores = _matmul(_heads_first(q_TMGH, rows, dtype), _heads_first(k_TM1H, keys, dtype).mT)
    return scores.mul_(scale).masked_fill_(hidden, -torch.inf)


@attention_forward.register_fake
def _(q, k, v, scale, cu_seqlens_cpu, tokens_cpu):  # noqa: ANN001, ANN202
    batch, length, heads, _ = q.shape
    lse = q.new_empty(batch * length, k.shape[2], heads // k.shape[2], dtype=_compute_dtype(q))
    return q.new_empty(batch, length, heads, v.shape[-1]), lse


@torch.library.custom_op("titan_gdn::document_attention_backward", mutates_args=())
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    cu_seqlens_cpu: Tensor,
    tokens_cpu: Tensor | None,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `q`, `k` and `v`."""
    dtype = _compute_dtype(q)
    q_TMGH, k_TM1H, v_TM1V = _fold(q, k, v)
    out_TMGV, d_out_TMGV = (x.flatten(0, 1).unflatten(1, (k.shape[2], -1)) for x in (out, d_out))
    dq_TMGH = torch.zeros_like(q_TMGH, memory_format=torch.contiguous_format)
    dk_TM1H, dv_TM1V = (torch.zeros_like(x, dtype=dtype) for x in (k_TM1H, v_TM1V))
    with torch.autocast(q.device.type, enabled=False):
        for rows, keys, hidden in _blocks(cu_seqlens_cpu, tokens_cpu, q.device):
            scores = _scores(q_TMGH, k_TM1H, rows, keys, hidden, scale, dtype)
            weights = scores.sub_(lse[rows].permute(1, 2, 0).unsqueeze(-1)).exp_()
            do = _heads_first(d_out_TMGV, rows, dtype)
            dv_TM1V[keys] += _sum_heads(weights, do)
            d_weights = _matmul(do, _heads_first(v_TM1V, keys, dtype).mT)
            mean = (do * _heads_first(out_TMGV, rows, dtype)).sum(-1, keepdim=True)
            d_scores = d_weights.sub_(mean).mul_(weights).mul_(scale)
            dq_TMGH[rows] = (
                _matmul(d_scores, _heads_first(k_TM1H, keys, dtype)).permute(2, 0, 1, 3).to(q.dtype)
            )
            dk_TM1H[keys] += _sum_heads(d_scores, _heads_first(q_TMGH, rows, dtype))
    return dq_TMGH.view_as(q), dk_TM1H.to(k.dtype).view_as(k), dv_TM1V.to(v.dtype).view_as(v)


def _sum_heads(a: Tensor, b: Tensor) -> Tensor:
    """`a^T b` summed over the heads of a group: `[M, G, r, x], [M, G, r, y] -> [x, M, 1, y]`."""
    return (a.flatten(1, 2).mT @ b.flatten(1, 2)).transpose(0, 1).unsqueeze(2)


@attention_backward.register_fake
def _(q, k, v, scale, cu_seqlens_cpu, tokens_cpu, out, lse, d_out):  # noqa: ANN001, ANN202
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    q, k, v, ctx.scale, cu_seqlens_cpu, tokens_cpu = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_seqlens_cpu, tokens_cpu, *output)


def _backward(ctx, d_out, _d_lse):  # noqa: ANN001, ANN202
    if d_out is None:
        return None, None, None, None, None, None
    q, k, v, cu_seqlens_cpu, tokens_cpu, out, lse = ctx.saved_tensors
    dq, dk, dv = attention_backward(q, k, v, ctx.scale, cu_seqlens_cpu, tokens_cpu, out, lse, d_out)
    return dq, dk, dv, None, None, None


attention_forward.register_autograd(_backward, setup_context=_setup_context)
