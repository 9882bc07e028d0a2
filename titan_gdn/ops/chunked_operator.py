"""Defines a chunked rule as a PyTorch custom operator with a backward pass, on any device.

The backward pass keeps the inputs, the outputs and one state per chunk, and recomputes the rest.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.library import CustomOpDef

from titan_gdn.ops.chunk_plan import CHUNK, Block, ChunkPlan, max_chunks, plan_chunks
from titan_gdn.ops.chunked_rule import ChunkGradients, Chunks, chunks_backward, chunks_forward

L2NORM_EPS = 1e-6


class Decay(Protocol):
    """The part of a rule that depends on its kind of decay, for one block."""

    shares_keys: bool
    """Whether the value heads of a key head share its keys. If not, each has a copy of them, and `R` is 1."""

    chunks: Chunks

    def __init__(
        self, qk_NHDK: Tensor, v_NHRCV: Tensor, g_NHRC: Tensor, beta_NHRC: Tensor, scale: float, /
    ) -> None:
        """Compute `chunks`. With a decay per channel, `g` has a last dimension `K`."""

    def backward(self, gradients: ChunkGradients) -> tuple[Tensor, Tensor]:
        """Compute the gradients of `qk` and `g`."""
        ...


class _Loaded(NamedTuple):
    decay: Decay
    qk_NHDK: Tensor
    rstd_NHD1: Tensor | None  # the factor that normalizes q and k

    def d_qk(self, d_qk_NHDK: Tensor) -> Tensor:
        if self.rstd_NHD1 is None:
            return d_qk_NHDK
        along = (self.qk_NHDK * d_qk_NHDK).sum(-1, keepdim=True)
        return d_qk_NHDK.addcmul_(self.qk_NHDK, along, value=-1).mul_(self.rstd_NHD1)


class _Tokens(NamedTuple):
    """The operator's inputs with batch and sequence flattened, and the plan of their chunks."""

    q_THK: Tensor
    k_THK: Tensor
    v_THRV: Tensor
    g_THR: Tensor
    beta_THR: Tensor
    plan: ChunkPlan
    dtype: torch.dtype
    scale: float
    l2norm: bool

    def load(self, decay: type[Decay], block: Block) -> _Loaded:
        q, k, v, g, beta = (block.gather(x) for x in self[:5])
        copies = v.shape[2] // q.shape[2]
        if copies > 1:
            q, k = (x.repeat_interleave(copies, 2) for x in (q, k))
        qk = torch.cat([q.transpose(1, 2), k.transpose(1, 2)], 2).to(self.dtype)
        v, g, beta = (x.movedim(1, 3).to(self.dtype).contiguous() for x in (v, g, beta))
        rstd = None
        if self.l2norm:
            rstd = torch.linalg.vector_norm(qk, dim=-1, keepdim=True).square_().add_(L2NORM_EPS).rsqrt_()
            qk *= rstd
        return _Loaded(decay(qk, v, g, beta, self.scale), qk, rstd)

    def scatter(self, block: Block, gradients: list[Tensor], in_chunks: tuple[Tensor, ...]) -> None:
        """Write a block's gradients of `q, k` `[N, H, C, K]` and `v, g, beta` `[N, H, R, C, ...]`."""
        for gradient, x in zip(gradients[:2], in_chunks[:2], strict=True):
            x = x.transpose(1, 2)
            copies = x.shape[2] // gradient.shape[1]
            block.scatter(gradient, x.unflatten(2, (-1, copies)).sum(3) if copies > 1 else x)
        for gradient, x in zip(gradients[2:], in_chunks[2:], strict=True):
            block.scatter(gradient, x.movedim(3, 1))


def _fold(
    decay: type[Decay],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    cu_seqlens_cpu: Tensor | None,
    l2norm: bool,
) -> _Tokens:
    batch, length, _, _ = q.shape
    if cu_seqlens_cpu is None:
        cu_seqlens_cpu = torch.arange(batch + 1) * length
    v, g, beta = (x.flatten(0, 1).unflatten(1, (_heads(decay, q, v), -1)) for x in (v, g, beta))
    plan = plan_chunks(cu_seqlens_cpu, batch * length, v.shape[1] * v.shape[2], q.device)
    return _Tokens(q.flatten(0, 1), k.flatten(0, 1), v, g, beta, plan, _compute_dtype(q), scale, l2norm)


