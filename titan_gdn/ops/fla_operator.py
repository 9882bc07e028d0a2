"""A rule by flash-linear-attention's Triton kernels as an operator of PyTorch, forward and backward.

FLA's public functions stop `torch.compile`. Wrapped here is what their autograd functions call. Normalised
queries and keys and the decay summed inside chunks, which those functions store, are computed again in the
backward: kept are the inputs and, for each token and value head, a few rows of `FLA_CHUNK` numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import CustomOpDef

from titan_gdn.ops.fla_documents import FLA_CHUNK, fla_documents

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, bool l2norm"
)


def define(
    name: str, fla_forward: Callable, fla_backward: Callable, kept: int, flags: tuple[str, ...] = ()
) -> tuple[CustomOpDef, CustomOpDef]:
    """Register `titan_gdn::<name>` and `titan_gdn::<name>_backward`.

    Arguments and results are those of `titan_gdn.ops.chunk_gated_delta_rule`, all of them given. Behind them
    come the rule's flags, and as further results what is kept for the backward.

    Args:
        name: of the forward operator.
        fla_forward: takes the arguments of FLA's function by name; returns output, final state and what is
            kept.
        fla_backward: takes what was kept, then the arguments of FLA's function by name, `g` already summed
            inside chunks; returns gradients of `q, k, v, beta, g`, of the initial state, and what else FLA
            has.
        kept: how many results are kept, each `[B, T, HV, FLA_CHUNK]` in the dtype of `k`.
        flags: names of FLA's boolean arguments that this rule alone has.
    """
    arguments = ", ".join([_INPUTS, *(f"bool {flag}" for flag in flags)])
    results = ", ".join(["Tensor"] * (2 + kept))

    @torch.library.custom_op(f"titan_gdn::{name}", mutates_args=(), schema=f"({arguments}) -> ({results})")
    def forward(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, l2norm, *values):  # noqa: ANN001, ANN002, ANN202
        # `import fla` takes 6 to 19 s: only those who run a kernel pay for it.
        from fla.modules.norm.l2norm import l2norm_fwd

        q, k, v, g, beta, initial_state = _contiguous(q, k, v, g, beta, initial_state)
        with torch.cuda.device_of(q):
            if l2norm:
                (q, _), (k, _) = l2norm_fwd(q), l2norm_fwd(k)
            out, *others = fla_forward(
                q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state,
                output_final_state=True,
                **fla_documents(q.shape[1], cu_seqlens, cu_seqlens_cpu),
                **dict(zip(flags, values, strict=True)),
            )  # fmt: skip
        return out.to(q.dtype), *others

    @forward.register_fake
    def _(q, k, v, g, beta, scale, initial_state, cu_seqlens, *_):  # noqa: ANN001, ANN002, ANN202
        documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        heads, width = v.shape[2:]
        final_state = q.new_empty((documents, heads, q.shape[3], width), dtype=torch.float32)
        rows = (*v.shape[:3], FLA_CHUNK)
        return q.new_empty(v.shape), final_state, *(k.new_empty(rows) for _ in range(kept))

    @torch.library.custom_op(
        f"titan_gdn::{name}_backward",
        mutates_args=(),
        schema=f"({arguments}, Tensor[] saved, Tensor? d_out, Tensor? d_final) -> Tensor[]",
    )
    def backward(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, l2norm, *rest):  # noqa: ANN001, ANN002, ANN202
        from fla.modules.norm.l2norm import l2norm_bwd, l2norm_fwd
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        *values, saved, d_out, d_final = rest
        with_gradient = [x for x in (q, k, v, g, beta, initial_state) if x is not None]
        d_out = q.new_zeros(v.shape) if d_out is None else d_out
        q, k, v, g, beta, initial_state = _contiguous(q, k, v, g, beta, initial_state)
        d_out, d_final = _contiguous(d_out, d_final)
        with torch.cuda.device_of(q):
            if l2norm:
                (q, q_rstd), (k, k_rstd) = l2norm_fwd(q), l2norm_fwd(k)
            documents = fla_documents(q.shape[1], cu_seqlens, cu_seqlens_cpu)
            g = chunk_local_cumsum(g, FLA_CHUNK, scale=RCP_LN2, **documents)
            dq, dk, dv, dbeta, dg, d_initial, *_ = fla_backward(
                *saved,
                q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state,
                do=d_out, dht=d_final,
                **documents,
                **dict(zip(flags, values, strict=True)),
            )  # fmt: skip
            if l2norm:
                dq, dk = l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk)
        grads = (dq, dk, dv, dg, dbeta, d_initial)
        return [grad.to(x.dtype) for grad, x in zip(grads, with_gradient, strict=False)]

    @backward.register_fake
    def _(q, k, v, g, beta, scale, initial_state, *_):  # noqa: ANN001, ANN002, ANN202
        return [x.new_empty(x.shape) for x in (q, k, v, g, beta, initial_state) if x is not None]

    def setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
        q, k, v, g, beta, ctx.scale, initial_state, cu_seqlens, cu_seqlens_cpu, *ctx.flags = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, *output[2:])

    def of_context(ctx, d_out, d_final, *_):  # noqa: ANN001, ANN002, ANN202
        q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, *saved = ctx.saved_tensors
        documents = (cu_seqlens, cu_seqlens_cpu)
        dq, dk, dv, dg, dbeta, *d_initial = backward(
            q, k, v, g, beta, ctx.scale, initial_state, *documents, *ctx.flags, saved, d_out, d_final
        )
        d_initial = d_initial[0] if d_initial else None
        return dq, dk, dv, dg, dbeta, None, d_initial, None, None, *(None for _ in ctx.flags)

    forward.register_autograd(of_context, setup_context=setup_context)
    return forward, backward


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """FLA's kernels read dense tensors alone."""
    return tuple(x if x is None else x.contiguous() for x in tensors)
