"""Gated DeltaNet (arXiv 2412.06464). Shape suffixes as in `titan_gdn.layers.linear_attention`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.models.common import Linear

from titan_gdn.layers.initialization import ONES, linear
from titan_gdn.layers.linear_attention import Decay, LinearAttention, Widths
from titan_gdn.layers.local_tensor import apply
from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.ops import gdn_gate
from titan_gdn.ops.rules import GATED_DELTA_RULE


class GatedDeltaNet(LinearAttention):
    """The linear attention layer of Qwen3-Next.

    Parameters, with `W = 2K + R*V` rows per group: `in_proj_qkv.weight` `[G*W, D]` (q, k, v0 .. v(R-1)),
    `in_proj_z.weight` `[G*R*V, D]`, `in_proj_ba.weight` `[G*2R, D]` (b0 .., a0 ..), `conv.weight`
    `[G, W, C]`, `decay.A_log` and `decay.dt_bias` `[G*R]`, `norm.weight` `[V]`, `out_proj.weight`
    `[D, G*R*V]`.
    """

    title = "Gated DeltaNet"
    rule = GATED_DELTA_RULE
    per_head = (*LinearAttention.per_head, "in_proj_z", "in_proj_ba")
    exchanged = ("in_proj_qkv", "in_proj_ba")
    full_precision = {"in_proj_ba": "decay and beta"}

    @dataclass(kw_only=True, slots=True)
    class Config(LinearAttention.Config):
        in_proj_z: Linear.Config
        in_proj_ba: Linear.Config

    @classmethod
    def configure(cls, widths: Widths) -> LinearAttention.Config:
        """Returns the configuration of a layer of these widths, initialized as transformers' `Qwen3Next`."""
        return super().configure(
            widths,
            in_proj_z=linear(widths.dim, widths.value_heads * widths.value_dim),
            in_proj_ba=linear(widths.dim, 2 * widths.value_heads),
            decay=Decay.Config(
                n_value_heads=widths.value_heads,
                param_init={"A_log": _initialize_rate, "dt_bias": nn.init.ones_},
            ),
            norm=GatedRMSNorm.Config(dim=widths.value_dim, eps=widths.norm_eps, param_init=ONES),
        )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.in_proj_z = config.in_proj_z.build()
        self.in_proj_ba = config.in_proj_ba.build()

    def output_gate(self, x_BLD: Tensor) -> Tensor:
        """Returns `z`, a linear projection of the hidden states, `[B, L, N * V]`."""
        return apply(self.in_proj_z, x_BLD)

    def gates(
        self,
        products: dict[str, Tensor],
        low_rank_1Tr: None,
        A_log_N: Tensor,
        dt_bias_N: Tensor,
        heads: slice,
    ) -> tuple[Tensor, Tensor]:
        """Returns `g = gdn_gate(a)` and `beta = sigmoid(b)`, both `[1, T, N]` in float32."""
        b_1TN, a_1TN = (x.flatten(2) for x in products["in_proj_ba"].float().chunk(2, -1))
        return gdn_gate(a_1TN, A_log_N, dt_bias_N), b_1TN.sigmoid()


@torch.no_grad()
def _initialize_rate(A_log: Tensor) -> None:
    """Draws `A` uniformly from (0.01, 16). The logarithm of 0 is not finite (transformers #47944)."""
    A_log.uniform_(0.01, 16).log_()
