"""Gated DeltaNet (arXiv 2412.06464) in head groups: one key head with its `R` value heads.

Every fused projection is laid out group by group, so that a contiguous run of groups is a contiguous
run of rows, and no slice over ranks cuts through q, k or v.

Shape suffixes: B batch, L tokens of this rank, T all tokens, D model width, G head groups, W the rows of
a group, N value heads, K and V head widths, C conv kernel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.layers.local import apply, local
from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.ops import causal_conv1d, chunk_gated_delta_rule
from titan_gdn.parallel.exchange import Exchange, NoExchange, make_exchange
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import LayerShape


class Decay(Module):
    """The parameters of the decay, in float32 whatever the model's dtype.

    A module of its own, because FSDP's mixed precision would round them: all layers' decays form one
    float32 FSDP unit, which the model calls before its blocks. What it returns are computed tensors,
    so that they outlive the unit's parameters and travel into compiled blocks as arguments.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_value_heads: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(config.n_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(config.n_value_heads, dtype=torch.float32))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rate `-exp(A_log)` and the bias of its argument, both `[N]` float32."""
        return -self.A_log.exp(), self.dt_bias.clone()


class GroupedConv(Module):
    """Holds the depthwise kernels, group by group: `[G, W, C]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_groups: int
        group_width: int
        kernel_size: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_groups, config.group_width, config.kernel_size))


class GatedDeltaNet(Module):
    """The linear attention layer of Qwen3-Next.

    Parameters, with `W = 2K + R*V` rows a group: `in_proj_qkv.weight` `[G*W, D]` (q, k, v0 .. v(R-1)),
    `in_proj_z.weight` `[G*R*V, D]`, `in_proj_ba.weight` `[G*2R, D]` (b0 .., a0 ..), `conv.weight`
    `[G, W, C]`, `decay.A_log` and `decay.dt_bias` `[G*R]`, `norm.weight` `[V]`, `out_proj.weight`
    `[D, G*R*V]`. Heads are split over TP in whole groups, and of a TP rank's groups each CP rank computes
    its share, with the rows of the weights that belong to it.

    The layer works on local tensors (see its `sharding_config`); `exchange` is what context parallelism
    is to it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_key_heads: int
        n_value_heads: int
        key_head_dim: int
        value_head_dim: int
        in_proj_qkv: Linear.Config
        in_proj_z: Linear.Config
        in_proj_ba: Linear.Config
        conv: GroupedConv.Config
        decay: Decay.Config
        norm: GatedRMSNorm.Config
        out_proj: Linear.Config
        run: LinearAttentionConfig

        def shape(self) -> LayerShape:
            """What the traffic model needs to know."""
            return LayerShape(
                width=self.in_proj_qkv.in_features,
                exchanged=self.in_proj_qkv.out_features + self.in_proj_ba.out_features,
                output=self.in_proj_z.out_features,
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_head_dim = config.key_head_dim
        self.value_head_dim = config.value_head_dim
        self.run = config.run
        self.in_proj_qkv = config.in_proj_qkv.build()
        self.in_proj_z = config.in_proj_z.build()
        self.in_proj_ba = config.in_proj_ba.build()
        self.conv = config.conv.build()
        self.decay = config.decay.build()
        self.norm = config.norm.build()
        self.out_proj = config.out_proj.build()
        self.exchange: Exchange = NoExchange()

    def split_sequence(self, cp_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> None:
        """Say over which ranks sequences are split.

        Args:
            cp_mesh: the CP sub-mesh, None without context parallelism.
            tp_mesh: the TP sub-mesh, where hidden states are sharded over it between layers.

        Raises:
            ValueError: the exchange is still "auto"; a model chooses one when it is configured.
        """
        self.exchange = make_exchange(self.run.exchange, cp_mesh, tp_mesh, self.run.regather)

    def forward(
        self, x_BLD: torch.Tensor, rate_N: torch.Tensor, dt_bias_N: torch.Tensor, *, sequence: SequenceLayout
    ) -> torch.Tensor:
        """Mix the tokens of each document.

        Args:
            x_BLD: hidden states of this rank's tokens, `[B, L, D]`, or `[B, L / tp, D]` where they are
                sharded over TP.
            rate_N: the rate of the decay, first of what `self.decay()` returned in this forward.
            dt_bias_N: the bias of its argument, the second.
            sequence: the documents of this forward.

        Returns:
            `[B, L, D]`, under TP this rank's summand of it.
        """
        conv_GWC = local(self.conv.weight)
        groups = self.exchange.groups(conv_GWC.shape[0])
        heads = slice(groups.start * self._heads_a_group, groups.stop * self._heads_a_group)
        y_BTgW, home_BLD = self.exchange.to_heads(x_BLD, self.project, conv_GWC.shape[0], sequence)
        out_BTNV = self.mix(y_BTgW, conv_GWC[groups], rate_N[heads], dt_bias_N[heads], sequence)
        out_BLNV = self.exchange.to_tokens(out_BTNV, sequence)
        z_BLNV = apply(self.in_proj_z, home_BLD).unflatten(-1, (-1, self.value_head_dim))
        return apply(self.out_proj, apply(self.norm, out_BLNV, z_BLNV, summed=True).flatten(2))

    @property
    def _heads_a_group(self) -> int:
        return (self.conv.weight.shape[1] - 2 * self.key_head_dim) // self.value_head_dim

    def project(self, x_BLD: torch.Tensor, groups: slice) -> torch.Tensor:
        """Everything that the rule needs of some groups in one tensor: q, k, v, b, a, `[B, L, g, W + 2R]`."""
        parts = []
        for linear, width in (
            (self.in_proj_qkv, self.conv.weight.shape[1]),
            (self.in_proj_ba, 2 * self._heads_a_group),
        ):
            rows = slice(groups.start * width, groups.stop * width)
            parts.append(apply(linear, x_BLD, rows=rows).unflatten(-1, (-1, width)))
        return torch.cat(parts, -1)

    def mix(
        self,
        y_BTGW: torch.Tensor,
        conv_GWC: torch.Tensor,
        rate_N: torch.Tensor,
        dt_bias_N: torch.Tensor,
        sequence: SequenceLayout,
    ) -> torch.Tensor:
        """Convolution, gates and rule of some groups, all tokens in natural order, to `[B, T, N, V]`."""
        batch, length = y_BTGW.shape[:2]
        width = conv_GWC.shape[1]
        # The kernels take packed documents as one row.
        qkv_1TGW, ba_1TG = y_BTGW.reshape(1, batch * length, *y_BTGW.shape[2:]).split(
            [width, y_BTGW.shape[-1] - width], -1
        )
        qkv_1TGW = causal_conv1d(
            qkv_1TGW.flatten(2),
            conv_GWC.flatten(0, 1),
            cu_seqlens=sequence.cu_seqlens,
            cu_seqlens_cpu=sequence.cu_seqlens_cpu,
            backend=self.run.kernel,
        ).unflatten(-1, (-1, width))
        q, k, v = qkv_1TGW.split([self.key_head_dim, self.key_head_dim, width - 2 * self.key_head_dim], -1)
        b, a = ba_1TG.float().chunk(2, -1)
        out_1TNV, _ = chunk_gated_delta_rule(
            q,
            k,
            v.unflatten(-1, (-1, self.value_head_dim)).flatten(2, 3),
            rate_N * F.softplus(a.flatten(2) + dt_bias_N),
            b.flatten(2).sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=sequence.cu_seqlens,
            cu_seqlens_cpu=sequence.cu_seqlens_cpu,
            backend=self.run.kernel,
        )
        return out_1TNV.reshape(batch, length, -1, self.value_head_dim)
