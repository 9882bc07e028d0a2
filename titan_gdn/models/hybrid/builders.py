"""What builders of hybrid models share: validated arguments, and configurations of common modules.

A model family derives its arguments from `HybridArguments`, or from `SparseArguments` if it has experts, and
adds a method `config` that builds the model (see `titan_gdn.models.qwen3_next.model`). The fields of its
arguments are the keys of `[model.overrides]`; the string below each is its documentation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, Self, cast

from torchtitan.models.common import Embedding, FeedForward, RMSNorm
from torchtitan.models.common.attention import BaseAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.protocols.module import Module

from titan_gdn.layers.experts import GroupedExperts
from titan_gdn.layers.initialization import NORMAL, WEIGHT, linear
from titan_gdn.layers.linear_attention import LinearAttention, Widths
from titan_gdn.models.hybrid.block import HybridBlock
from titan_gdn.models.hybrid.model import HybridModel
from titan_gdn.models.hybrid.mtp import Gather, MultiTokenPrediction

KINDS = ("linear_attention", "full_attention")
"""The possible entries of `layer_types`."""


@dataclass(frozen=True, kw_only=True)
class HybridArguments:
    """The arguments that all hybrid models have.

    Raises:
        ValueError: an argument is out of range or contradicts another. The message names the argument, its
            value and the expected values.
    """

    vocab_size: int
    """Number of tokens in the vocabulary."""

    dim: int
    """Width of the hidden states."""

    n_layers: int
    """Number of layers."""

    full_attention_interval: int = 4
    """The layers whose numbers (from 1) are multiples of this have full attention, the others linear."""

    layer_types: list[str] | None = None
    """"linear_attention" or "full_attention" for each layer. Replaces `full_attention_interval`."""

    norm_eps: float
    """Epsilon of all norms."""

    n_heads: int
    """Query heads of the full attention."""

    n_linear_key_heads: int
    """Key heads of the linear attention, which is the number of head groups."""

    n_linear_value_heads: int
    """Value heads of the linear attention, a multiple of its key heads."""

    linear_key_head_dim: int
    """Width of a key head of the linear attention."""

    linear_value_head_dim: int
    """Width of a value head of the linear attention."""

    linear_conv_kernel: int = 4
    """Kernel size of the linear attention's convolution, in tokens."""

    hidden_dim: int
    """Hidden width of dense feed-forwards."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            most = 10_000 if name == "n_layers" else 2**31 - 1  # far above any model
            if isinstance(value := getattr(self, name), int) and value > most:
                self.refuse(name, f"at most {most}")
        self.check_at_least_1(
            "vocab_size",
            "dim",
            "n_layers",
            "full_attention_interval",
            "n_heads",
            "n_linear_key_heads",
            "n_linear_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel",
            "hidden_dim",
        )
        self.check_divides("n_linear_key_heads", "n_linear_value_heads")
        if not 0 < self.norm_eps < 1:
            self.refuse("norm_eps", "a number between 0 and 1")
        kinds = self.layer_types
        if kinds is not None and (len(kinds) != self.n_layers or not set(kinds) <= set(KINDS)):
            self.refuse("layer_types", f"one of {KINDS} for each of the {self.n_layers} layers")

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises a `ValueError` that names an argument, its value and the expected values."""
        raise ValueError(f"{name} = {getattr(self, name)}: expected {expected}")

    def check_at_least_1(self, *names: str) -> None:
        """Checks that each of these arguments is at least 1."""
        for name in names:
            if getattr(self, name) < 1:
                self.refuse(name, "at least 1")

    def check_divides(self, divisor: str, number: str) -> None:
        """Checks that the argument `number` is divisible by the argument `divisor`."""
        if getattr(self, number) % getattr(self, divisor):
            self.refuse(divisor, f"a divisor of {number} = {getattr(self, number)}")

    def kinds(self) -> list[str]:
        """One of `KINDS` for each layer."""
        if self.layer_types is not None:
            return self.layer_types
        return [
            "linear_attention" if i % self.full_attention_interval else "full_attention"
            for i in range(1, self.n_layers + 1)
        ]

    def overridden(self, **overrides: Any) -> Self:
        """Returns these arguments with some replaced. Lists of layers are cut to a smaller `n_layers`."""
        n_layers = overrides.get("n_layers", self.n_layers)
        if self.layer_types is not None and 0 < n_layers < self.n_layers:
            overrides = {"layer_types": self.layer_types[:n_layers]} | overrides
        return replace(self, **overrides)

    def linear_attention_widths(self) -> Widths:
        """Returns the sizes of the linear attention layers."""
        return Widths(
            dim=self.dim,
            key_heads=self.n_linear_key_heads,
            value_heads=self.n_linear_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            conv_kernel=self.linear_conv_kernel,
            norm_eps=self.norm_eps,
        )

    def config(self) -> HybridModel.Config:
        """Returns the configuration of the model."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SparseArguments(HybridArguments):
    """The arguments of models with experts."""

    n_experts: int
    """Number of routed experts; 0 makes every layer dense."""

    n_experts_per_token: int
    """Number of experts to which each token is routed."""

    expert_hidden_dim: int
    """Hidden width of a routed expert."""

    shared_expert_hidden_dim: int
    """Hidden width of the shared expert."""

    load_balance_coeff: float | None = None
    """Step size of TorchTitan's bias that balances experts (arXiv 2408.15664); none: no such bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_balance_coeff is not None and not self.load_balance_coeff > 0:
            self.refuse("load_balance_coeff", "a positive number")
        if self.n_experts < 0:
            self.refuse("n_experts", "at least 0 (0 makes every layer dense)")
        if self.n_experts == 0:
            return
        self.check_at_least_1("n_experts_per_token", "expert_hidden_dim", "shared_expert_hidden_dim")
        if self.n_experts_per_token > self.n_experts:
            self.refuse("n_experts_per_token", f"at most n_experts = {self.n_experts}")
        for name in ("dim", "expert_hidden_dim"):
            if getattr(self, name) % 8:  # torch's grouped products need rows of 16 bytes
                self.refuse(name, "a multiple of 8 if the model has experts")


