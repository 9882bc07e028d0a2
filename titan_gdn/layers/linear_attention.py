"""What linear attention layers are made of, whatever their decay.

They are made of head groups: a key head with its `R` value heads. Fused projections are laid out group by
group, so that a contiguous run of groups is a contiguous run of rows, and no slice over ranks cuts through
q, k or v.

Shape suffixes: B batch, L tokens of this rank, T all tokens, D model width, G head groups, g of them this
rank's, W the rows of a group, N value heads, K and V head widths, C conv kernel, r width of a bottleneck.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from titan_gdn.layers.local_tensor import apply, local
from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.ops import causal_conv1d
from titan_gdn.ops.backends import Backend
from titan_gdn.parallel.exchange.base import Exchange
from titan_gdn.parallel.exchange.local import NoExchange
from titan_gdn.parallel.exchange.registry import choices, make_exchange
from titan_gdn.parallel.machine import Machine
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import LayerShape


@dataclass(kw_only=True, slots=True)
class LinearAttentionConfig:
    """How all linear attention layers of a model are run: the TOML section `[linear_attention]`."""

    kernel: Backend = "auto"
    """Backend of the convolution and the rule: FLA's Triton kernels, PyTorch, or "auto": FLA where it
    runs, PyTorch elsewhere."""

    exchange: str = field(default="auto", metadata={"choices": choices})
    """What the ranks of context parallelism exchange: "all_to_all" exchanges tokens for heads, "all_gather"
    gathers hidden states, "state" passes the recurrent state on. "auto" takes the exchange that costs the
    least time on `machine` and logs why."""

    regather: bool = False
    """Save memory by communicating again in the backward: "all_gather" gathers hidden states again, "state"
    the transitions of segments. Not needed with activation checkpointing."""

    machine: Machine = Machine()
    """The machine for which "auto" chooses."""

    lower_bound: float | None = None
    """Of Kimi Delta Attention's log decay, as GLM-5.3-Flash bounds it at -5; none: unbounded."""


