"""The decay gates, which turn the output of a projection into a log decay.

A rate `exp(A_log)`, a softplus and their product can each leave the range of float32 although their inputs do
not, and infinity times 0 is NaN, in the backward too. So the gates limit what they compute. The limits do not
change a bit of what lies inside them, and values and gradients are finite for all finite inputs.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_gdn.ops.arguments import check_tensors

MAX_LOG_RATE = 60.0
"""The largest logarithm of a rate."""

STRONGEST = -1e16
"""The strongest log decay. It is weaker than `-exp(MAX_LOG_RATE) * softplus(-20)`, see `_unbounded`."""

LARGEST = 1e30
"""The largest argument of a gate: sums of many such numbers are finite."""


def gdn_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """Compute the log decay per head `-exp(A_log) * softplus(x + dt_bias)` of Gated DeltaNet.

    Gated Delta Networks (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060).

    Args:
        x: `[..., HV]` output of the gate's projection.
        A_log: `[HV]` float32.
        dt_bias: `[HV]` float32, None for 0.

    Returns:
        `[..., HV]` float32, at most 0 and at least -1e16, where all decays are 0 and so are the gradients.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check(x, A_log, dt_bias, "[..., HV]")
    return _unbounded(x, A_log, dt_bias)


def kda_gate(
    x: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Compute the log decay per key channel of Kimi Delta Attention.

    `-exp(A_log) * softplus(x + dt_bias)` (Kimi Linear, arXiv 2510.26692), or with a lower bound
    `lower_bound * sigmoid(exp(A_log) * (x + dt_bias))` (GLM-5.3-Flash, Kimi K3). The arguments are those of
    `fla.ops.kda.gate.fused_kda_gate`, which calls `x` `g`.

    Args:
        x: `[..., HV, K]` output of the gate's projection.
        A_log: `[HV]` float32.
        dt_bias: `[HV, K]` or `[HV * K]` float32, None for 0.
        lower_bound: the strongest possible log decay, below 0; None for no bound.

    Returns:
        `[..., HV, K]` float32, at most 0 and at least `lower_bound`, or -1e16 without a bound: there all
        decays are 0, and so are the gradients.

    Raises:
        ValueError: `lower_bound` is not below 0, or the shapes do not fit.
    """
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound = {lower_bound} must be below 0")
    _check(x, A_log, dt_bias, "[..., HV, K]")
    A_log = A_log.unsqueeze(-1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(x.shape[-2:])
    if lower_bound is None:
        return _unbounded(x, A_log, dt_bias)
    argument = x.float() + (0 if dt_bias is None else dt_bias)
    with torch.no_grad():  # autograd would keep a copy for the gradients of a clamp
        argument.clamp_(-LARGEST, LARGEST)
    return lower_bound * (_rate(A_log) * argument).sigmoid()


def _check(x: Tensor, A_log: Tensor, dt_bias: Tensor | None, layout: str) -> None:
    """Check dtypes, devices and shapes. The dimensions of `layout` after the dots are those of `dt_bias`."""
    check_tensors(x=x, A_log=A_log, dt_bias=dt_bias)
    own = layout.count(",")
    heads = tuple(x.shape[-own:])
    fits = dt_bias is None or tuple(dt_bias.shape) in (heads, (math.prod(heads),))
    if x.ndim < own or tuple(A_log.shape) != heads[:1] or not fits:
        given = "None" if dt_bias is None else tuple(dt_bias.shape)
        raise ValueError(
            f"x {tuple(x.shape)} must be {layout}, A_log {tuple(A_log.shape)} must be [HV], and dt_bias "
            f"{given} must be {layout.replace('..., ', '')} or None"
        )


def _rate(A_log: Tensor) -> Tensor:
    """`exp(A_log)`, limited. `clamp_max` would take the gradient of the limit itself for 0."""
    return torch.where(A_log > MAX_LOG_RATE, MAX_LOG_RATE, A_log).exp()


def _unbounded(x: Tensor, A_log: Tensor, dt_bias: Tensor | None) -> Tensor:
    """Compute `-exp(A_log) * softplus(x + dt_bias)`.

    What `A_log` exceeds its limit by is added to the bias instead. If the sum is strongly negative, this is
    the same, because softplus is exp there. If not, the log decay is beyond `STRONGEST` either way.
    """
    excess = F.relu(A_log - MAX_LOG_RATE)
    bias = excess if dt_bias is None else dt_bias + excess
    return _Softplus.apply(x, -_rate(A_log), bias)


class _Softplus(torch.autograd.Function):
    """`rate * softplus(x + bias)`, limited.

    The gradients of `x` and of `A_log` are at most as large as the log decay, so that their sums over a long
    sequence are finite too. Autograd's own backward would pass over the tensors more often, and keep another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:  # noqa: D102
        argument = (x.float() + bias).clamp_(-LARGEST, LARGEST)
        softplus = F.softplus(argument)
        g = (rate * softplus).clamp_min_(STRONGEST)
        ctx.save_for_backward(rate, argument, softplus, g)
        ctx.dtype, ctx.bias = x.dtype, bias.shape
        return g

    @staticmethod
    def backward(ctx: Any, d_g: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: D102
        rate, argument, softplus, g = ctx.saved_tensors
        d_g = torch.ops.aten.threshold_backward(d_g, g, STRONGEST)  # 0 where the log decay is limited
        d_x = torch.ops.aten.softplus_backward(d_g * rate, argument, 1, 20)
        return d_x.to(ctx.dtype), (d_g * softplus).sum_to_size(rate.shape), d_x.sum_to_size(ctx.bias)
