"""The base class of linear attention layers.

A head group is a key head and its `R` value heads. The rows of fused projections are ordered by group, so
that consecutive groups are consecutive rows, and no shard boundary falls inside q, k or v.

A forward runs these steps. The exchange adapts the layer to context parallelism (CP):

    x -- exchange.to_heads(project) -> y -- exchange.convolve -> q, k, v -- gates -> g, beta
      -- exchange.recur(rule) -> out -- exchange.to_tokens -> out of own tokens -- norm, gate -- out_proj

Shape suffixes: B batch, L tokens of this rank, T tokens for which this rank runs the rule, D model width, G
head groups of this TP rank, g head groups of this CP rank, W rows of a group, E rows of a group's gates, N
value heads, K and V head widths, C kernel of the convolution, r width of the low-rank projection.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_gdn.layers.declarations import ROW_PARALLEL, check_declarations
from titan_gdn.layers.initialization import linear
from titan_gdn.layers.local_tensor import apply, local
from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.layers.sharding import local_region, set_weights
from titan_gdn.ops import causal_conv1d
from titan_gdn.ops.backends import Backend
from titan_gdn.ops.delta_rule import too_wide
from titan_gdn.ops.rules import Rule
from titan_gdn.parallel.exchange.base import Exchange
from titan_gdn.parallel.exchange.local import NoExchange
from titan_gdn.parallel.exchange.registry import choices, make_exchange
from titan_gdn.parallel.machine import Machine
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import LayerShape


@dataclass(kw_only=True, slots=True)
class LinearAttentionConfig:
    """How a model runs its linear attention layers: the section `[linear_attention]` of a TOML file."""

    kernel: Backend = "auto"
    """Backend of the convolution and the rule: "fla" (FLA's Triton kernels), "torch" (PyTorch), or "auto",
    which selects FLA if its kernels run on the device and PyTorch otherwise."""

    exchange: str = field(default="auto", metadata={"choices": choices})
    """What the CP ranks exchange: "all_to_all" reshards from tokens to heads, "all_gather" gathers hidden
    states, "state" passes the recurrent state from rank to rank. "auto" selects the exchange that takes the
    least time on `machine` and logs why."""

    regather: bool = False
    """Communicate again in the backward instead of keeping what was gathered, which saves memory:
    "all_gather" gathers the hidden states again, "state" the transitions of segments. Not needed with
    activation checkpointing."""

    machine: Machine = Machine()
    """The machine for which "auto" selects an exchange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The sizes that determine a linear attention layer.

    Attributes:
        dim: `D`, width of the hidden states.
        key_heads: number of key heads, which is the number of head groups.
        value_heads: number of value heads, a multiple of `key_heads`.
        key_dim: `K`, width of a key head.
        value_dim: `V`, width of a value head.
        conv_kernel: `C`, kernel size of the convolution in tokens.
        gate_rank: `r`, rank of low-rank gates; layers without such gates ignore it.
        norm_eps: epsilon of the output norm.
    """

    dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4
    gate_rank: int = 128
    norm_eps: float = 1e-6


class Decay(Module):
    """The parameters of the decay, in float32 whatever the model's dtype.

    They are a module of their own, because FSDP's mixed precision would round them. The decays of all layers
    form one float32 FSDP unit, which the model calls before its blocks. The module returns computed tensors,
    not parameters, so that they stay valid after FSDP reshards the unit and can be passed into compiled
    blocks as arguments.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_value_heads: int
        channels: int = 1
        """Decays per value head: 1, or the width of a key head if the rule decays per channel."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.channels = config.channels
        self.A_log = nn.Parameter(torch.empty(config.n_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(config.n_value_heads * config.channels, dtype=torch.float32))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns `A_log` `[N]` and `dt_bias` `[N * channels]`, both float32."""
        return self.A_log.clone(), self.dt_bias.clone()


class GroupedConv(Module):
    """Holds the kernels of the depthwise convolution, ordered by head group: `[G, W, C]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        n_groups: int
        group_width: int
        kernel_size: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_groups, config.group_width, config.kernel_size))


class LinearAttention(Module):
    """A layer that mixes tokens with a recurrent state.

    A subclass declares these class attributes, and every other part of the package reads them from here:

    - `title`: its name in logs and tables.
    - `rule`: the recurrence (`titan_gdn.ops.rules`).
    - `per_head`: its modules whose rows belong to heads. TP shards their weights over dimension 0.
    - `replicated`: its linears and norms whose weights are replicated over TP.
    - `exchanged`: the linears in `per_head` whose outputs the rule needs for all tokens, `in_proj_qkv` first.
      Their rows are ordered by head group.
    - `low_rank`: the linear in `replicated` whose low-rank output every rank needs for all tokens, whatever
      heads it runs; None if there is none.
    - `full_precision`: its linears that are never quantized, each with the quantity that it computes.

    A subclass implements `gates`, `output_gate`, and `configure`, which returns its `Config` for `Widths`.

    Heads are sharded over TP in whole groups, and each CP rank runs some of the groups of its TP rank. The
    layer computes on local tensors (see `Config.set_sharding`).
    """

    title: ClassVar[str]
    rule: ClassVar[Rule]
    per_head: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "conv")
    replicated: ClassVar[tuple[str, ...]] = ("norm",)
    exchanged: ClassVar[tuple[str, ...]] = ("in_proj_qkv",)
    low_rank: ClassVar[str | None] = None
    full_precision: ClassVar[dict[str, str]] = {}

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

        @property
        def layer_class(self) -> "type[LinearAttention]":
            """The class of the layer that this configures."""
            assert self._owner is not None  # set by TorchTitan when the layer class is defined
            return self._owner

        def shape(self) -> LayerShape:
            """Returns the sizes from which the traffic model computes the costs of the layer."""
            layer = self.layer_class
            return LayerShape(
                width=self.in_proj_qkv.in_features,
                exchanged=sum(getattr(self, name).out_features for name in layer.exchanged),
                output=self.n_value_heads * self.value_head_dim,
                low_rank=getattr(self, layer.low_rank).out_features if layer.low_rank else 0,
                key_heads=self.n_key_heads,
                value_heads=self.n_value_heads,
                key_dim=self.key_head_dim,
                value_dim=self.value_head_dim,
                channels=self.in_proj_qkv.out_features,
                kernel_size=self.conv.kernel_size,
                rule=layer.rule,
                fla=self.run.kernel != "torch"
                and layer.rule.fla is not None
                and not too_wide(self.key_head_dim),
            )

        def set_sharding(self, *, tp: int, enable_sp: bool) -> None:
            """Declares the placements of the layer's parameters, inputs and outputs.

            Args:
                tp: degree of tensor parallelism.
                enable_sp: whether hidden states between layers are sharded over TP.

            Raises:
                ValueError: the declarations of the layer are wrong.
            """
            layer = self.layer_class
            check_declarations(layer, self)
            set_weights(spmd.S(0), *(getattr(self, name) for name in layer.per_head))
            set_weights(spmd.R, *(getattr(self, name) for name in layer.replicated))
            set_weights(spmd.S(1), getattr(self, ROW_PARALLEL))
            per_head = dense_param_placement(tp=spmd.S(0))
            self.decay.sharding_config = ShardingConfig(
                state_shardings={"A_log": per_head, "dt_bias": per_head}
            )
            self.sharding_config = local_region(enable_sp, "x_BLD", A_log_N=per_head, dt_bias_N=per_head)

    @classmethod
    def configure(cls, widths: Widths, **own: Any) -> Config:
        """Returns the configuration of a layer of these widths, with its initializers.

        Args:
            widths: the sizes of the layer.
            **own: the fields that the subclass adds to `Config`, and `decay` and `norm`. A subclass overrides
                this method and passes them.

        Raises:
            ValueError: the declarations of the layer are wrong, see `titan_gdn.layers.declarations`.
        """
        width = 2 * widths.key_dim + widths.value_heads // widths.key_heads * widths.value_dim
        bound = widths.conv_kernel**-0.5  # as torch.nn.Conv1d with one input channel
        config = cls.Config(
            n_key_heads=widths.key_heads,
            n_value_heads=widths.value_heads,
            key_head_dim=widths.key_dim,
            value_head_dim=widths.value_dim,
            run=LinearAttentionConfig(),
            in_proj_qkv=linear(widths.dim, widths.key_heads * width),
            conv=GroupedConv.Config(
                n_groups=widths.key_heads,
                group_width=width,
                kernel_size=widths.conv_kernel,
                param_init={"weight": partial(nn.init.uniform_, a=-bound, b=bound)},
            ),
            out_proj=linear(widths.value_heads * widths.value_dim, widths.dim),
            **own,
        )
        check_declarations(cls, config)
        return config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.key_head_dim = config.key_head_dim
        self.value_head_dim = config.value_head_dim
        self.value_heads_per_group = config.n_value_heads // config.n_key_heads
        self.rows_per_group = {
            name: getattr(config, name).out_features // config.n_key_heads for name in self.exchanged
        }
        self.run = config.run
        self.in_proj_qkv = config.in_proj_qkv.build()
        self.conv = config.conv.build()
        self.decay = config.decay.build()
        self.norm = config.norm.build()
        self.out_proj = config.out_proj.build()
        self.exchange: Exchange = NoExchange()

    @abstractmethod
    def gates(
        self,
        products: dict[str, Tensor],
        low_rank_1Tr: Tensor | None,
        A_log_N: Tensor,
        dt_bias_N: Tensor,
        heads: slice,
    ) -> tuple[Tensor, Tensor]:
        """Computes the log decay `g` and the write strength `beta` for the heads that this rank runs.

        Args:
            products: outputs of the linears in `exchanged` after `in_proj_qkv` by name, each
                `[1, T, g, rows of a group]`.
            low_rank_1Tr: output of the linear `low_rank`, `[1, T, r]`, None if there is none.
            A_log_N: logarithms of the decay rates of these heads, the first result of `Decay`, `[N]`.
            dt_bias_N: biases of these heads, the second result of `Decay`, `[N * channels]`.
            heads: indices of these heads among the value heads of the TP rank.

        Returns:
            `g`, `[1, T, N]`, or `[1, T, N, K]` if the rule decays per channel, and `beta`, `[1, T, N]`. Both
            are float32.
        """
        raise NotImplementedError

    @abstractmethod
    def output_gate(self, x_BLD: Tensor) -> Tensor:
        """Returns the output gate before its activation for all heads of the TP rank, `[B, L, N * V]`."""
        raise NotImplementedError

    def run_rule(self, *inputs: Tensor, **kernel: Any) -> tuple[Tensor, Tensor | None]:
        """Runs `rule`. A layer overrides this method to add arguments of its own."""
        return self.rule.run(*inputs, **kernel)

    def project_low_rank(self, x_BLD: Tensor) -> Tensor | None:
        """Returns the output of the linear `low_rank`, `[B, L, r]`, None if there is none.

        TP ranks use it for different heads, so the gradients of its weight are partial sums.
        """
        return (
            None if self.low_rank is None else apply(getattr(self, self.low_rank), x_BLD, partial_grad=True)
        )

    def split_sequence(self, cp_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> None:
        """Sets the sub-meshes over which sequences are sharded.

        Args:
            cp_mesh: the CP sub-mesh, None without context parallelism.
            tp_mesh: the TP sub-mesh if hidden states are sharded over it between layers, else None.

        Raises:
            ValueError: a module of the layer is not a field of its `Config`, or the exchange is still "auto",
                which `update_from_config` of a model replaces.
        """
        for name in dict(self.named_children()).keys() - {
            *self.per_head,
            *self.replicated,
            "out_proj",
            "decay",
        }:
            raise ValueError(
                f"{type(self).__name__}.{name} has no placement: build it from a field of its Config"
            )
        self.exchange = make_exchange(self.run.exchange, cp_mesh, tp_mesh, self.run.regather)

    def forward(
        self, x_BLD: Tensor, A_log_N: Tensor, dt_bias_N: Tensor, *, sequence: SequenceLayout
    ) -> Tensor:
        """Mixes the tokens of each document.

        Args:
            x_BLD: hidden states of this rank's tokens, `[B, L, D]`, or `[B, L / tp, D]` if they are sharded
                over TP.
            A_log_N: logarithms of the decay rates, the first result of `self.decay()` in this forward, `[N]`.
            dt_bias_N: biases of the decay, the second result, `[N * channels]`.
            sequence: the documents of this forward.

        Returns:
            `[B, L, D]`, under TP a partial sum.
        """
        conv_GWC = local(self.conv.weight)
        groups = self.exchange.groups(conv_GWC.shape[0])
        per_group = self.value_heads_per_group
        heads = slice(groups.start * per_group, groups.stop * per_group)
        y_BTgW, low_rank_BTr, x_local_BLD = self.exchange.to_heads(
            x_BLD, self.project, self.project_low_rank, conv_GWC.shape[0], sequence
        )
        biases = slice(heads.start * self.decay.channels, heads.stop * self.decay.channels)
        out_BTNV = self.mix(
            y_BTgW, low_rank_BTr, conv_GWC[groups], A_log_N[heads], dt_bias_N[biases], heads, sequence
        )
        out_BLNV = self.exchange.to_tokens(out_BTNV, sequence)
        gate_BLNV = self.output_gate(x_local_BLD).unflatten(-1, (-1, self.value_head_dim))
        return apply(self.out_proj, apply(self.norm, out_BLNV, gate_BLNV, partial_grad=True).flatten(2))

    def project(self, x_BLD: Tensor, groups: slice) -> Tensor:
        """Returns the outputs of the linears in `exchanged` for some head groups, `[B, L, g, W + E]`."""
        parts = []
        for name, width in self.rows_per_group.items():
            rows = slice(groups.start * width, groups.stop * width)
            parts.append(apply(getattr(self, name), x_BLD, rows=rows).unflatten(-1, (-1, width)))
        return torch.cat(parts, -1)

    def mix(
        self,
        y_BTgW: Tensor,
        low_rank_BTr: Tensor | None,
        conv_gWC: Tensor,
        A_log_N: Tensor,
        dt_bias_N: Tensor,
        heads: slice,
        sequence: SequenceLayout,
    ) -> Tensor:
        """Runs convolution, gates and rule for the tokens and head groups of this rank.

        Args:
            y_BTgW: outputs of the linears in `exchanged`, `[B, T, g, W + E]`.
            low_rank_BTr: output of the linear `low_rank`, `[B, T, r]`, None if there is none.
            conv_gWC: kernels of the convolution, `[g, W, C]`.
            A_log_N: logarithms of the decay rates of these heads, `[N]`.
            dt_bias_N: biases of the decay of these heads, `[N * channels]`.
            heads: indices of these heads among the value heads of the TP rank.
            sequence: the documents of this forward.

        Returns:
            `[B, T, N, V]`.
        """
        batch, length = y_BTgW.shape[:2]
        width, K, V = conv_gWC.shape[1], self.key_head_dim, self.value_head_dim
        # The kernels take all packed documents in one row.
        parts = y_BTgW.flatten(0, 1).unsqueeze(0).split(list(self.rows_per_group.values()), -1)
        qkv_1TgW, *others = parts
        products = dict(zip(self.exchanged[1:], others, strict=True))
        convolution = partial(causal_conv1d, weight=conv_gWC.flatten(0, 1), backend=self.run.kernel)
        reach = conv_gWC.shape[2] - 1
        qkv_1TgW = self.exchange.convolve(convolution, qkv_1TgW.flatten(2), reach, sequence)
        qkv_1TgW = qkv_1TgW.unflatten(-1, (-1, width))
        q, k, v = qkv_1TgW.split([K, K, width - 2 * K], -1)
        v_1TNV = v.unflatten(-1, (-1, V)).flatten(2, 3)
        low_rank_1Tr = None if low_rank_BTr is None else low_rank_BTr.flatten(0, 1).unsqueeze(0)
        g, beta = self.gates(products, low_rank_1Tr, A_log_N, dt_bias_N, heads)
        rule = partial(self.run_rule, use_qk_l2norm_in_kernel=True, backend=self.run.kernel)
        out_1TNV = self.exchange.recur(rule, q, k, v_1TNV, g, beta, sequence)
        return out_1TNV.reshape(batch, length, -1, V)
