"""The gated delta rule in PyTorch, chunk by chunk, on whatever device the tensors are.

Gated Delta Networks (arXiv 2412.06464), section 3.3, in this form per value head and chunk, with
`Gc` the running sum of the log decay inside the chunk and `S` the state that the chunk receives:

    A_ij = beta_i (k_i . k_j) exp(Gc_i - Gc_j)   for j < i          P_ij = scale (q_i . k_j) exp(Gc_i - Gc_j)
    u    = (I + A)^-1 beta (v - exp(Gc) k S)                        o    = scale exp(Gc) q S + P u
    S    <- exp(Gc_C) S + k^T (exp(Gc_C - Gc) u)

Decays stand on the value side, so that the `R` value heads of a key head share its `q` and `k`: a
product of keys with `R` states is one product with `R * V` columns, and nothing is repeated.

Shape suffixes: N chunks, H key heads, R value heads a key head, C tokens of a chunk, K and V head widths.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_gdn.ops.chunks import CHUNK, ChunkPlan, Piece, max_chunks, plan_chunks

L2NORM_EPS = 1e-6


class _Block(NamedTuple):
    """The tensors of some chunks, and what their rows say to each other before any state is known."""

    q_NHCK: Tensor
    k_NHCK: Tensor
    v_NHCRV: Tensor
    beta_NHRC: Tensor
    since_start_NHRC: Tensor  # exp(Gc)
    until_end_NHRC: Tensor  # exp(Gc_C - Gc)
    decay_NHRCC: Tensor  # exp(Gc_i - Gc_j), zero above the diagonal
    keys_NHRCC: Tensor  # (k_i . k_j) exp(Gc_i - Gc_j) below the diagonal
    scores_NHRCC: Tensor  # P
    inverse_NHRCC: Tensor  # (I + A)^-1


def _rows(scale_NHRC: Tensor) -> Tensor:
    """Lay out a factor per row and value head for tensors `[N, H, C, R, V]`."""
    return scale_NHRC.mT.unsqueeze(-1)


def _gather(x: Tensor, plan: ChunkPlan, pieces: list[Piece], dtype: torch.dtype) -> Tensor:
    """Tokens `[tokens, ...]` to chunks `[N, C, ...]`, zero where a chunk is filled up."""
    chunks = slice(pieces[0].first, pieces[-1].last)
    index, valid = plan.tokens[chunks], plan.valid[chunks]
    out = x.index_select(0, index.flatten()).to(dtype)
    out = out.masked_fill_(~valid.view(-1, *[1] * (x.ndim - 1)), 0)
    return out.unflatten(0, (-1, CHUNK))


def _scatter(out: Tensor, x_NC: Tensor, plan: ChunkPlan, pieces: list[Piece]) -> None:
    """Write the valid rows of chunks `[N, C, ...]` to their tokens of `out` `[tokens, ...]`."""
    chunks = slice(pieces[0].first, pieces[-1].last)
    valid = plan.valid[chunks].flatten()
    out.index_copy_(0, plan.tokens[chunks].flatten()[valid], x_NC.flatten(0, 1)[valid].to(out.dtype))


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def _l2norm_backward(x: Tensor, dy: Tensor) -> Tensor:
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
    y = x * rstd
    return rstd * (dy - y * (y * dy).sum(-1, keepdim=True))


def _block(
    q_NHCK: Tensor, k_NHCK: Tensor, v_NHCRV: Tensor, g_NHRC: Tensor, beta_NHRC: Tensor, scale: float
) -> _Block:
    # Sums of a whole chunk may be large where their differences are not: float64 until those are formed.
    sum_NHRC = g_NHRC.cumsum(-1, dtype=torch.float64)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q_NHCK.device).triu(1)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = (
        (sum_NHRC.unsqueeze(-1) - sum_NHRC.unsqueeze(-2))
        .to(g_NHRC.dtype)
        .masked_fill_(above, -torch.inf)
        .exp_()
    )
    keys = (k_NHCK @ k_NHCK.mT).unsqueeze(2).mul(decay).tril_(-1)
    one = torch.eye(CHUNK, dtype=keys.dtype, device=keys.device)
    inverse = torch.linalg.solve_triangular(
        beta_NHRC.unsqueeze(-1) * keys, one.expand_as(keys), upper=False, unitriangular=True
    )
    return _Block(
        q_NHCK,
        k_NHCK,
        v_NHCRV,
        beta_NHRC,
        since_start_NHRC=sum_NHRC.to(g_NHRC.dtype).exp(),
        until_end_NHRC=(sum_NHRC[..., -1:] - sum_NHRC).to(g_NHRC.dtype).exp(),
        decay_NHRCC=decay,
        keys_NHRCC=keys,
        scores_NHRCC=(q_NHCK @ k_NHCK.mT).mul_(scale).unsqueeze(2) * decay,
        inverse_NHRCC=inverse,
    )


class _Tokens(NamedTuple):
    """The operator's inputs with batch and sequence folded, and the chunks they are cut into."""

    q_THK: Tensor
    k_THK: Tensor
    v_THRV: Tensor
    g_THR: Tensor
    beta_THR: Tensor
    plan: ChunkPlan
    dtype: torch.dtype
    l2norm: bool
    scale: float

    def gather(self, x: Tensor, pieces: list[Piece]) -> Tensor:
        return _gather(x, self.plan, pieces, self.dtype)

    def load(self, pieces: list[Piece]) -> tuple[_Block, Tensor, Tensor]:
        """The block of these pieces, and `q`, `k` as they came, `[N, H, C, K]`."""
        q, k = (self.gather(x, pieces).transpose(1, 2).contiguous() for x in (self.q_THK, self.k_THK))
        v = self.gather(self.v_THRV, pieces).transpose(1, 2).contiguous()
        g, beta = (
            self.gather(x, pieces).permute(0, 2, 3, 1).contiguous() for x in (self.g_THR, self.beta_THR)
        )
        normed = (_l2norm(q), _l2norm(k)) if self.l2norm else (q, k)
        return _block(*normed, v, g, beta, self.scale), q, k


