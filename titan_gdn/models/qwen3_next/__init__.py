"""Qwen3-Next: its flavours, and the model by flavour."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common import Embedding, Linear, SigmoidGatedFeedForward
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import device_type

from titan_gdn.layers.experts import GroupedExperts
from titan_gdn.layers.gated_attention import (
    DocumentAttention,
    DocumentFlexAttention,
    GatedAttention,
    KeyValueLinear,
)
from titan_gdn.layers.gated_delta_net import Decay, GatedDeltaNet, GroupedConv
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.layers.norms import GatedRMSNorm, ZeroCentredRMSNorm
from titan_gdn.layers.rotary import PartialRotary
from titan_gdn.models.qwen3_next.model import Qwen3NextBlock, Qwen3NextModel
from titan_gdn.models.qwen3_next.parallelize import parallelize_qwen3_next
from titan_gdn.models.qwen3_next.state_dict_adapter import Qwen3NextStateDictAdapter

_NORMAL = partial(nn.init.normal_, std=0.02)  # `initializer_range` of the published configuration
_WEIGHT = {"weight": _NORMAL}


@torch.no_grad()
def _decay_rate(A_log: torch.Tensor) -> None:
    """`A` uniform in (0.01, 16): away from 0, whose logarithm is not finite (transformers #47944)."""
    A_log.uniform_(0.01, 16).log_()


def qwen3_next(
    *,
    vocab_size: int = 151936,
    dim: int = 2048,
    n_layers: int = 48,
    full_attention_interval: int = 4,
    layer_types: list[str] | None = None,
    norm_eps: float = 1e-6,
    tie_word_embeddings: bool = False,
    n_heads: int = 16,
    n_key_value_heads: int = 2,
    head_dim: int = 256,
    partial_rotary_factor: float = 0.25,
    rope_theta: float = 1e7,
    context_length: int = 262144,
    yarn_factor: float = 1.0,
    n_linear_key_heads: int = 16,
    n_linear_value_heads: int = 32,
    linear_key_head_dim: int = 128,
    linear_value_head_dim: int = 128,
    linear_conv_kernel: int = 4,
    hidden_dim: int = 5120,
    n_experts: int = 512,
    n_experts_per_token: int = 10,
    expert_hidden_dim: int = 512,
    shared_expert_hidden_dim: int = 512,
    norm_topk_prob: bool = True,
    decoder_sparse_step: int = 1,
    mlp_only_layers: list[int] | None = None,
    load_balance_coeff: float | None = None,
) -> Qwen3NextModel.Config:
    """Build a configuration. The defaults are the published Qwen3-Next-80B-A3B (`config.json`).

    Args:
        vocab_size: rows of the embedding.
        dim: width of the hidden states.
        n_layers: number of layers.
        full_attention_interval: every so manieth layer attends fully, the others linearly.
        layer_types: "linear_attention" or "full_attention" per layer, instead of the interval.
        norm_eps: epsilon of all norms.
        tie_word_embeddings: one weight for embedding and head.
        n_heads: query heads of the full attention.
        n_key_value_heads: its key-value heads.
        head_dim: width of its heads.
        partial_rotary_factor: share of that width that turns.
        rope_theta: base of the rotary frequencies.
        context_length: tokens without YaRN.
        yarn_factor: YaRN (arXiv 2309.00071) extends `context_length` by this factor.
        n_linear_key_heads: key heads of Gated DeltaNet, that is, head groups.
        n_linear_value_heads: its value heads.
        linear_key_head_dim: width of its key heads.
        linear_value_head_dim: width of its value heads.
        linear_conv_kernel: tokens that its convolution sees.
        hidden_dim: hidden width of dense feed-forwards.
        n_experts: routed experts; 0 makes every layer dense.
        n_experts_per_token: how many of them a token goes to.
        expert_hidden_dim: hidden width of a routed expert.
        shared_expert_hidden_dim: hidden width of the shared expert.
        norm_topk_prob: scale the chosen experts' scores to sum to 1.
        decoder_sparse_step: layer `i` is sparse where this divides `i + 1`.
        mlp_only_layers: layers that are dense all the same.
        load_balance_coeff: step of TorchTitan's bias that balances experts (arXiv 2408.15664). The
            published model has no such bias, and Hugging Face checkpoints no place for it: off.

    Raises:
        ValueError: numbers that contradict each other.
    """
    _check(**locals())
    if layer_types is None:
        layer_types = [
            "linear_attention" if (i + 1) % full_attention_interval else "full_attention"
            for i in range(n_layers)
        ]
    kinds = ("linear_attention", "full_attention")
    if len(layer_types) != n_layers or not set(layer_types) <= set(kinds):
        raise ValueError(
            f"layer_types must name one of {kinds} for each of the {n_layers} layers, not {layer_types}"
        )

    def norm(width: int) -> ZeroCentredRMSNorm.Config:
        return ZeroCentredRMSNorm.Config(dim=width, eps=norm_eps, param_init={"weight": nn.init.zeros_})

    def linear_attention() -> GatedDeltaNet.Config:
        group = n_linear_value_heads // n_linear_key_heads
        width = 2 * linear_key_head_dim + group * linear_value_head_dim
        values = n_linear_value_heads * linear_value_head_dim
        bound = linear_conv_kernel**-0.5  # torch.nn.Conv1d's own, for one channel in
        return GatedDeltaNet.Config(
            n_key_heads=n_linear_key_heads,
            n_value_heads=n_linear_value_heads,
            key_head_dim=linear_key_head_dim,
            value_head_dim=linear_value_head_dim,
            run=LinearAttentionConfig(),
            in_proj_qkv=_linear(dim, n_linear_key_heads * width),
            in_proj_z=_linear(dim, values),
            in_proj_ba=_linear(dim, 2 * n_linear_value_heads),
            conv=GroupedConv.Config(
                n_groups=n_linear_key_heads,
                group_width=width,
                kernel_size=linear_conv_kernel,
                param_init={"weight": partial(nn.init.uniform_, a=-bound, b=bound)},
            ),
            decay=Decay.Config(
                n_value_heads=n_linear_value_heads,
                param_init={"A_log": _decay_rate, "dt_bias": nn.init.ones_},
            ),
            norm=GatedRMSNorm.Config(
                dim=linear_value_head_dim, eps=norm_eps, param_init={"weight": nn.init.ones_}
            ),
            out_proj=_linear(values, dim),
        )

    def attention() -> GatedAttention.Config:
        def key_value() -> KeyValueLinear.Config:
            return KeyValueLinear.Config(
                in_features=dim,
                out_features=n_key_value_heads * head_dim,
                n_heads=n_key_value_heads,
                param_init=_WEIGHT,
            )

        return GatedAttention.Config(
            n_heads=n_heads,
            n_key_value_heads=n_key_value_heads,
            head_dim=head_dim,
            rope=PartialRotary.Config(
                dim=int(head_dim * partial_rotary_factor),
                max_seq_len=int(context_length * yarn_factor),
                theta=rope_theta,
                scaling="yarn" if yarn_factor > 1 else "none",
                rope_factor=yarn_factor,
                original_seq_len=context_length,
            ),
            wq=_linear(dim, 2 * n_heads * head_dim),
            wk=key_value(),
            wv=key_value(),
            wo=_linear(n_heads * head_dim, dim),
            q_norm=norm(head_dim),
            k_norm=norm(head_dim),
            # FlexAttention has no backward on CPU.
            inner_attention=DocumentAttention.Config()
            if device_type == "cpu"
            else DocumentFlexAttention.Config(),
        )

    def feed_forward(i: int) -> dict:
        sparse = n_experts > 0 and (i + 1) % decoder_sparse_step == 0 and i not in (mlp_only_layers or [])
        if not sparse:
            ffn = make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=_WEIGHT, w2w3_param_init=_WEIGHT
            )
            return {"feed_forward": ffn}
        return {
            "moe": _moe(
                dim=dim,
                n_experts=n_experts,
                top_k=n_experts_per_token,
                hidden_dim=expert_hidden_dim,
                shared_hidden_dim=shared_expert_hidden_dim,
                norm_topk_prob=norm_topk_prob,
                load_balance_coeff=load_balance_coeff,
            )
        }

    def layer(i: int, kind: str) -> Qwen3NextBlock.Config:
        mix = (
            {"attention": attention()}
            if kind == "full_attention"
            else {"linear_attention": linear_attention()}
        )
        return Qwen3NextBlock.Config(attention_norm=norm(dim), ffn_norm=norm(dim), **mix, **feed_forward(i))

    return Qwen3NextModel.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=_WEIGHT),
        layers=[layer(i, kind) for i, kind in enumerate(layer_types)],
        norm=norm(dim),
        lm_head=_linear(dim, vocab_size),
        enable_weight_tying=tie_word_embeddings,
    )


