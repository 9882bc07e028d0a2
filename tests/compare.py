"""Relative errors of an operator, forward and backward, against `titan_gdn.ops.naive` in float64."""

import math

import torch

from titan_gdn import ops
from titan_gdn.ops import naive

RULES = ("chunk_gated_delta_rule", "chunk_kda")


def rule_inputs(
    T,
    R=1,
    H=2,
    K=16,
    V=16,
    batch=1,
    states=0,
    decay=(-1.0, 0.0),
    rule="chunk_gated_delta_rule",
    dtype=torch.float32,
    device="cpu",
):
    """Return random q, k, v in `dtype`, and g, beta and initial states (if `states`) at least in float32."""
    torch.manual_seed(T + 10 * R)
    lead, exact = (batch, T), torch.promote_types(dtype, torch.float32)
    q, k, v = (torch.randn(*lead, *shape).to(dtype) for shape in ((H, K), (H, K), (H * R, V)))
    g = torch.empty(*lead, H * R, *((K,) if rule == "chunk_kda" else ()), dtype=exact).uniform_(*decay)
    beta = torch.rand(*lead, H * R, dtype=exact)
    inputs = [q, k, v, g, beta] + [torch.randn(states, H * R, K, V, dtype=exact)] * (states > 0)
    return [x.to(device) for x in inputs]


def rule_errors(inputs, backend="torch", cu_seqlens=None, l2norm=True, scale=None, **flags):
    """Return the errors of the output, the final state and the gradient of each input.

    The shape of `g` selects the rule, and `flags` are arguments of that rule only.
    """
    ours = [x.detach().requires_grad_() for x in inputs]
    theirs = [x.detach().cpu().double().requires_grad_() for x in inputs]
    rule = ops.chunk_gated_delta_rule if inputs[3].ndim == 3 else ops.chunk_kda
    out, state = rule(
        *ours[:5],
        scale=scale,
        initial_state=ours[5] if len(ours) > 5 else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(ours[0].device),
        cu_seqlens_cpu=cu_seqlens,
        backend=backend,
        **flags,
    )
    expected = naive.delta_rule(
        *theirs[:5],
        scale=scale,
        initial_state=theirs[5] if len(theirs) > 5 else None,
        l2norm=l2norm,
        cu_seqlens=cu_seqlens,
    )
    return _errors(("out", "final"), (out, state), expected, dict(zip(_RULE, ours, strict=False)), theirs)


def conv_errors(x, weight, backend, cu_seqlens=None):
    """Errors of the output and of both gradients."""
    ours = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    theirs = [x.detach().cpu().double().requires_grad_() for x in ours]
    offsets = None if cu_seqlens is None else cu_seqlens.to(x.device)
    out = ops.causal_conv1d(*ours, cu_seqlens=offsets, cu_seqlens_cpu=cu_seqlens, backend=backend)
    expected = naive.causal_conv1d(*theirs, cu_seqlens)
    return _errors(("out",), (out,), (expected,), {"dx": ours[0], "dweight": ours[1]}, theirs)


_RULE = ("dq", "dk", "dv", "dg", "dbeta", "dstate")


def _errors(names, outputs, expected, ours, theirs):
    assert outputs[0].dtype == next(iter(ours.values())).dtype
    directions = [torch.randn_like(x).to(y.dtype) for x, y in zip(expected, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(ours.values()), [d.to(outputs[0].device) for d in directions])
    grads_ref = torch.autograd.grad(expected, theirs, [d.double() for d in directions])
    assert [grad.dtype for grad in grads] == [x.dtype for x in ours.values()]
    pairs = zip((*names, *ours), (*outputs, *grads), (*expected, *grads_ref), strict=True)
    return {name: relative_error(a.cpu(), b) for name, a, b in pairs}


def relative_error(a, b):
    """Return the norm of `a - b` over the norm of `b`. NaN becomes infinity: it must not pass `error < x`."""
    error = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
    return error if math.isfinite(error) else math.inf
