"""The placements of a hybrid model's parameters and activations on the mesh.

Layers declare their own placements (`Config.set_sharding`); this file adds what surrounds them.
"""

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

EXPERTS = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def set_hybrid_sharding(config: Decoder.Config, *, tp: int, enable_sp: bool, enable_ep: bool) -> None:
    """Write the placements of every parameter and activation into a model's configuration.

    Args:
        config: the model.
        tp: degree of tensor parallelism.
        enable_sp: sequence parallelism.
        enable_ep: expert parallelism.
    """
    set_decoder_sharding_config(config, enable_sp=enable_sp)
    for layer in config.layers:
        layer.attention_norm.sharding_config = norm_config(enable_sp=enable_sp)
        layer.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
        (layer.linear_attention or layer.attention).set_sharding(tp=tp, enable_sp=enable_sp)
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
    """The gate of the shared expert: computed whole, then sharded as the shared expert's output is."""
    replicated = dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        out_src_shardings=replicated,
        out_dst_shardings=dense_sequence_parallel_placement() if enable_sp else replicated,
    )
