"""The placements of a hybrid model's parameters and activations on the mesh.

Attention layers declare their own placements (`Config.set_sharding`). This file sets those of all other
modules.
"""

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
from torchtitan.models.common import SigmoidGatedFeedForward
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.sharding import ShardingConfig

from titan_gdn.layers.sharding import between_layers
from titan_gdn.models.hybrid.block import HybridBlock
from titan_gdn.models.hybrid.mtp import MultiTokenPrediction

EXPERTS: dict[str, spmd.PerMeshAxisSpmdType] = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def set_hybrid_sharding(
    config: Decoder.Config,
    blocks: Sequence[HybridBlock.Config],
    mtp: MultiTokenPrediction.Config | None,
    *,
    tp: int,
    enable_sp: bool,
    enable_ep: bool,
) -> None:
    """Sets the placements of all parameters and activations in a model's configuration.

    Args:
        config: the model.
        blocks: all its layers, with that of multi-token prediction.
        mtp: its multi-token prediction.
        tp: degree of tensor parallelism.
        enable_sp: whether hidden states between layers are sharded over TP.
        enable_ep: whether experts are sharded over ranks.
    """
    set_decoder_sharding_config(config, enable_sp=enable_sp)
    if mtp is not None:
        # The hidden states stay sharded after the norm: `mtp.gather` gathers those of both predictions.
        config.norm.sharding_config = norm_config(enable_sp=enable_sp)
        mtp.set_sharding(enable_sp=enable_sp)
    for layer in blocks:
        layer.attention_norm.sharding_config = norm_config(enable_sp=enable_sp)
        layer.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
        attention: Any = layer.linear_attention or layer.attention
        attention.set_sharding(tp=tp, enable_sp=enable_sp)
        if layer.feed_forward is not None:
            set_dense_ffn_sharding(
                layer.feed_forward, attn_x_layout=between_layers(enable_sp), enable_sp=enable_sp
            )
        if layer.moe is not None:
            set_moe_sharding_config(
                layer.moe, enable_ep=enable_ep, enable_sp=enable_sp, expert_param_layout=EXPERTS
            )
            if isinstance(layer.moe.shared_experts, SigmoidGatedFeedForward.Config):
                layer.moe.shared_experts.gate.sharding_config = _shared_gate(enable_sp)


def _shared_gate(enable_sp: bool) -> ShardingConfig:
    """The placements of the shared expert's gate.

    Every TP rank computes the whole gate, which is then sharded as the output of the shared expert is.
    """
    replicated = dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        out_src_shardings=replicated,
        out_dst_shardings=dense_sequence_parallel_placement() if enable_sp else replicated,
    )
