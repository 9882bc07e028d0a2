"""Configurations of the parts that hybrid models are built from, and the numbers that contradict each other."""

from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import Embedding, FeedForward, Linear
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.moe import MoE, RoutedExperts

from titan_gdn.layers.experts import GroupedExperts
from titan_gdn.layers.gated_delta_net import GroupedConv

NORMAL = partial(nn.init.normal_, std=0.02)  # `initializer_range` of the published configurations
WEIGHT = {"weight": NORMAL}

KINDS = ("linear_attention", "full_attention")


def linear(in_features: int, out_features: int) -> Linear.Config:
    """A linear without bias."""
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=WEIGHT)


def embedding(vocab_size: int, dim: int) -> Embedding.Config:
    """The tokens' embedding."""
    return Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=WEIGHT)


def grouped_conv(n_groups: int, group_width: int, kernel_size: int) -> GroupedConv.Config:
    """The short convolution of a linear attention layer."""
    bound = kernel_size**-0.5  # torch.nn.Conv1d's own, for one channel in
    return GroupedConv.Config(
        n_groups=n_groups,
        group_width=group_width,
        kernel_size=kernel_size,
        param_init={"weight": partial(nn.init.uniform_, a=-bound, b=bound)},
    )


def feed_forward(dim: int, hidden_dim: int) -> FeedForward.Config:
    """A dense SwiGLU."""
    return make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=WEIGHT, w2w3_param_init=WEIGHT)


def moe(
    *,
    dim: int,
    hidden_dim: int,
    n_experts: int,
    top_k: int,
    shared_experts: FeedForward.Config,
    load_balance_coeff: float | None,
    **router: Any,
) -> MoE.Config:
    """Routed and shared experts.

    Args:
        dim: width of the hidden states.
        hidden_dim: hidden width of a routed expert.
        n_experts: routed experts.
        top_k: how many of them a token goes to.
        shared_experts: what every token goes to.
        load_balance_coeff: step of the bias that balances experts, or None for none.
        **router: what else `make_router_config` takes: scores, their norm and scale.
    """
    return make_moe_config(
        num_experts=n_experts,
        router=make_router_config(
            dim=dim, num_experts=n_experts, gate_param_init=WEIGHT, top_k=top_k, **router
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=dim,
                hidden_dim=hidden_dim,
                num_experts=n_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL),
            ),
            token_dispatcher=make_token_dispatcher_config(
                num_experts=n_experts, top_k=top_k, comm_backend="standard", hidden_dim=dim
            ),
        ),
        shared_experts=shared_experts,
        load_balance_coeff=load_balance_coeff,
    )


def refuse(given: dict[str, Any], name: str, expected: str) -> None:
    """Raise the `ValueError` that says which argument of a builder is wrong, and what is expected of it."""
    raise ValueError(f"{name} = {given[name]}: expected {expected}")


_OF_EXPERTS = ("n_experts_per_token", "expert_hidden_dim", "shared_expert_hidden_dim")


def check_numbers(given: dict[str, Any], at_least_1: str, divisors: dict[str, str]) -> None:
    """Refuse numbers that contradict each other in any hybrid model.

    Args:
        given: the arguments of a model's builder.
        at_least_1: names of those that count something or are a width, but for the experts'.
        divisors: by name, the arguments that divide others, and those others.

    Raises:
        ValueError: names the argument, its value, and what is expected.
    """
    for name in (*at_least_1.split(), *(_OF_EXPERTS if given["n_experts"] else ())):
        if given[name] < 1:
            refuse(given, name, "at least 1")
    for part, whole in divisors.items():
        if given[whole] % given[part]:
            refuse(given, part, f"a divisor of {whole} = {given[whole]}")
    if not 0 < given["norm_eps"] < 1:
        refuse(given, "norm_eps", "a number between 0 and 1")
    if given["load_balance_coeff"] is not None and not given["load_balance_coeff"] > 0:
        refuse(given, "load_balance_coeff", "a positive number")
    if given["n_experts"] < 0:
        refuse(given, "n_experts", "at least 0, which makes every layer dense")
    if given["n_experts"]:
        if given["n_experts_per_token"] > given["n_experts"]:
            refuse(given, "n_experts_per_token", f"at most n_experts = {given['n_experts']}")
        for name in ("dim", "expert_hidden_dim"):
            if given[name] % 8:  # torch's grouped products want rows of 16 bytes
                refuse(given, name, "a multiple of 8, with experts")
    kinds = given["layer_types"]
    if kinds is not None and (len(kinds) != given["n_layers"] or not set(kinds) <= set(KINDS)):
        refuse(given, "layer_types", f"one of {KINDS} for each of the {given['n_layers']} layers")
