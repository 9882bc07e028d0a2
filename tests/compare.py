"""Relative errors of an operator, forward and backward, against `tests/reference.py` in float64."""

import torch

from tests import reference
from tests.reference import relative_error
from titan_gdn.ops import causal_conv1d, chunk_gated_delta_rule


def rule_inputs(T, R=1, H=2, K=16, V=16, batch=1, states=0, dtype=torch.float32, device="cpu"):
    """Random q, k, v in `dtype`, g, beta and, if wanted, initial states in float32."""
    torch.manual_seed(T + 10 * R)
    q, k = (torch.randn(batch, T, H, K).to(dtype) for _ in range(2))
    v = torch.randn(batch, T, H * R, V).to(dtype)
    g = torch.empty(batch, T, H * R).uniform_(-1, 0)
    beta = torch.rand(batch, T, H * R)
    inputs = [q, k, v, g, beta] + [torch.randn(states, H * R, K, V)] * (states > 0)
    return [x.to(device) for x in inputs]


def rule_errors(inputs, backend, cu_seqlens=None, l2norm=True):
    """Errors of output, final state and the gradient of each input."""
    ours = [x.detach().requires_grad_() for x in inputs]
    theirs = [x.detach().cpu().double().requires_grad_() for x in inputs]
    out, state = chunk_gated_delta_rule(
        *ours[:5],
        initial_state=ours[5] if len(ours) > 5 else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(ours[0].device),
        cu_seqlens_cpu=cu_seqlens,
        backend=backend,
    )
    expected = reference.gated_delta_rule(
        *theirs[:5],
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
    out = causal_conv1d(*ours, cu_seqlens=offsets, cu_seqlens_cpu=cu_seqlens, backend=backend)
    expected = reference.causal_conv1d(*theirs, cu_seqlens)
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
