"""Gated DeltaNet (arXiv 2412.06464) in head groups: one key head with its `R` value heads.

Every fused projection is laid out group by group, so that a contiguous run of groups is a contiguous
run of rows, and no slice over ranks cuts through q, k or v.

Shape suffixes: B batch, L sequence, D model width, G head groups, W the rows of a group, N value heads,
K and V head widths, C conv kernel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import local_head_split
from torchtitan.protocols.module import Module

from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.ops import causal_conv1d, chunk_gated_delta_rule
from titan_gdn.ops.gated_delta_rule import Backend
from titan_gdn.parallel.sequence import SequenceLayout


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


class GatedDeltaMixer(Module):
    """Convolution, gates and rule, on local tensors: all tokens of some head groups."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        key_head_dim: int
        value_head_dim: int
        kernel: Backend = "auto"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_head_dim = config.key_head_dim
        self.value_head_dim = config.value_head_dim
        self.kernel = config.kernel

    def forward(
        self,
        qkv_BLW: torch.Tensor,
        ba_BLW: torch.Tensor,
        conv_GWC: torch.Tensor,
        rate_N: torch.Tensor,
        dt_bias_N: torch.Tensor,
        *,
        sequence: SequenceLayout,
    ) -> torch.Tensor:
        """Projected q, k, v and gates of some groups to the rule's output `[B, L, N, V]`."""
        batch, length, _ = qkv_BLW.shape
        groups, width, _ = conv_GWC.shape
        # The kernels take packed documents as one row.
        qkv_1TW = qkv_BLW.reshape(1, batch * length, groups * width)
        qkv_1TW = causal_conv1d(qkv_1TW, conv_GWC.flatten(0, 1), sequence.cu_seqlens)
        qkv_1TGW = qkv_1TW.unflatten(-1, (groups, width))
        q, k, v = qkv_1TGW.split([self.key_head_dim, self.key_head_dim, width - 2 * self.key_head_dim], -1)
        b, a = ba_BLW.reshape(1, batch * length, groups, 2, -1).float().unbind(-2)
        out_1TNV, _ = chunk_gated_delta_rule(
            q,
            k,
            v.unflatten(-1, (-1, self.value_head_dim)).flatten(2, 3),
            rate_N * F.softplus(a.flatten(2) + dt_bias_N),
            b.flatten(2).sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=sequence.cu_seqlens,
            cu_seqlens_cpu=sequence.cu_seqlens_cpu,
            backend=self.kernel,
        )
        return out_1TNV.reshape(batch, length, -1, self.value_head_dim)


class GatedDeltaNet(Module):
    """The linear attention layer of Qwen3-Next.

    Parameters, with `W = 2K + R*V` rows a group: `in_proj_qkv.weight` `[G*W, D]` (q, k, v0 .. v(R-1)),
    `in_proj_z.weight` `[G*R*V, D]`, `in_proj_ba.weight` `[G*2R, D]` (b0 .., a0 ..), `conv.weight`
    `[G, W, C]`, `decay.A_log` and `decay.dt_bias` `[G*R]`, `norm.weight` `[V]`, `out_proj.weight`
    `[D, G*R*V]`. Heads are split over TP in whole groups.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_key_heads: int
        n_value_heads: int
        in_proj_qkv: Linear.Config
        in_proj_z: Linear.Config
        in_proj_ba: Linear.Config
        conv: GroupedConv.Config
        decay: Decay.Config
        mixer: GatedDeltaMixer.Config
        norm: GatedRMSNorm.Config
        out_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.value_head_dim = config.mixer.value_head_dim
        self.in_proj_qkv = config.in_proj_qkv.build()
        self.in_proj_z = config.in_proj_z.build()
        self.in_proj_ba = config.in_proj_ba.build()
        self.conv = config.conv.build()
        self.decay = config.decay.build()
        self.mixer = config.mixer.build()
        self.norm = config.norm.build()
        self.out_proj = config.out_proj.build()

    def forward(
        self, x_BLD: torch.Tensor, decay: tuple[torch.Tensor, torch.Tensor], sequence: SequenceLayout
    ) -> torch.Tensor:
        """Mix the tokens of each document.

        Args:
            x_BLD: `[B, L, D]` hidden states.
            decay: what `self.decay()` returned in this forward.
            sequence: the documents of this forward.

        Returns:
            `[B, L, D]`.
        """
        z_BLNV = local_head_split(self.in_proj_z(x_BLD), self.value_head_dim)
        out_BLNV = self.mixer(
            self.in_proj_qkv(x_BLD), self.in_proj_ba(x_BLD), self.conv.weight, *decay, sequence=sequence
        )
        return self.out_proj(self.norm(out_BLNV, z_BLNV).flatten(2))
