"""Defines a rule with FLA's Triton kernels as a PyTorch custom operator with a backward pass.

FLA's public functions break the graph of `torch.compile`, so this file wraps the functions that their
autograd functions call. Unlike those, the backward pass recomputes the normalized queries and keys and the
cumulative decay. It keeps the inputs and, for each token and value head, a few rows of `FLA_CHUNK` numbers.
"""

from collections.abc import Callable
from typing import Any

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

    They take the arguments of `titan_gdn.ops.chunk_gated_delta_rule`, none of them optional, and then the
    flags of the rule. The forward operator also returns the tensors that it keeps for the backward pass.

    Args:
        name: name of the forward operator.
        fla_forward: takes the arguments of FLA's function by keyword and returns the output, the final state
            and the tensors to keep.
        fla_backward: takes the tensors that were kept, then the arguments of FLA's function by keyword, with
            `g` summed inside chunks. Returns the gradients of `q, k, v, beta, g` and of the initial state,
            and whatever else FLA returns.
        kept: the number of tensors to keep, each `[B, T, HV, FLA_CHUNK]` in the dtype of `k`.
        flags: names of the boolean arguments that only this rule's FLA function has.
    """
    arguments = ", ".join([_INPUTS, *(f"bool {flag}" for flag in flags)])
    results = ", ".join(["Tensor"] * (2 + kept))

    @torch.library.custom_op(f"titan_gdn::{name}", mutates_args=(), schema=f"({arguments}) -> ({results})")
    def forward(q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, l2norm, *values):  # noqa: ANN001, ANN002, ANN202
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        with torch.cuda.device_of(q):
            if l2norm:
                (q, _), (k, _) = _l2norm(q), _l2norm(k)
            out, *others = fla_forward(
                q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=_contiguous(initial_state),
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
        *values, saved, d_out, d_final = rest
        with_gradient = [x for x in (q, k, v, g, beta, initial_state) if x is not None]
        d_out = q.new_zeros(v.shape) if d_out is None else d_out.contiguous()
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        with torch.cuda.device_of(q):
            if l2norm:
                (q, q_rstd), (k, k_rstd) = _l2norm(q), _l2norm(k)
            documents = fla_documents(q.shape[1], cu_seqlens, cu_seqlens_cpu)
            g = _sums_in_chunks(g, documents)
            dq, dk, dv, dbeta, dg, d_initial, *_ = fla_backward(
                *saved,
                q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=_contiguous(initial_state),
                do=d_out, dht=_contiguous(d_final),
                **documents,
                **dict(zip(flags, values, strict=True)),
            )  # fmt: skip
            if l2norm:
                dq, dk = _l2norm_backward(q, q_rstd, dq), _l2norm_backward(k, k_rstd, dk)
        grads = (dq, dk, dv, dg, dbeta, d_initial)
        return [grad.to(x.dtype) for grad, x in zip(grads, with_gradient, strict=False)]

    @backward.register_fake
    def _(q, k, v, g, beta, scale, initial_state, *_):  # noqa: ANN001, ANN002, ANN202
        return [x.new_empty(x.shape) for x in (q, k, v, g, beta, initial_state) if x is not None]

    def setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
        q, k, v, g, beta, ctx.scale, initial_state, cu_seqlens, cu_seqlens_cpu, *ctx.flags = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, *output[2:])

    def backward_of(ctx, d_out, d_final, *_):  # noqa: ANN001, ANN002, ANN202
        q, k, v, g, beta, initial_state, cu_seqlens, cu_seqlens_cpu, *saved = ctx.saved_tensors
        documents = (cu_seqlens, cu_seqlens_cpu)
        dq, dk, dv, dg, dbeta, *d_initial = backward(
            q, k, v, g, beta, ctx.scale, initial_state, *documents, *ctx.flags, saved, d_out, d_final
        )
        d_initial = d_initial[0] if d_initial else None
        return dq, dk, dv, dg, dbeta, None, d_initial, None, None, *(None for _ in ctx.flags)

    forward.register_autograd(backward_of, setup_context=setup_context)
    return forward, backward


# Importing FLA takes 6 to 19 s, so these functions import it when they run. Its decorators hide the types of
# its functions from type checkers.


def _l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` normalized and the factor that normalized it."""
    from fla.modules.norm.l2norm import l2norm_fwd

    return l2norm_fwd(x)  # pyright: ignore[reportArgumentType, reportReturnType]


def _l2norm_backward(y: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """Compute the gradient of `x` from the results `y` and `rstd` of `_l2norm`."""
    from fla.modules.norm.l2norm import l2norm_bwd

    return l2norm_bwd(y, rstd, dy)  # pyright: ignore[reportCallIssue, reportReturnType]


def _sums_in_chunks(g: Tensor, documents: dict[str, Any]) -> Tensor:
    """Compute the cumulative sums of `g` inside chunks, in the base 2 that FLA's kernels use."""
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    return chunk_local_cumsum(g, FLA_CHUNK, scale=RCP_LN2, **documents)  # pyright: ignore[reportCallIssue]


def _contiguous(x: Tensor | None) -> Tensor | None:
    """FLA's kernels read contiguous tensors only."""
    return None if x is None else x.contiguous()