def _fold(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    cu_seqlens_cpu: Tensor | None,
    l2norm: bool,
) -> _Tokens:
    batch, length, heads, _ = q.shape
    if cu_seqlens_cpu is None:
        cu_seqlens_cpu = torch.arange(batch + 1) * length
    group = (heads, v.shape[2] // heads)
    return _Tokens(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1).unflatten(1, group),
        g.flatten(0, 1).unflatten(1, group),
        beta.flatten(0, 1).unflatten(1, group),
        plan_chunks(cu_seqlens_cpu, q.device),
        _compute_dtype(q),
        l2norm,
        scale,
    )


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _to_states(state: Tensor, tokens: _Tokens) -> Tensor:
    """`[documents, R*H, K, V]` in the documents' order to `[documents, H, K, R, V]` in the plan's."""
    heads = tokens.q_THK.shape[1]
    return (
        state.to(tokens.dtype)[tokens.plan.documents].unflatten(1, (heads, -1)).transpose(2, 3).contiguous()
    )


def _from_states(states: Tensor, tokens: _Tokens) -> Tensor:
    out = torch.empty_like(states.transpose(2, 3).flatten(1, 2))
    out[tokens.plan.documents] = states.transpose(2, 3).flatten(1, 2)
    return out


def _new_states(q: Tensor, v: Tensor, count: int) -> Tensor:
    heads = q.shape[2]
    shape = (count, heads, q.shape[3], v.shape[2] // heads, v.shape[3])
    return torch.zeros(shape, dtype=_compute_dtype(q), device=q.device)


def _documents(q: Tensor, cu_seqlens_cpu: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens_cpu is None else cu_seqlens_cpu.shape[0] - 1


@torch.library.custom_op("titan_gdn::chunk_gated_delta_rule", mutates_args=())
def rule_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, final state, and the state that each chunk received (for the backward; see `max_chunks`)."""
    tokens = _fold(q, k, v, g, beta, scale, cu_seqlens_cpu, l2norm)
    documents = _documents(q, cu_seqlens_cpu)
    state = _new_states(q, v, documents) if initial_state is None else _to_states(initial_state, tokens)
    received = _new_states(q, v, max_chunks(q.shape[0] * q.shape[1], documents))
    out = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    out_THRV = out.view_as(tokens.v_THRV)
    for pieces in tokens.plan.blocks:
        block, _, _ = tokens.load(pieces)
        first, last = pieces[0].first, pieces[-1].last
        u_NHRCV = _run(block, pieces, state, received[first:last])
        out_NHCRV = (block.q_NHCK @ received[first:last].flatten(-2)).view_as(block.v_NHCRV)
        out_NHCRV = out_NHCRV * _rows(scale * block.since_start_NHRC) + (
            block.scores_NHRCC @ u_NHRCV
        ).transpose(2, 3)
        _scatter(out_THRV, out_NHCRV.transpose(1, 2), tokens.plan, pieces)
    return out, _from_states(state, tokens), received


def _run(block: _Block, pieces: list[Piece], state: Tensor, received: Tensor) -> Tensor:
    """Carry `state` through the block in place, note what each chunk received, return every chunk's `u`."""
    u_NHRCV = torch.empty_like(block.v_NHCRV.transpose(2, 3), memory_format=torch.contiguous_format)
    write_NHCRV = block.v_NHCRV * _rows(block.beta_NHRC)
    read_NHCR1 = _rows(block.beta_NHRC * block.since_start_NHRC)
    for piece in pieces:
        n = slice(piece.first - pieces[0].first, piece.last - pieces[0].first)
        running = state[piece.low : piece.high]
        received[n] = running
        recalled = (block.k_NHCK[n] @ running.flatten(-2)).view_as(write_NHCRV[n])
        x = torch.addcmul(write_NHCRV[n], recalled, read_NHCR1[n], value=-1)
        torch.matmul(block.inverse_NHRCC[n], x.transpose(2, 3), out=u_NHRCV[n])
        kept = (u_NHRCV[n] * block.until_end_NHRC[n].unsqueeze(-1)).transpose(2, 3).flatten(-2)
        running *= block.since_start_NHRC[n, :, None, :, -1:]
        running += (block.k_NHCK[n].mT @ kept).view_as(running)
    return u_NHRCV


@rule_forward.register_fake
def _(q, k, v, g, beta, scale, initial_state, cu_seqlens_cpu, l2norm):  # noqa: ANN001, ANN202
    documents = _documents(q, cu_seqlens_cpu)
    out = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
    received = _new_states(q, v, max_chunks(q.shape[0] * q.shape[1], documents))
    final = _new_states(q, v, documents).transpose(2, 3).flatten(1, 2).contiguous()
    return out, final, received


@torch.library.custom_op("titan_gdn::chunk_gated_delta_rule_backward", mutates_args=())
def rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    l2norm: bool,
    received: Tensor,
    d_out: Tensor | None,
    d_final: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `q, k, v, g, beta` and of the initial state."""
    tokens = _fold(q, k, v, g, beta, scale, cu_seqlens_cpu, l2norm)
    documents = _documents(q, cu_seqlens_cpu)
    d_state = _new_states(q, v, documents) if d_final is None else _to_states(d_final, tokens)
    d_out_THRV = (torch.zeros_like(v, dtype=q.dtype) if d_out is None else d_out).reshape(tokens.v_THRV.shape)
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    flat = (grads[0].flatten(0, 1), grads[1].flatten(0, 1), grads[2].view_as(tokens.v_THRV))
    flat += (grads[3].view_as(tokens.g_THR), grads[4].view_as(tokens.beta_THR))
    for pieces in reversed(tokens.plan.blocks):
        block, q_raw, k_raw = tokens.load(pieces)
        states = received[pieces[0].first : pieces[-1].last]
        d_out_NHCRV = tokens.gather(d_out_THRV, pieces).transpose(1, 2).contiguous()
        dq, dk, dv, dg, dbeta = _block_backward(block, pieces, states, d_state, d_out_NHCRV, scale)
        if l2norm:
            dq, dk = _l2norm_backward(q_raw, dq), _l2norm_backward(k_raw, dk)
        in_chunks = (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))
        in_chunks += (dg.permute(0, 3, 1, 2), dbeta.permute(0, 3, 1, 2))
        for grad, x in zip(flat, in_chunks, strict=True):
            _scatter(grad, x, tokens.plan, pieces)
    return *grads, _from_states(d_state, tokens)


def _block_backward(
    block: _Block, pieces: list[Piece], states: Tensor, d_state: Tensor, d_out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a block's `q, k, v, g, beta`; carries `d_state` through the block, backwards, in place."""
    q, k, v, beta = block.q_NHCK, block.k_NHCK, block.v_NHCRV, block.beta_NHRC
    S = states.flatten(-2)
    # The forward again, all chunks at once, from the states they received.
    recalled = (k @ S).view_as(v)
    error = torch.addcmul(v, recalled, _rows(block.since_start_NHRC), value=-1)
    u = block.inverse_NHRCC @ (error * _rows(beta)).transpose(2, 3)

    d_read = d_out * _rows(scale * block.since_start_NHRC)
    d_u = block.scores_NHRCC.mT @ d_out.transpose(2, 3)
    d_after = torch.empty_like(states)  # gradient of the state that each chunk hands on
    d_x = torch.empty_like(v)
    from_out = (q.mT @ d_read.flatten(-2)).view_as(states)
    read = _rows(beta * block.since_start_NHRC)
    for piece in reversed(pieces):
        n = slice(piece.first - pieces[0].first, piece.last - pieces[0].first)
        running = d_state[piece.low : piece.high]
        d_after[n] = running
        d_kept = (k[n] @ running.flatten(-2)).view_as(v[n]).transpose(2, 3)
        d_u[n] += d_kept * block.until_end_NHRC[n].unsqueeze(-1)
        d_x[n] = (block.inverse_NHRCC[n].mT @ d_u[n]).transpose(2, 3)
        running *= block.since_start_NHRC[n, :, None, :, -1:]
        running += from_out[n]
        running -= (k[n].mT @ (d_x[n] * read[n]).flatten(-2)).view_as(running)

    d_recalled = d_x * -read
    d_kept = (k @ d_after.flatten(-2)).view_as(v).transpose(2, 3)
    kept = (u * block.until_end_NHRC.unsqueeze(-1)).transpose(2, 3)
    d_A = -(d_x.transpose(2, 3) @ u.mT).tril_(-1)
    d_scores = d_out.transpose(2, 3) @ u.mT
    d_kk = (d_A * beta.unsqueeze(-1) * block.decay_NHRCC).sum(2)
    d_qk = (d_scores * block.decay_NHRCC).sum(2) * scale

    dq = d_read.flatten(-2) @ S.mT + d_qk @ k
    dk = d_recalled.flatten(-2) @ S.mT + kept.flatten(-2) @ d_after.flatten(-2).mT + d_qk.mT @ q
    dk += (d_kk + d_kk.mT) @ k
    dv = d_x * _rows(beta)
    d_keys = d_A * block.keys_NHRCC
    dbeta = (d_x * error).sum(-1).mT + d_keys.sum(-1)

    # Every decay is an exponential of running sums, so its gradient is its own value times the incoming one.
    # A pair adds to one sum and takes from another, and dg sums over sums: in float64 what cancels, cancels.
    pairs = d_scores * block.scores_NHRCC + d_keys * beta.unsqueeze(-1)
    d_until_end = ((d_kept * u).sum(-1) * block.until_end_NHRC).double()
    d_sum = pairs.sum(-1, dtype=torch.float64) - pairs.sum(-2, dtype=torch.float64) - d_until_end
    d_sum += ((d_read * (q @ S).view_as(v)) + d_recalled * recalled).sum(-1).mT
    d_decay = (states * d_after).sum((2, 4)) * block.since_start_NHRC[..., -1]
    d_sum[..., -1] += d_until_end.sum(-1) + d_decay
    dg = d_sum.flip(-1).cumsum(-1).flip(-1)
    return dq, dk, dv, dg.to(dbeta.dtype), dbeta


@rule_backward.register_fake
def _(q, k, v, g, beta, scale, initial_state, cu_seqlens_cpu, l2norm, received, d_out, d_final):  # noqa: ANN001, ANN202
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
    state = _new_states(q, v, _documents(q, cu_seqlens_cpu)).transpose(2, 3).flatten(1, 2).contiguous()
    return *grads, state


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    q, k, v, g, beta, ctx.scale, initial_state, cu_seqlens_cpu, ctx.l2norm = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens_cpu, output[2])


def _backward(ctx, d_out, d_final, _d_received):  # noqa: ANN001, ANN202
    q, k, v, g, beta, initial_state, cu_seqlens_cpu, received = ctx.saved_tensors
    *grads, d_initial = rule_backward(
        q, k, v, g, beta, ctx.scale, initial_state, cu_seqlens_cpu, ctx.l2norm, received, d_out, d_final
    )
    d_initial = None if initial_state is None else d_initial.to(initial_state.dtype)
    return *grads, None, d_initial, None, None


rule_forward.register_autograd(_backward, setup_context=_setup_context)
