"""What the operators mean, token by token, in float64. Independent of the code under test."""

import math

import torch


def delta_rule(q, k, v, g, beta, scale=None, initial_state=None, l2norm=False, cu_seqlens=None):
    """Decay, forget what `k` recalls, write, read, token by token.

    `g` `[B, T, HV]`: Gated Delta Networks (arXiv 2412.06464), equation 10. `g` `[B, T, HV, K]`: Kimi Delta
    Attention (arXiv 2510.26692), equation 1.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
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
            rows.append(torch.einsum("hk,hkv->hv", q[b, t] * scale, S))
        states.append(S)
    out = torch.stack(rows).view(v.shape)
    return out, torch.stack(states)


def causal_conv1d(x, weight, cu_seqlens=None):
    """One token, one channel sum at a time."""
    B, T, _ = x.shape
    C = weight.shape[1]
    starts = torch.zeros(T, dtype=torch.long)
    if cu_seqlens is not None:
        for s, e in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
            starts[s:e] = s
    rows = []
    for t in range(T):
        y = sum(weight[:, C - 1 - j] * x[:, t - j] for j in range(C) if t - j >= starts[t])
        rows.append(y * y.sigmoid())
    return torch.stack(rows, 1)


def document_attention(q, k, v, scale, cu_seqlens):
    """Softmax over the whole folded sequence with a dense mask."""
    B, T, N, _ = q.shape
    q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(N // x.shape[0], 0) for x in (k, v))
    document = torch.bucketize(torch.arange(B * T), cu_seqlens[1:], right=True)
    allowed = (document[:, None] == document) & torch.ones(B * T, B * T, dtype=torch.bool).tril()
    weights = (scale * q @ k.mT).masked_fill(~allowed, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).unflatten(0, (B, T))


def relative_error(a, b):
    """Norm of the difference over the norm; infinite where it is no number, which compares as no error."""
    error = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
    return error if math.isfinite(error) else math.inf
