"""The placements of what only Qwen3-Next has: its full attention, the gate of its shared expert."""

from typing import TYPE_CHECKING

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    rowwise_config,
)
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from titan_gdn.layers.gated_attention import GatedAttention
from titan_gdn.models.hybrid.sharding import between_layers, set_hybrid_sharding

if TYPE_CHECKING:
    from titan_gdn.models.qwen3_next.model import Qwen3NextModel


def set_qwen3_next_sharding(
    config: "Qwen3NextModel.Config", *, tp: int, enable_sp: bool, enable_ep: bool
) -> None:
    """As `HybridModel.Config.set_sharding`."""
    set_hybrid_sharding(config, enable_sp=enable_sp, enable_ep=enable_ep)
    for layer in config.layers:
        if layer.attention is not None:
            _set_gated_attention(layer.attention, enable_sp, tp)
        if layer.moe is not None:
            layer.moe.shared_experts.gate.sharding_config = _shared_gate(enable_sp)


def _set_gated_attention(config: GatedAttention.Config, enable_sp: bool, tp: int) -> None:
    config.sharding_config = ShardingConfig(
        in_src_shardings={"x_BLD": between_layers(enable_sp)},
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
    """More TP ranks than key-value heads: the weight whole, the output each rank's own head."""
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