def _linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features, param_init=_WEIGHT)


def _moe(
    *,
    dim: int,
    n_experts: int,
    top_k: int,
    hidden_dim: int,
    shared_hidden_dim: int,
    norm_topk_prob: bool,
    load_balance_coeff: float | None,
) -> object:
    shared = make_ffn_config(
        dim=dim, hidden_dim=shared_hidden_dim, w1_param_init=_WEIGHT, w2w3_param_init=_WEIGHT
    )
    return make_moe_config(
        num_experts=n_experts,
        router=make_router_config(
            dim=dim,
            num_experts=n_experts,
            gate_param_init=_WEIGHT,
            top_k=top_k,
            score_func="softmax",
            route_norm=norm_topk_prob,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=dim,
                hidden_dim=hidden_dim,
                num_experts=n_experts,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), _NORMAL),
            ),
            token_dispatcher=make_token_dispatcher_config(
                num_experts=n_experts, top_k=top_k, comm_backend="standard", hidden_dim=dim
            ),
        ),
        shared_experts=SigmoidGatedFeedForward.Config(
            w1=shared.w1, w2=shared.w2, w3=shared.w3, gate=_linear(dim, 1)
        ),
        load_balance_coeff=load_balance_coeff,
    )


_AT_LEAST_1 = (
    "vocab_size dim n_layers full_attention_interval n_heads n_key_value_heads head_dim context_length "
    "n_linear_key_heads n_linear_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel "
    "hidden_dim decoder_sparse_step"
).split()
_OF_EXPERTS = ("n_experts_per_token", "expert_hidden_dim", "shared_expert_hidden_dim")


