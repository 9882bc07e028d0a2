"""The placements of Qwen3-Next's parameters and activations on the mesh: a table.

Activations between layers are sharded over the sequence (`dense_sequence_parallel_placement`), or the
same on every TP rank without sequence parallelism. Heads are sharded over TP, in whole head groups.
"""

from typing import TYPE_CHECKING

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    rowwise_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig, SpmdLayout

from titan_gdn.layers.gated_attention import GatedAttention
from titan_gdn.layers.gated_delta_net import GatedDeltaNet

if TYPE_CHECKING:
    from titan_gdn.models.qwen3_next.model import Qwen3NextModel

EXPERTS = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}


def set_sharding(config: "Qwen3NextModel.Config", *, tp: int, enable_sp: bool, enable_ep: bool) -> None:
    """Write the placements into `config` and its layers.

    Args:
        config: the model.
        tp: degree of tensor parallelism.
        enable_sp: sequence parallelism.
        enable_ep: expert parallelism.
    """
    set_decoder_sharding_config(config, enable_sp=enable_sp)
    between = _between(enable_sp)
    for layer in config.layers:
        layer.attention_norm.sharding_config = norm_config(enable_sp=enable_sp)
        layer.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
        if layer.linear_attention is not None:
            set_gated_delta_net(layer.linear_attention, enable_sp)
        if layer.attention is not None:
            _set_gated_attention(layer.attention, between, enable_sp, tp)
        if layer.feed_forward is not None:
            set_dense_ffn_sharding(layer.feed_forward, attn_x_layout=between, enable_sp=enable_sp)
        if layer.moe is not None:
            set_moe_sharding_config(
                layer.moe, enable_ep=enable_ep, enable_sp=enable_sp, expert_param_layout=EXPERTS
            )
            layer.moe.shared_experts.gate.sharding_config = _shared_gate(enable_sp)


def _between(enable_sp: bool) -> SpmdLayout:
    """Hidden states between layers."""
    return dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)


def set_gated_delta_net(config: GatedDeltaNet.Config, enable_sp: bool) -> None:
    """The layer is a region of local tensors: it takes hidden states as they are between layers, and its
    exchange gathers and exchanges what it needs."""
    between = _between(enable_sp)
    per_head, replicated = dense_param_placement(tp=spmd.S(0)), dense_param_placement(tp=spmd.R)
    for module in (config.in_proj_qkv, config.in_proj_z, config.in_proj_ba, config.conv):
        module.sharding_config = ShardingConfig(state_shardings={"weight": per_head})
    config.decay.sharding_config = ShardingConfig(state_shardings={"A_log": per_head, "dt_bias": per_head})
    config.out_proj.sharding_config = ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.S(1))}
    )
    # One weight for the heads of all ranks: its gradient is summed over TP.
    config.norm.sharding_config = ShardingConfig(state_shardings={"weight": replicated})

    summand = dense_activation_placement(tp=spmd.P)
    config.sharding_config = ShardingConfig(
        in_src_shardings={"x_BLD": between, "rate_N": per_head, "dt_bias_N": per_head},
        in_dst_shardings={
            # Without sequence parallelism TP ranks compute with the same states: their gradients are summed.
            "x_BLD": between if enable_sp else dense_activation_placement(tp=spmd.R),
            "rate_N": per_head,
            "dt_bias_N": per_head,
        },
        out_src_shardings=summand,
        out_dst_shardings=between,
        local_map=LocalMapConfig(in_grad_placements=(between if enable_sp else summand, per_head, per_head)),
    )


def _set_gated_attention(
    config: GatedAttention.Config, between: SpmdLayout, enable_sp: bool, tp: int
) -> None:
    config.sharding_config = ShardingConfig(
        in_src_shardings={"x_BLD": between},
        in_dst_shardings={"x_BLD": dense_activation_placement(tp=spmd.R)},
    )
    config.rope.sharding_config = ShardingConfig(state_shardings={"cache": dense_param_placement(tp=spmd.R)})
    config.wq.sharding_config = colwise_config()
    replicated = tp > config.n_key_value_heads
    config.wk.sharding_config = _replicated_key_value() if replicated else colwise_config()
    config.wv.sharding_config = _replicated_key_value() if replicated else colwise_config()
    config.wo.sharding_config = rowwise_config(output_sp=enable_sp)
    config.q_norm.sharding_config = _head_norm()
    config.k_norm.sharding_config = _head_norm()
    # Over CP too the inner attention sees its own shard only, and gathers keys and values itself: TorchTitan
    # declares that under one of its backends, and wraps forwards under the other.
    heads = dense_activation_placement(tp=spmd.S(2))
    inputs = dict.fromkeys(("q_BLNH", "k_BLNH", "v_BLNH"), heads)
    config.inner_attention.sharding_config = ShardingConfig(
        in_src_shardings=inputs,
        in_dst_shardings=inputs,
        out_src_shardings=heads,
        local_map=LocalMapConfig(in_grad_placements=(heads, heads, heads)),
    )


def _head_norm() -> ShardingConfig:
    """A norm inside heads: one weight for the heads of all ranks, so its gradient is summed over TP."""
    heads = dense_activation_placement(tp=spmd.S(2))
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": heads},
        out_src_shardings=heads,
    )


def _replicated_key_value() -> ShardingConfig:
    """`KeyValueLinear` with more TP ranks than heads: the weight whole, the output each rank's own head."""
    replicated = dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": replicated},
        in_dst_shardings={"input": replicated},
        out_src_shardings=dense_activation_placement(tp=spmd.S(2)),
        local_map=LocalMapConfig(in_grad_placements=(dense_activation_placement(tp=spmd.P),)),
    )


def _shared_gate(enable_sp: bool) -> ShardingConfig:
    """The shared expert's gate: computed whole, then cut as the shared expert's output is."""
    replicated = dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        out_src_shardings=replicated,
        out_dst_shardings=dense_sequence_parallel_placement() if enable_sp else replicated,
    )
