"""Gated DeltaNet (arXiv 2412.06464). Shape suffixes as in `titan_gdn.layers.linear_attention`."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.common import Linear

from titan_gdn.layers.linear_attention import LinearAttention
from titan_gdn.layers.local_tensor import apply
from titan_gdn.ops import chunk_gated_delta_rule
from titan_gdn.parallel.traffic import LayerShape


class GatedDeltaNet(LinearAttention):
    """The linear attention layer of Qwen3-Next.

    Parameters, with `W = 2K + R*V` rows a group: `in_proj_qkv.weight` `[G*W, D]` (q, k, v0 .. v(R-1)),
    `in_proj_z.weight` `[G*R*V, D]`, `in_proj_ba.weight` `[G*2R, D]` (b0 .., a0 ..), `conv.weight`
    `[G, W, C]`, `decay.A_log` and `decay.dt_bias` `[G*R]`, `norm.weight` `[V]`, `out_proj.weight`
    `[D, G*R*V]`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LinearAttention.Config):
        in_proj_z: Linear.Config
        in_proj_ba: Linear.Config

        def shape(self) -> LayerShape:
            """What the traffic model needs to know."""
            return self.shape_of_heads(
                exchanged=self.in_proj_qkv.out_features + self.in_proj_ba.out_features,
                output=self.in_proj_z.out_features,
                per_channel=False,
            )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.in_proj_z = config.in_proj_z.build()
        self.in_proj_ba = config.in_proj_ba.build()

    def crossing(self) -> tuple[tuple[nn.Module, int], ...]:
        """q, k and v, then the gates: b, a."""
        return (self.in_proj_qkv, self.conv.weight.shape[1]), (self.in_proj_ba, 2 * self.heads_a_group)

    def output_gate(self, x_BLD: Tensor) -> Tensor:
        """`z`, one linear of the hidden states."""
        return apply(self.in_proj_z, x_BLD)

    def gates(
        self, gates_1TgE: Tensor, narrow_1Tr: None, rate_N: Tensor, dt_bias_N: Tensor, heads: slice
    ) -> tuple[Tensor, Tensor]:
        """`g = rate * softplus(a + dt_bias)` and `beta = sigmoid(b)`, both `[1, T, N]`."""
        b_1TN, a_1TN = (x.flatten(2) for x in gates_1TgE.float().chunk(2, -1))
        return rate_N * F.softplus(a_1TN + dt_bias_N), b_1TN.sigmoid()

    rule = staticmethod(chunk_gated_delta_rule)
