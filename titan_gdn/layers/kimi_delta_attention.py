"""Kimi Delta Attention (arXiv 2510.26692). Shape suffixes as in `titan_gdn.layers.linear_attention`."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.models.common import Linear

from titan_gdn.layers.linear_attention import LinearAttention
from titan_gdn.layers.local_tensor import apply
from titan_gdn.ops import chunk_kda, kda_gate
from titan_gdn.parallel.traffic import LayerShape

SAFE_BOUND = -5.0
"""The strongest log decay that FLA's faster kernels take (`safe_gate`)."""


class KimiDeltaAttention(LinearAttention):
    """The linear attention layer of Kimi Linear and GLM-5.3-Flash: a decay per key channel.

    Parameters, with `W = 2K + R*V` rows a group: `in_proj_qkv.weight` `[G*W, D]` (q, k, v0 .. v(R-1)),
    `in_proj_b.weight` `[G*R, D]`, `conv.weight` `[G, W, C]`, the decay gate's pair `f_a.weight` `[r, D]` and
    `f_b.weight` `[G*R*K, r]`, the output gate's `g_a.weight` `[r, D]` and `g_b.weight` `[G*R*V, r]`,
    `decay.A_log` `[G*R]` and `decay.dt_bias` `[G*R*K]`, `norm.weight` `[V]`, `out_proj.weight` `[D, G*R*V]`.

    Neither wide gate crosses between ranks: the output gate is formed where its tokens are, and of the decay
    gate the bottleneck `f_a(x)` is gathered, of which each rank expands its own heads.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LinearAttention.Config):
        in_proj_b: Linear.Config
        f_a: Linear.Config
        f_b: Linear.Config
        g_a: Linear.Config
        g_b: Linear.Config

        def shape(self) -> LayerShape:
            """What the traffic model needs to know."""
            return self.shape_of_heads(
                exchanged=self.in_proj_qkv.out_features + self.in_proj_b.out_features,
                output=self.g_b.out_features,
                bottleneck=self.f_a.out_features,
                per_channel=True,
            )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.in_proj_b = config.in_proj_b.build()
        self.f_a = config.f_a.build()
        self.f_b = config.f_b.build()
        self.g_a = config.g_a.build()
        self.g_b = config.g_b.build()

    def crossing(self) -> tuple[tuple[nn.Module, int], ...]:
        """q, k and v, then b."""
        return (self.in_proj_qkv, self.conv.weight.shape[1]), (self.in_proj_b, self.heads_a_group)

    def bottleneck(self, x_BLD: Tensor) -> Tensor:
        """The decay gate's, `[B, L, r]`. Each TP rank uses it for its own heads: gradients are summed."""
        return apply(self.f_a, x_BLD, summed=True)

    def output_gate(self, x_BLD: Tensor) -> Tensor:
        """A low-rank pair of the hidden states."""
        return apply(self.g_b, apply(self.g_a, x_BLD, summed=True))

    def gates(
        self, gates_1TgE: Tensor, narrow_1Tr: Tensor, rate_N: Tensor, dt_bias_N: Tensor, heads: slice
    ) -> tuple[Tensor, Tensor]:
        """`g` `[1, T, N, K]`, `kda_gate` of what the bottleneck expands to, and `beta = sigmoid(b)`."""
        K = self.key_head_dim
        f = apply(self.f_b, narrow_1Tr, rows=slice(heads.start * K, heads.stop * K))
        g = kda_gate(f.unflatten(-1, (-1, K)), rate_N, dt_bias_N.view(-1, K), self.run.lower_bound)
        return g, gates_1TgE.flatten(2).float().sigmoid()

    def rule(self, *inputs: Tensor, **kernel: Any) -> tuple[Tensor, Tensor | None]:
        """The delta rule with a decay per channel."""
        bound = self.run.lower_bound
        return chunk_kda(*inputs, safe_gate=bound is not None and bound >= SAFE_BOUND, **kernel)
