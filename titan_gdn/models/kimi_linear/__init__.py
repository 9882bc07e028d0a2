"""Kimi Linear: its flavours, and the model by flavour."""

import math
from functools import partial

import torch
from torch import nn
from torchtitan.models.common import FeedForward, RMSNorm
from torchtitan.models.common.moe import MoE
from torchtitan.tools.utils import device_type

from titan_gdn.layers.document_attention import inner_attention
from titan_gdn.layers.kimi_delta_attention import KimiDeltaAttention
from titan_gdn.layers.latent_attention import LatentAttention
from titan_gdn.layers.linear_attention import Decay
from titan_gdn.layers.norms import GatedRMSNorm
from titan_gdn.models.hybrid import Flavors, builders, model_spec
from titan_gdn.models.kimi_linear.model import KimiLinearModel
from titan_gdn.models.kimi_linear.state_dict_adapter import KimiLinearStateDictAdapter


@torch.no_grad()
def _decay_rate(A_log: torch.Tensor) -> None:
    """`A` uniform in (1, 16)."""
    A_log.uniform_(1, 16).log_()


@torch.no_grad()
def _dt_bias(dt_bias: torch.Tensor) -> None:
    """The inverse softplus of steps whose logarithm is uniform between those of 0.001 and 0.1."""
    dt = dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp_()
    dt_bias.add_(torch.log(-torch.expm1(-dt)))


def kimi_linear(
    *,
    vocab_size: int = 163840,
    dim: int = 2304,
    n_layers: int = 27,
    full_attention_interval: int = 4,
    layer_types: list[str] | None = None,
    norm_eps: float = 1e-5,
    n_heads: int = 32,
    key_head_dim: int = 128,
    qk_rope_head_dim: int = 64,
    value_head_dim: int = 128,
    kv_lora_rank: int = 512,
    n_linear_key_heads: int = 32,
    n_linear_value_heads: int = 32,
    linear_key_head_dim: int = 128,
    linear_value_head_dim: int = 128,
    linear_gate_rank: int = 128,
    linear_conv_kernel: int = 4,
    hidden_dim: int = 9216,
    n_dense_layers: int = 1,
    n_experts: int = 256,
    n_experts_per_token: int = 8,
    expert_hidden_dim: int = 1024,
    shared_expert_hidden_dim: int = 1024,
    route_norm: bool = True,
    route_scale: float = 2.446,
    load_balance_coeff: float = 1e-3,
) -> KimiLinearModel.Config:
    """Build a configuration. The defaults are the published Kimi-Linear-48B-A3B (`config.json`).

    Args:
        vocab_size: rows of the embedding.
        dim: width of the hidden states.
        n_layers: number of layers.
        full_attention_interval: the layers whose numbers it divides attend fully, and the last one does.
        layer_types: "linear_attention" or "full_attention" per layer, instead of the interval.
        norm_eps: epsilon of the norms, but for that of compressed keys and values, 1e-6.
        n_heads: heads of the latent attention.
        key_head_dim: width of a head's own part of its key.
        qk_rope_head_dim: width of the part that all heads share.
        value_head_dim: width of its value heads.
        kv_lora_rank: width of what keys and values are read from.
        n_linear_key_heads: key heads of Kimi Delta Attention, that is, head groups.
        n_linear_value_heads: its value heads; the published model has as many.
        linear_key_head_dim: width of its key heads.
        linear_value_head_dim: width of its value heads.
        linear_gate_rank: width of the bottlenecks of its gates.
        linear_conv_kernel: tokens that its convolution sees.
        hidden_dim: hidden width of dense feed-forwards.
        n_dense_layers: how many layers, the first, are dense.
        n_experts: routed experts of the others; 0 makes every layer dense.
        n_experts_per_token: how many of them a token goes to.
        expert_hidden_dim: hidden width of a routed expert.
        shared_expert_hidden_dim: hidden width of the shared experts, together.
        route_norm: scale the chosen experts' scores to sum to 1.
        route_scale: factor of the scores after that.
        load_balance_coeff: step of the bias that balances experts (arXiv 2408.15664), part of the published
            model; one far below float32's resolution leaves it as it was loaded.

    Raises:
        ValueError: numbers that contradict each other.
    """
    given = locals()
    _check(given)
    full = {*range(full_attention_interval, n_layers, full_attention_interval), n_layers}  # counted from 1
    if layer_types is None:
        layer_types = ["full_attention" if i + 1 in full else "linear_attention" for i in range(n_layers)]

    def norm(width: int, eps: float = norm_eps) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=eps)

    def kimi_delta_attention() -> KimiDeltaAttention.Config:
        return builders.linear_attention(
            KimiDeltaAttention,
            given,
            in_proj_b=builders.linear(dim, n_linear_value_heads),
            f_a=builders.linear(dim, linear_gate_rank),
            f_b=builders.linear(linear_gate_rank, n_linear_value_heads * linear_key_head_dim),
            g_a=builders.linear(dim, linear_gate_rank),
            g_b=builders.linear(linear_gate_rank, n_linear_value_heads * linear_value_head_dim),
            decay=Decay.Config(
                n_value_heads=n_linear_value_heads,
                channels=linear_key_head_dim,
                param_init={"A_log": _decay_rate, "dt_bias": _dt_bias},
            ),
            norm=GatedRMSNorm.Config(
                dim=linear_value_head_dim,
                eps=norm_eps,
                gate="sigmoid",
                param_init={"weight": nn.init.ones_},
            ),
        )

    def latent_attention() -> LatentAttention.Config:
        return LatentAttention.Config(
            n_heads=n_heads,
            kv_lora_rank=kv_lora_rank,
            key_head_dim=key_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            value_head_dim=value_head_dim,
            wq=builders.linear(dim, n_heads * (key_head_dim + qk_rope_head_dim)),
            wkv_a=builders.linear(dim, kv_lora_rank + qk_rope_head_dim),
            kv_norm=norm(kv_lora_rank, eps=1e-6),
            wkv_b=builders.linear(kv_lora_rank, n_heads * (key_head_dim + value_head_dim)),
            wo=builders.linear(n_heads * value_head_dim, dim),
            inner_attention=inner_attention(device_type),
        )

    def mlp(i: int) -> FeedForward.Config | MoE.Config:
        if n_experts == 0 or i < n_dense_layers:
            return builders.feed_forward(dim, hidden_dim)
        return builders.moe(
            given,
            shared_experts=builders.feed_forward(dim, shared_expert_hidden_dim),
            score_func="sigmoid",
            route_norm=route_norm,
            route_scale=route_scale,
        )

    return builders.decoder(
        KimiLinearModel,
        given,
        layer_types=layer_types,
        linear_attention=kimi_delta_attention,
        attention=latent_attention,
        mlp=mlp,
        norm=norm,
    )


