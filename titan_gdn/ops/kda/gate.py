"""The decay gate of Kimi Delta Attention."""

import torch.nn.functional as F
from torch import Tensor


def kda_gate(x: Tensor, rate: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Compute the log decay per key channel.

    `rate * softplus(x + dt_bias)` with `rate = -exp(A_log)` (Kimi Linear, arXiv 2510.26692). With a lower
    bound `lower_bound * sigmoid(-rate * (x + dt_bias))` (GLM-5.3-Flash, Kimi K3; FLA's `lower_bound`).

    Args:
        x: `[..., HV, K]` output of the gate's projection.
        rate: `[HV]` float32, `-exp(A_log)`.
        dt_bias: `[HV, K]` float32.
        lower_bound: the strongest possible log decay, below 0; None for no bound.

    Returns:
        `[..., HV, K]` float32, at most 0.

    Raises:
        ValueError: `lower_bound` is not below 0.
    """
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound = {lower_bound} must be below 0")
    biased, rate = x.float() + dt_bias, rate.unsqueeze(-1)
    if lower_bound is None:
        return rate * F.softplus(biased)
    return lower_bound * (-rate * biased).sigmoid()
