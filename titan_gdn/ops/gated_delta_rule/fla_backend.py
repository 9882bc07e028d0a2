"""The gated delta rule by flash-linear-attention's Triton kernels, as operators of PyTorch.

FLA's public function stops `torch.compile`. Wrapped here is what its autograd function calls: the forward
and the backward of `fla.ops.gated_delta_rule.chunk`. The normalised queries and keys, which that function
stores, are computed again in the backward.
"""

import torch
from torch import Tensor

from titan_gdn.ops.fla_documents import FLA_CHUNK, fla_documents


@torch.library.custom_op("titan_gdn::fla_chunk_gated_delta_rule", mutates_args=())
def fla_rule_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, final state and, for the backward, the decay summed inside chunks and `(I + A)^-1`."""
    # `import fla` takes 6 to 19 s: only those who run a kernel pay for it.
    from fla.modules.norm.l2norm import l2norm_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    q, k, v, g, beta, initial_state = _contiguous(q, k, v, g, beta, initial_state)
    with torch.cuda.device_of(q):
        if l2norm:
            (q, _), (k, _) = l2norm_fwd(q), l2norm_fwd(k)
        g_sum, out, inverse, final_state, *_ = chunk_gated_delta_rule_fwd(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state=True,
            **fla_documents(cu_seqlens, cu_seqlens_cpu),
        )
    return out.to(q.dtype), final_state, g_sum, inverse


@fla_rule_forward.register_fake
def _(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, l2norm):  # noqa: ANN001, ANN202
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    heads, width = v.shape[2:]
    return (
        q.new_empty(v.shape),
        q.new_empty((documents, heads, q.shape[3], width), dtype=torch.float32),
        q.new_empty(g.shape, dtype=torch.float32),
        k.new_empty((*v.shape[:3], FLA_CHUNK)),
    )


@torch.library.custom_op("titan_gdn::fla_chunk_gated_delta_rule_backward", mutates_args=())
def fla_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    l2norm: bool,
    g_sum: Tensor,
    inverse: Tensor,
    d_out: Tensor | None,
    d_final: Tensor | None,
) -> list[Tensor]:
    """Gradients of `q, k, v, g, beta` and, where there is one, of the initial state."""
    from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    inputs = [x for x in (q, k, v, g, beta, initial_state) if x is not None]
    d_out = q.new_zeros(v.shape) if d_out is None else d_out
    q, k, v, beta, initial_state, d_out, d_final = _contiguous(q, k, v, beta, initial_state, d_out, d_final)
    with torch.cuda.device_of(q):
        if l2norm:
            (q, q_rstd), (k, k_rstd) = l2norm_fwd(q), l2norm_fwd(k)
        dq, dk, dv, dbeta, dg, d_initial, *_ = chunk_gated_delta_rule_bwd(
            q,
            k,
            v,
            g_sum,
            beta,
            inverse,
            scale,
            initial_state,
            d_out,
            d_final,
            **fla_documents(cu_seqlens, cu_seqlens_cpu),
        )
        if l2norm:
            dq, dk = l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk)
    grads = (dq, dk, dv, dg, dbeta, d_initial)
    return [grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=False)]


@fla_rule_backward.register_fake
def _(q, k, v, g, beta, scale, initial_state, *_):  # noqa: ANN001, ANN002, ANN202
    return [x.new_empty(x.shape) for x in (q, k, v, g, beta, initial_state) if x is not None]


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """FLA's kernels read dense tensors alone."""
    return tuple(x if x is None else x.contiguous() for x in tensors)


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    q, k, v, g, beta, ctx.scale, initial_state, cu_seqlens, cu_seqlens_cpu, ctx.l2norm = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, *output[2:])


def _backward(ctx, d_out, d_final, *_):  # noqa: ANN001, ANN002, ANN202
    q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, g_sum, inverse = ctx.saved_tensors
    documents = (cu_seqlens, cu_seqlens_cpu)
    dq, dk, dv, dg, dbeta, *d_initial = fla_rule_backward(
        q, k, v, g, beta, ctx.scale, initial_state, *documents, ctx.l2norm, g_sum, inverse, d_out, d_final
    )
    return dq, dk, dv, dg, dbeta, None, d_initial[0] if d_initial else None, None, None, None


fla_rule_forward.register_autograd(_backward, setup_context=_setup_context)
