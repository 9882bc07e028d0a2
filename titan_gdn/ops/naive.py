"""The operators' definitions, computed token by token: the tests compare the fast operators with them.

These functions share no code with the operators, and their gradients come from autograd. The tests run them
in float64.
"""

import torch
from torch import Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: decay the state, write what `k` does not recall of `v` yet, and read with `q`.

    Gated Delta Networks (arXiv 2412.06464), equation 10, for `g` `[B, T, HV]`; Kimi Delta Attention
    (arXiv 2510.26692), equation 1, for `g` `[B, T, HV, K]`. Arguments and results are those of
    `titan_gdn.ops.chunk_gated_delta_rule`; `l2norm` stands for `use_qk_l2norm_in_kernel`.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    factor = K**-0.5 if scale is None else scale
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    bounds = [
        (b, s, e)
        for b in range(B)
        for s, e in ([(0, T)] if cu_seqlens is None else zip(cu_seqlens, cu_seqlens[1:], strict=False))
    ]
    out, states = torch.zeros_like(v), []
    rows = []
    for n, (b, start, end) in enumerate(bounds):
        S = v.new_zeros(HV, K, V) if initial_state is None else initial_state[n]
        for t in range(int(start), int(end)):
            S = S * g[b, t].exp().view(HV, -1, 1)
            recalled = torch.einsum("hk,hkv->hv", k[b, t], S)
            S = S + torch.einsum("hk,hv->hkv", k[b, t], beta[b, t, :, None] * (v[b, t] - recalled))
            rows.append(torch.einsum("hk,hkv->hv", q[b, t] * factor, S))
        states.append(S)
    out = torch.stack(rows).view(v.shape)
    return out, torch.stack(states)


def causal_conv1d(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The short convolution and `silu`, one token at a time. See `titan_gdn.ops.causal_conv1d`."""
    B, T, _ = x.shape
    C = weight.shape[1]
    starts = torch.zeros(T, dtype=torch.long)
    if cu_seqlens is not None:
        for s, e in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
            starts[s:e] = s
    rows = []
    for t in range(T):
        y = torch.zeros_like(x[:, t])
        for j in range(C):
            if t - j >= starts[t]:
                y = y + weight[:, C - 1 - j] * x[:, t - j]
        rows.append(y * y.sigmoid())
    return torch.stack(rows, 1)


def document_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor) -> Tensor:
    """Softmax attention with a dense mask over the flattened sequence.

    See `titan_gdn.ops.document_attention`.
    """
    B, T, N, _ = q.shape
    q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(N // x.shape[0], 0) for x in (k, v))
    document = torch.bucketize(torch.arange(B * T), cu_seqlens[1:], right=True)
    allowed = (document[:, None] == document) & torch.ones(B * T, B * T, dtype=torch.bool).tril()
    weights = (scale * q @ k.mT).masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).unflatten(0, (B, T))