def _check(given: builders.Arguments) -> None:
    """Refuse numbers that contradict each other."""
    builders.check_numbers(
        given, "key_head_dim", "qk_rope_head_dim", "value_head_dim", "kv_lora_rank", "linear_gate_rank"
    )
    if given["n_dense_layers"] < 0:
        builders.refuse(given, "n_dense_layers", "at least 0")
    if given["n_dense_layers"] > given["n_layers"]:
        builders.refuse(given, "n_dense_layers", f"at most n_layers = {given['n_layers']}")
    if not given["route_scale"] > 0:
        builders.refuse(given, "route_scale", "a positive number")


_DEBUG = {
    "vocab_size": 264,  # the byte tokenizer's 257, so that up to 8 TP ranks share it evenly
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "key_head_dim": 32,
    "qk_rope_head_dim": 16,
    "value_head_dim": 32,
    "kv_lora_rank": 64,
    "n_linear_key_heads": 4,
    "n_linear_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_gate_rank": 32,
    "hidden_dim": 384,
}
_EXPERTS = {"n_experts_per_token": 2, "expert_hidden_dim": 96, "shared_expert_hidden_dim": 96}

flavors: Flavors = {
    "debug": partial(kimi_linear, **_DEBUG, n_experts=0),
    "debug_moe": partial(kimi_linear, **_DEBUG, **_EXPERTS, n_experts=8),
    "48B-A3B": kimi_linear,
}


model_registry = partial(model_spec, "kimi_linear", flavors, KimiLinearStateDictAdapter)