@dataclass(frozen=True, kw_only=True)
class MultiTokenArguments(SparseArguments):
    """The arguments of models that are published with a layer of multi-token prediction."""

    mtp: bool = False
    """Whether the layer that predicts the token after the next is trained; false keeps its weights as they
    are in the files."""

    mtp_loss_weight: float = 0.1
    """Weight of the loss of the token after the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mtp_loss_weight < math.inf:
            self.refuse("mtp_loss_weight", "a positive number (mtp = false leaves the loss out)")


def feed_forward(dim: int, hidden_dim: int) -> FeedForward.Config:
    """Returns the configuration of a dense SwiGLU feed-forward."""
    return make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=WEIGHT, w2w3_param_init=WEIGHT)


def moe(arguments: SparseArguments, shared_experts: FeedForward.Config, **router: Any) -> MoE.Config:
    """Returns the configuration of routed and shared experts.

    Args:
        arguments: number and widths of the experts, and the step size of the bias that balances them.
        shared_experts: the feed-forward that processes every token.
        **router: further arguments of `make_router_config`: score function, normalization and scale.
    """
    dim, n_experts, top_k = arguments.dim, arguments.n_experts, arguments.n_experts_per_token
    return make_moe_config(
        num_experts=n_experts,
        router=make_router_config(
            dim=dim, num_experts=n_experts, gate_param_init=WEIGHT, top_k=top_k, **router
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=dim,
                hidden_dim=arguments.expert_hidden_dim,
                num_experts=n_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL),
            ),
            token_dispatcher=make_token_dispatcher_config(
                num_experts=n_experts, top_k=top_k, comm_backend="standard", hidden_dim=dim
            ),
        ),
        shared_experts=shared_experts,
        load_balance_coeff=arguments.load_balance_coeff,
    )


def decoder(
    arguments: HybridArguments,
    *,
    linear_attention: Callable[[], LinearAttention.Config],
    attention: Callable[[], BaseAttention.Config],
    mlp: Callable[[int], FeedForward.Config | MoE.Config],
    norm: Callable[[int], Module.Config],
    enable_weight_tying: bool = False,
    mtp_loss_weight: float | None = None,
) -> HybridModel.Config:
    """Builds the configuration of a model, layer by layer.

    Args:
        arguments: widths, vocabulary and the kind of each layer.
        linear_attention: returns the configuration of a linear attention layer.
        attention: returns the configuration of a full attention layer.
        mlp: returns the feed-forward of a layer, dense or with experts, given its number (from 0).
        norm: returns the configuration of a norm, given its width.
        enable_weight_tying: whether embedding and head share one weight.
        mtp_loss_weight: weight of the loss of multi-token prediction; None builds no layer for it.
    """
    dim, vocab_size = arguments.dim, arguments.vocab_size

    def layer(i: int, kind: str) -> HybridBlock.Config:
        ffn, linear = mlp(i), kind == "linear_attention"
        return HybridBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            linear_attention=linear_attention() if linear else None,
            attention=None if linear else attention(),
            moe=ffn if isinstance(ffn, MoE.Config) else None,
            feed_forward=None if isinstance(ffn, MoE.Config) else ffn,
        )

    mtp = None
    if mtp_loss_weight is not None:
        mtp = MultiTokenPrediction.Config(
            embedding_norm=norm(dim),
            hidden_norm=norm(dim),
            fc=linear(2 * dim, dim),
            layer=layer(0, "full_attention"),
            norm=norm(dim),
            gather=Gather.Config(),
            loss_weight=mtp_loss_weight,
        )
    return HybridModel.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=WEIGHT),
        layers=[layer(i, kind) for i, kind in enumerate(arguments.kinds())],
        norm=cast(RMSNorm.Config, norm(dim)),  # TorchTitan also builds other norms
        lm_head=linear(dim, vocab_size),
        enable_weight_tying=enable_weight_tying,
        mtp=mtp,
        arguments=arguments,
    )
