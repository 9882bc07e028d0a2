"""Qwen3-Next: its flavours, and the model by flavour."""

import math
from functools import partial

import torch
from torch import nn
from torchtitan.models.common import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.moe import MoE
from torchtitan.tools.utils import device_type

from titan_gdn.layers.document_attention import inner_attention
from titan_gdn.layers.gated_attention import GatedAttention
from titan_gdn.layers.gated_delta_net import GatedDeltaNet
from titan_gdn.layers.linear_attention import Decay
from titan_gdn.layers.norms import GatedRMSNorm, OffsetRMSNorm
from titan_gdn.layers.rotary import PartialRotary
from titan_gdn.models.hybrid import Flavors, builders, model_spec
from titan_gdn.models.qwen3_next.model import Qwen3NextModel
from titan_gdn.models.qwen3_next.state_dict_adapter import Qwen3NextStateDictAdapter


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
        full_attention_interval: the layers whose numbers it divides attend fully, the others linearly.
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
    given = locals()
    _check(given)
    if layer_types is None:
        layer_types = [
            "linear_attention" if (i + 1) % full_attention_interval else "full_attention"
            for i in range(n_layers)
        ]

    def norm(width: int) -> OffsetRMSNorm.Config:
        return OffsetRMSNorm.Config(dim=width, eps=norm_eps, param_init={"weight": nn.init.zeros_})

    def gated_delta_net() -> GatedDeltaNet.Config:
        return builders.linear_attention(
            GatedDeltaNet,
            given,
            in_proj_z=builders.linear(dim, n_linear_value_heads * linear_value_head_dim),
            in_proj_ba=builders.linear(dim, 2 * n_linear_value_heads),
            decay=Decay.Config(
                n_value_heads=n_linear_value_heads,
                param_init={"A_log": _decay_rate, "dt_bias": nn.init.ones_},
            ),
            norm=GatedRMSNorm.Config(
                dim=linear_value_head_dim, eps=norm_eps, param_init={"weight": nn.init.ones_}
            ),
        )

    def gated_attention() -> GatedAttention.Config:
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
            wq=builders.linear(dim, 2 * n_heads * head_dim),
            wk=builders.linear(dim, n_key_value_heads * head_dim),
            wv=builders.linear(dim, n_key_value_heads * head_dim),
            wo=builders.linear(n_heads * head_dim, dim),
            q_norm=norm(head_dim),
            k_norm=norm(head_dim),
            inner_attention=inner_attention(device_type),
        )

    def mlp(i: int) -> FeedForward.Config | MoE.Config:
        sparse = n_experts > 0 and (i + 1) % decoder_sparse_step == 0 and i not in (mlp_only_layers or [])
        if not sparse:
            return builders.feed_forward(dim, hidden_dim)
        shared = builders.feed_forward(dim, shared_expert_hidden_dim)
        return builders.moe(
            given,
            shared_experts=SigmoidGatedFeedForward.Config(
                w1=shared.w1, w2=shared.w2, w3=shared.w3, gate=builders.linear(dim, 1)
            ),
            score_func="softmax",
            route_norm=norm_topk_prob,
        )

    return builders.decoder(
        Qwen3NextModel,
        given,
        layer_types=layer_types,
        linear_attention=gated_delta_net,
        attention=gated_attention,
        mlp=mlp,
        norm=norm,
        enable_weight_tying=tie_word_embeddings,
    )


def _check(given: builders.Arguments) -> None:
    """Refuse numbers that contradict each other."""
    builders.check_numbers(given, "n_key_value_heads", "head_dim", "context_length", "decoder_sparse_step")
    builders.check_divides(given, "n_key_value_heads", "n_heads")
    if not 1 < given["rope_theta"] < math.inf:
        builders.refuse(given, "rope_theta", "a number above 1")
    if not 1 <= given["yarn_factor"] < math.inf:
        builders.refuse(given, "yarn_factor", "a number from 1 (no extension)")
    turned = given["head_dim"] * given["partial_rotary_factor"]
    if not 2 <= turned <= given["head_dim"] or int(turned) % 2:
        expected = f"a share of head_dim = {given['head_dim']} that is an even number"
        builders.refuse(given, "partial_rotary_factor", expected)
    for layer in given["mlp_only_layers"] or []:
        if not 0 <= layer < given["n_layers"]:
            builders.refuse(given, "mlp_only_layers", f"layers from 0 to {given['n_layers'] - 1}")


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

flavors: Flavors = {
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


model_registry = partial(model_spec, "qwen3_next", flavors, Qwen3NextStateDictAdapter)
