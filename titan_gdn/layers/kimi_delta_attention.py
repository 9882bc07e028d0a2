"""Kimi Delta Attention (arXiv 2510.26692). Shape suffixes as in `titan_gdn.layers.linear_attention`."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common import Linear

from titan_gdn.layers.initialization import ONES, linear
from titan_gdn.layers.linear_attention import Decay, LinearAttention, Widths
from titan_gdn.layers.local_tensor import apply
from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.ops import kda_gate
from titan_gdn.ops.rules import KIMI_DELTA_RULE

SAFE_BOUND = -5.0
"""The lowest `lower_bound` with which FLA's faster kernels work (`safe_gate`)."""

_LOWEST = -torch.finfo(torch.float32).max


class KimiDeltaAttention(LinearAttention):
    """The linear attention layer of Kimi Linear and GLM-5.3-Flash: a decay per key channel.

    Parameters, with `W = 2K + R*V` rows per group: `in_proj_qkv.weight` `[G*W, D]` (q, k, v0 .. v(R-1)),
    `in_proj_b.weight` `[G*R, D]`, `conv.weight` `[G, W, C]`, the low-rank decay gate `f_a.weight` `[r, D]`
    and `f_b.weight` `[G*R*K, r]`, the low-rank output gate `g_a.weight` `[r, D]` and `g_b.weight`
    `[G*R*V, r]`, `decay.A_log` `[G*R]` and `decay.dt_bias` `[G*R*K]`, `norm.weight` `[V]`, `out_proj.weight`
    `[D, G*R*V]`.

    The ranks do not exchange the full-width gates. Each rank computes the output gate for its own tokens. For
    the decay gate, the ranks exchange the low-rank product `f_a(x)`, and each rank expands it for its own
    heads.
    """

    title = "Kimi Delta Attention"
    rule = KIMI_DELTA_RULE
    per_head = (*LinearAttention.per_head, "in_proj_b", "f_b", "g_b")
    replicated = (*LinearAttention.replicated, "f_a", "g_a")
    exchanged = ("in_proj_qkv", "in_proj_b")
    low_rank = "f_a"
    full_precision = {"in_proj_b": "beta", "f_a": "decay", "f_b": "decay"}

    @dataclass(kw_only=True, slots=True)
    class Config(LinearAttention.Config):
        in_proj_b: Linear.Config
        f_a: Linear.Config
        f_b: Linear.Config
        g_a: Linear.Config
        g_b: Linear.Config
        lower_bound: float | None = None
        """Lower bound of the log decay, negative: -5 in GLM-5.3-Flash. None: unbounded."""

        def __post_init__(self) -> None:
            if self.lower_bound is not None and not _LOWEST < self.lower_bound < 0:
                raise ValueError(
                    f"lower_bound = {self.lower_bound}: expected a negative float32 number, the lower bound "
                    "of the log decay, or none"
                )

    @classmethod
    def configure(cls, widths: Widths, lower_bound: float | None = None) -> LinearAttention.Config:
        """Returns the configuration of a layer of these widths, initialized as Kimi Linear is.

        Args:
            widths: the sizes of the layer.
            lower_bound: see `Config.lower_bound`.

        Raises:
            ValueError: `lower_bound` is not a negative float32 number.
        """
        key_channels, value_channels = (
            widths.value_heads * width for width in (widths.key_dim, widths.value_dim)
        )
        return super().configure(
            widths,
            in_proj_b=linear(widths.dim, widths.value_heads),
            f_a=linear(widths.dim, widths.gate_rank),
            f_b=linear(widths.gate_rank, key_channels),
            g_a=linear(widths.dim, widths.gate_rank),
            g_b=linear(widths.gate_rank, value_channels),
            lower_bound=lower_bound,
            decay=Decay.Config(
                n_value_heads=widths.value_heads,
                channels=widths.key_dim,
                param_init={"A_log": _initialize_rate, "dt_bias": _initialize_dt_bias},
            ),
            norm=GatedRMSNorm.Config(
                dim=widths.value_dim, eps=widths.norm_eps, gate="sigmoid", param_init=ONES
            ),
        )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lower_bound = config.lower_bound
        self.in_proj_b = config.in_proj_b.build()
        self.f_a = config.f_a.build()
        self.f_b = config.f_b.build()
        self.g_a = config.g_a.build()
        self.g_b = config.g_b.build()

    def output_gate(self, x_BLD: Tensor) -> Tensor:
        """Returns the low-rank projection `g_b(g_a(x))`, `[B, L, N * V]`."""
        return apply(self.g_b, apply(self.g_a, x_BLD, partial_grad=True))

    def gates(
        self,
        products: dict[str, Tensor],
        low_rank_1Tr: Tensor,
        A_log_N: Tensor,
        dt_bias_N: Tensor,
        heads: slice,
    ) -> tuple[Tensor, Tensor]:
        """Returns `g = kda_gate(f_b(low_rank))` `[1, T, N, K]` and `beta = sigmoid(b)` `[1, T, N]`."""
        K = self.key_head_dim
        f = apply(self.f_b, low_rank_1Tr, rows=slice(heads.start * K, heads.stop * K))
        g = kda_gate(f.unflatten(-1, (-1, K)), A_log_N, dt_bias_N.view(-1, K), self.lower_bound)
        return g, products["in_proj_b"].flatten(2).float().sigmoid()

    def run_rule(self, *inputs: Tensor, **kernel: Any) -> tuple[Tensor, Tensor | None]:
        """Runs the rule, with FLA's faster kernels if `lower_bound` is at least `SAFE_BOUND`."""
        safe_gate = self.lower_bound is not None and self.lower_bound >= SAFE_BOUND
        return self.rule.run(*inputs, safe_gate=safe_gate, **kernel)


@torch.no_grad()
def _initialize_rate(A_log: Tensor) -> None:
    """Draws `A` uniformly from (1, 16)."""
    A_log.uniform_(1, 16).log_()


@torch.no_grad()
def _initialize_dt_bias(dt_bias: Tensor) -> None:
    """Draws steps log-uniformly from (0.001, 0.1) and stores their inverse softplus."""
    dt = dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
    dt_bias.add_(torch.log(-torch.expm1(-dt)))