def _check(**given: Any) -> None:
    """Refuse numbers that contradict each other; `given` are the arguments of `qwen3_next`."""

    def refuse(name: str, expected: str) -> None:
        raise ValueError(f"{name} = {given[name]}: expected {expected}")

    for name in (*_AT_LEAST_1, *(_OF_EXPERTS if given["n_experts"] else ())):
        if given[name] < 1:
            refuse(name, "at least 1")
    for whole, part in (("n_heads", "n_key_value_heads"), ("n_linear_value_heads", "n_linear_key_heads")):
        if given[whole] % given[part]:
            refuse(part, f"a divisor of {whole} = {given[whole]}")
    if not 0 < given["norm_eps"] < 1:
        refuse("norm_eps", "a number between 0 and 1")
    if not 1 < given["rope_theta"] < math.inf:
        refuse("rope_theta", "a number above 1")
    if not 1 <= given["yarn_factor"] < math.inf:
        refuse("yarn_factor", "a number from 1 (no extension)")
    turned = given["head_dim"] * given["partial_rotary_factor"]
    if not 2 <= turned <= given["head_dim"] or int(turned) % 2:
        refuse("partial_rotary_factor", f"a share of head_dim = {given['head_dim']} that is an even number")
    if given["n_experts"] < 0:
        refuse("n_experts", "at least 0, which makes every layer dense")
    if given["n_experts"]:
        if given["n_experts_per_token"] > given["n_experts"]:
            refuse("n_experts_per_token", f"at most n_experts = {given['n_experts']}")
        for name in ("dim", "expert_hidden_dim"):
            if given[name] % 8:  # torch's grouped products want rows of 16 bytes
                refuse(name, "a multiple of 8, with experts")
    if given["load_balance_coeff"] is not None and not given["load_balance_coeff"] > 0:
        refuse("load_balance_coeff", "a positive number, or none")
    for layer in given["mlp_only_layers"] or []:
        if not 0 <= layer < given["n_layers"]:
            refuse("mlp_only_layers", f"layers from 0 to {given['n_layers'] - 1}")


_DEBUG = {
    "vocab_size": 264,  # the byte tokenizer's 257, so that up to 8 TP ranks share it evenly
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "head_dim": 32,
    "context_length": 8192,
    "n_linear_key_heads": 4,
    "n_linear_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hidden_dim": 384,
}

flavors: dict[str, Callable[..., Qwen3NextModel.Config]] = {
    "debug": partial(qwen3_next, **_DEBUG, n_experts=0),
    "debug_moe": partial(
        qwen3_next,
        **_DEBUG,
        n_experts=8,
        n_experts_per_token=2,
        expert_hidden_dim=96,
        shared_expert_hidden_dim=96,
    ),
    "80B-A3B": qwen3_next,
    "80B-A3B-1M": partial(qwen3_next, yarn_factor=4.0),  # "1M" as the model card says: YaRN, factor 4
}


def model_registry(
    flavor: str, *, linear_attention: LinearAttentionConfig | None = None, **overrides: object
) -> ModelSpec:
    """The model of a flavour, as TorchTitan's trainer takes it.

    Args:
        flavor: a name in `flavors`.
        linear_attention: how its linear attention is run.
        **overrides: keyword arguments of `qwen3_next`.
    """
    if flavor not in flavors:
        raise ValueError(f"unknown flavor {flavor!r}; the flavours of qwen3_next are {', '.join(flavors)}")
    model = flavors[flavor](**overrides)
    for layer in model.linear_layers():
        layer.run = linear_attention or LinearAttentionConfig()
    return ModelSpec(
        name="qwen3_next",
        flavor=flavor,
        model=model,
        parallelize_fn=parallelize_qwen3_next,
        pipelining_fn=None,
        post_optimizer_build_fn=register_moe_load_balancing_hook,
        state_dict_adapter=Qwen3NextStateDictAdapter,
    )
