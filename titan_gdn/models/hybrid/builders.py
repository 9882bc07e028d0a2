"""Configurations of the parts of hybrid models, and which numbers contradict each other."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torchtitan.models.common import Embedding, FeedForward, Linear
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
from titan_gdn.layers.linear_attention import GroupedConv, LinearAttention, LinearAttentionConfig
from titan_gdn.models.hybrid.model import HybridBlock, HybridModel

NORMAL = partial(nn.init.normal_, std=0.02)  # `initializer_range` of the published configurations
WEIGHT = {"weight": NORMAL}

Arguments = dict[str, Any]
"""The arguments of a model's builder by name. Those that all hybrid models have are called alike."""

KINDS = ("linear_attention", "full_attention")


def linear(in_features: int, out_features: int) -> Linear.Config:
    """A linear without bias."""
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=WEIGHT)


def linear_attention(
    layer: type[LinearAttention], given: Arguments, **own: Module.Config
) -> LinearAttention.Config:
    """A linear attention layer in head groups.

    Args:
        layer: the class of the layer.
        given: has its heads and widths.
        **own: the parts that not every such layer has.
    """
    groups, values = given["n_linear_key_heads"], given["n_linear_value_heads"]
    key_dim, value_dim = given["linear_key_head_dim"], given["linear_value_head_dim"]
    width = 2 * key_dim + values // groups * value_dim
    bound = given["linear_conv_kernel"] ** -0.5  # torch.nn.Conv1d's own, for one channel in
    return layer.Config(
        n_key_heads=groups,
        n_value_heads=values,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        run=LinearAttentionConfig(),
        in_proj_qkv=linear(given["dim"], groups * width),
        conv=GroupedConv.Config(
            n_groups=groups,
            group_width=width,
            kernel_size=given["linear_conv_kernel"],
            param_init={"weight": partial(nn.init.uniform_, a=-bound, b=bound)},
        ),
        out_proj=linear(values * value_dim, given["dim"]),
        **own,
    )


def feed_forward(dim: int, hidden_dim: int) -> FeedForward.Config:
    """A dense SwiGLU."""
    return make_ffn_config(dim=dim, hidden_dim=hidden_dim, w1_param_init=WEIGHT, w2w3_param_init=WEIGHT)


def moe(given: Arguments, shared_experts: FeedForward.Config, **router: Any) -> MoE.Config:
    """Routed and shared experts.

    Args:
        given: has their numbers and widths, and the step of the bias that balances them, or None for none.
        shared_experts: what every token goes to.
        **router: what else `make_router_config` takes: scores, their norm and scale.
    """
    dim, n_experts, top_k = given["dim"], given["n_experts"], given["n_experts_per_token"]
    return make_moe_config(
        num_experts=n_experts,
        router=make_router_config(
            dim=dim, num_experts=n_experts, gate_param_init=WEIGHT, top_k=top_k, **router
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=dim,
                hidden_dim=given["expert_hidden_dim"],
                num_experts=n_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL),
            ),
            token_dispatcher=make_token_dispatcher_config(
                num_experts=n_experts, top_k=top_k, comm_backend="standard", hidden_dim=dim
            ),
        ),
        shared_experts=shared_experts,
        load_balance_coeff=given["load_balance_coeff"],
    )


def decoder(
    model: type[HybridModel],
    given: Arguments,
    *,
    layer_types: list[str],
    linear_attention: Callable[[], LinearAttention.Config],
    attention: Callable[[], BaseAttention.Config],
    mlp: Callable[[int], FeedForward.Config | MoE.Config],
    norm: Callable[[int], Module.Config],
    enable_weight_tying: bool = False,
) -> HybridModel.Config:
    """A model, layer by layer.

    Args:
        model: the class of the model.
        given: has its width and its vocabulary.
        layer_types: of each layer, one of `KINDS`.
        linear_attention: makes a linear attention layer.
        attention: makes a full attention layer.
        mlp: from the number of a layer, its feed-forward: dense, or experts.
        norm: from a width, a norm.
        enable_weight_tying: one weight for embedding and head.
    """
    dim, vocab_size = given["dim"], given["vocab_size"]

    def layer(i: int, kind: str) -> HybridBlock.Config:
        mix = {"attention": attention()} if kind == "full_attention" else {kind: linear_attention()}
        part = mlp(i)
        part = {"moe" if isinstance(part, MoE.Config) else "feed_forward": part}
        return HybridBlock.Config(attention_norm=norm(dim), ffn_norm=norm(dim), **mix, **part)

    return model.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=WEIGHT),
        layers=[layer(i, kind) for i, kind in enumerate(layer_types)],
        norm=norm(dim),
        lm_head=linear(dim, vocab_size),
        enable_weight_tying=enable_weight_tying,
    )


def refuse(given: Arguments, name: str, expected: str) -> None:
    """Raise the `ValueError` that says which argument of a builder is wrong, and what is expected of it."""
    raise ValueError(f"{name} = {given[name]}: expected {expected}")


def check_divides(given: Arguments, part: str, whole: str) -> None:
    """Refuse a `part` that does not divide the `whole`."""
    if given[whole] % given[part]:
        refuse(given, part, f"a divisor of {whole} = {given[whole]}")


_COUNTS = (
    "vocab_size dim n_layers full_attention_interval n_heads n_linear_key_heads n_linear_value_heads "
    "linear_key_head_dim linear_value_head_dim linear_conv_kernel hidden_dim"
).split()
_OF_EXPERTS = ("n_experts_per_token", "expert_hidden_dim", "shared_expert_hidden_dim")


def check_numbers(given: Arguments, *counts: str) -> None:
    """Refuse numbers that contradict each other in any hybrid model.

    Args:
        given: the arguments of a model's builder.
        *counts: names of its own arguments that are at least 1.

    Raises:
        ValueError: names the argument, its value, and what is expected.
    """
    for name in (*_COUNTS, *counts, *(_OF_EXPERTS if given["n_experts"] else ())):
        if given[name] < 1:
            refuse(given, name, "at least 1")
    check_divides(given, "n_linear_key_heads", "n_linear_value_heads")
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