def _heads(decay: type[Decay], q: Tensor, v: Tensor) -> int:
    """The number of heads that have keys of their own."""
    return q.shape[2] if decay.shares_keys else v.shape[2]


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _documents(q: Tensor, cu_seqlens_cpu: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens_cpu is None else cu_seqlens_cpu.shape[0] - 1


def _new_states(decay: type[Decay], q: Tensor, v: Tensor, count: int) -> Tensor:
    """Zeros `[count, H, K, R, V]`, the layout of states inside the operator."""
    heads = _heads(decay, q, v)
    shape = (count, heads, q.shape[3], v.shape[2] // heads, v.shape[3])
    return torch.zeros(shape, dtype=_compute_dtype(q), device=q.device)


def _to_states(state: Tensor | None, tokens: _Tokens) -> Tensor:
    """Sort states `[documents, H*R, K, V]` (None: zeros) by the plan, as `[documents, H, K, R, V]`."""
    _, heads, R, V = tokens.v_THRV.shape
    if state is None:
        shape = (len(tokens.plan.documents), heads, tokens.q_THK.shape[2], R, V)
        return tokens.v_THRV.new_zeros(shape, dtype=tokens.dtype)
    state = state.to(tokens.dtype)[tokens.plan.documents]
    return state.unflatten(1, (heads, -1)).transpose(2, 3).contiguous()


def _from_states(states: Tensor, tokens: _Tokens) -> Tensor:
    out = torch.empty_like(states.transpose(2, 3).flatten(1, 2))
    out[tokens.plan.documents] = states.transpose(2, 3).flatten(1, 2)
    return out


def define(name: str, decay: type[Decay]) -> tuple[CustomOpDef, CustomOpDef]:
    """Register `titan_gdn::<name>` and `titan_gdn::<name>_backward`.

    They take the arguments of `titan_gdn.ops.chunk_gated_delta_rule`, none of them optional. The forward
    operator also returns the state that each chunk received, for the backward pass.
    """

    @torch.library.custom_op(f"titan_gdn::{name}", mutates_args=())
    def forward(
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
        tokens = _fold(decay, q, k, v, g, beta, scale, cu_seqlens_cpu, l2norm)
        documents = _documents(q, cu_seqlens_cpu)
        state = _to_states(initial_state, tokens)
        received = _new_states(decay, q, v, max_chunks(q.shape[0] * q.shape[1], documents))
        out = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
        with torch.autocast(q.device.type, enabled=False):
            for block in tokens.plan.blocks:
                chunks = tokens.load(decay, block).decay.chunks
                out_NHRCV = chunks_forward(chunks, block.pieces, state, received[block.chunks])
                block.scatter(out.view(tokens.v_THRV.shape), out_NHRCV.movedim(3, 1))
        return out, _from_states(state, tokens), received

    @forward.register_fake
    def _(q, k, v, g, beta, scale, initial_state, cu_seqlens_cpu, l2norm):  # noqa: ANN001, ANN202
        documents = _documents(q, cu_seqlens_cpu)
        out = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
        received = _new_states(decay, q, v, max_chunks(q.shape[0] * q.shape[1], documents))
        return out, received.new_empty((documents, v.shape[2], q.shape[3], v.shape[3])), received

    @torch.library.custom_op(f"titan_gdn::{name}_backward", mutates_args=())
    def backward(
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
        tokens = _fold(decay, q, k, v, g, beta, scale, cu_seqlens_cpu, l2norm)
        d_state = _to_states(d_final, tokens)
        d_out = torch.zeros_like(v, dtype=q.dtype) if d_out is None else d_out
        d_out_THRV = d_out.reshape(tokens.v_THRV.shape)
        dq, dk, dv, dg, dbeta = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta)
        )
        folded = [grad.view(x.shape) for grad, x in zip((dq, dk, dv, dg, dbeta), tokens[:5], strict=True)]
        with torch.autocast(q.device.type, enabled=False):
            for block in reversed(tokens.plan.blocks):
                loaded = tokens.load(decay, block)
                d_out_NHRCV = block.gather(d_out_THRV).movedim(1, 3)
                gradients = chunks_backward(
                    loaded.decay.chunks, block.pieces, received[block.chunks], d_state, d_out_NHRCV
                )
                d_qk, dg_NHRC = loaded.decay.backward(gradients)
                dq_NHCK, dk_NHCK = loaded.d_qk(d_qk).split(CHUNK, 2)
                in_chunks = (dq_NHCK, dk_NHCK, gradients.dv_NHRCV, dg_NHRC, gradients.dbeta_NHRC)
                tokens.scatter(block, folded, in_chunks)
        return dq, dk, dv, dg, dbeta, _from_states(d_state, tokens)

    @backward.register_fake
    def _(q, k, v, g, beta, scale, initial_state, cu_seqlens_cpu, l2norm, received, d_out, d_final):  # noqa: ANN001, ANN202
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta))
        state = (_documents(q, cu_seqlens_cpu), v.shape[2], q.shape[3], v.shape[3])
        return *grads, received.new_empty(state)

    def setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
        q, k, v, g, beta, ctx.scale, initial_state, cu_seqlens_cpu, ctx.l2norm = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens_cpu, output[2])

    def backward_of(ctx, d_out, d_final, _d_received):  # noqa: ANN001, ANN202
        q, k, v, g, beta, initial_state, cu_seqlens_cpu, received = ctx.saved_tensors
        *grads, d_initial = backward(
            q, k, v, g, beta, ctx.scale, initial_state, cu_seqlens_cpu, ctx.l2norm, received, d_out, d_final
        )
        d_initial = None if initial_state is None else d_initial.to(initial_state.dtype)
        return *grads, None, d_initial, None, None

    forward.register_autograd(backward_of, setup_context=setup_context)
    return forward, backward