class Decay(Module):
    """The parameters of the decay, in float32 whatever the model's dtype.

    A module of its own, because FSDP's mixed precision would round them: all layers' decays form one
    float32 FSDP unit, which the model calls before its blocks. What it returns are computed tensors,
    so that they outlive the unit's parameters and travel into compiled blocks as arguments.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_value_heads: int
        channels: int = 1
        """Decays a value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.channels = config.channels
        self.A_log = nn.Parameter(torch.empty(config.n_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(config.n_value_heads * config.channels, dtype=torch.float32))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The rate `-exp(A_log)` `[N]` and the bias of its argument `[N * channels]`, float32."""
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


class LinearAttention(Module):
    """A layer whose tokens mix by a rule with a state; subclasses say which rule, and how they gate it.

    Heads are split over TP in whole groups, and of a TP rank's groups each CP rank computes its share, with
    the rows of the weights that belong to it. The layer works on local tensors (see its
    `sharding_config`); `exchange` is what context parallelism is to it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_key_heads: int
        n_value_heads: int
        key_head_dim: int
        value_head_dim: int
        in_proj_qkv: Linear.Config
        conv: GroupedConv.Config
        decay: Decay.Config
        norm: GatedRMSNorm.Config
        out_proj: Linear.Config
        run: LinearAttentionConfig

        def shape(self) -> LayerShape:
            """What the traffic model needs to know."""
            raise NotImplementedError

        def shape_of_heads(self, **own: Any) -> LayerShape:
            """A layer's shape: what follows from its heads, and its `own` rest."""
            return LayerShape(
                width=self.in_proj_qkv.in_features,
                key_heads=self.n_key_heads,
                value_heads=self.n_value_heads,
                key_dim=self.key_head_dim,
                value_dim=self.value_head_dim,
                channels=self.in_proj_qkv.out_features,
                kernel_size=self.conv.kernel_size,
                fla=self.run.kernel != "torch",
                **own,
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_head_dim = config.key_head_dim
        self.value_head_dim = config.value_head_dim
        self.heads_a_group = config.n_value_heads // config.n_key_heads
        self.run = config.run
        self.in_proj_qkv = config.in_proj_qkv.build()
        self.conv = config.conv.build()
        self.decay = config.decay.build()
        self.norm = config.norm.build()
        self.out_proj = config.out_proj.build()
        self.exchange: Exchange = NoExchange()

    def crossing(self) -> tuple[tuple[nn.Module, int], ...]:
        """The linears whose products cross between ranks, each with its rows a group; `in_proj_qkv` first."""
        raise NotImplementedError

    def bottleneck(self, x_BLD: Tensor) -> Tensor | None:
        """What the rule needs of every token whatever the head, `[B, L, r]`; None: nothing."""
        return None

    def gates(
        self,
        gates_1TgE: Tensor,
        narrow_1Tr: Tensor | None,
        rate_N: Tensor,
        dt_bias_N: Tensor,
        heads: slice,
    ) -> tuple[Tensor, Tensor]:
        """Log decay `g` and write strength `beta` of all tokens of some heads, float32.

        Args:
            gates_1TgE: products of the linears that cross beside `in_proj_qkv`.
            narrow_1Tr: `bottleneck` of all tokens.
            rate_N: of these heads, as `dt_bias_N`.
            dt_bias_N: see `Decay`.
            heads: which they are of the TP rank's value heads.
        """
        raise NotImplementedError

    def rule(
        self, q_1TgK: Tensor, k_1TgK: Tensor, v_1TNV: Tensor, g_1TN: Tensor, beta_1TN: Tensor, **kernel: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's chunked rule, one of `titan_gdn.ops`."""
        raise NotImplementedError

    def output_gate(self, x_BLD: Tensor) -> Tensor:
        """The argument of the output's gate, `[B, L, N * V]`, all heads of the TP rank."""
        raise NotImplementedError

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
        self, x_BLD: Tensor, rate_N: Tensor, dt_bias_N: Tensor, *, sequence: SequenceLayout
    ) -> Tensor:
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
        heads = slice(groups.start * self.heads_a_group, groups.stop * self.heads_a_group)
        y_BTgW, low_rank_BTr, x_local_BLD = self.exchange.to_heads(
            x_BLD, self.project, self.bottleneck, conv_GWC.shape[0], sequence
        )
        biases = slice(heads.start * self.decay.channels, heads.stop * self.decay.channels)
        out_BTNV = self.mix(
            y_BTgW, low_rank_BTr, conv_GWC[groups], rate_N[heads], dt_bias_N[biases], heads, sequence
        )
        out_BLNV = self.exchange.to_tokens(out_BTNV, sequence)
        gate_BLNV = self.output_gate(x_local_BLD).unflatten(-1, (-1, self.value_head_dim))
        return apply(self.out_proj, apply(self.norm, out_BLNV, gate_BLNV, summed=True).flatten(2))

    def project(self, x_BLD: Tensor, groups: slice) -> Tensor:
        """Everything that crosses, of some groups, in one tensor, q, k and v first: `[B, L, g, W + ...]`."""
        parts = []
        for linear, width in self.crossing():
            rows = slice(groups.start * width, groups.stop * width)
            parts.append(apply(linear, x_BLD, rows=rows).unflatten(-1, (-1, width)))
        return torch.cat(parts, -1)

    def mix(
        self,
        y_BTgW: Tensor,
        narrow_BTr: Tensor | None,
        conv_gWC: Tensor,
        rate_N: Tensor,
        dt_bias_N: Tensor,
        heads: slice,
        sequence: SequenceLayout,
    ) -> Tensor:
        """Convolution, gates and rule of some groups and the tokens that run here, to `[B, T, N, V]`."""
        batch, length = y_BTgW.shape[:2]
        width, K, V = conv_gWC.shape[1], self.key_head_dim, self.value_head_dim
        # The kernels take packed documents as one row.
        qkv_1TgW, gates_1TgE = y_BTgW.flatten(0, 1).unsqueeze(0).split([width, y_BTgW.shape[-1] - width], -1)
        convolution = partial(causal_conv1d, weight=conv_gWC.flatten(0, 1), backend=self.run.kernel)
        reach = conv_gWC.shape[2] - 1
        qkv_1TgW = self.exchange.convolve(convolution, qkv_1TgW.flatten(2), reach, sequence)
        qkv_1TgW = qkv_1TgW.unflatten(-1, (-1, width))
        q, k, v = qkv_1TgW.split([K, K, width - 2 * K], -1)
        v_1TNV = v.unflatten(-1, (-1, V)).flatten(2, 3)
        narrow_1Tr = None if narrow_BTr is None else narrow_BTr.flatten(0, 1).unsqueeze(0)
        g, beta = self.gates(gates_1TgE, narrow_1Tr, rate_N, dt_bias_N, heads)
        rule = partial(self.rule, use_qk_l2norm_in_kernel=True, backend=self.run.kernel)
        out_1TNV = self.exchange.recur(rule, q, k, v_1TNV, g, beta, sequence)
        return out_1TNV.reshape(batch, length, -1, V)
