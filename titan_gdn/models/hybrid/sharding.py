"""The placements of parameters and activations on the mesh that hybrid models share: a table.

Activations between layers are sharded over the sequence (`dense_sequence_parallel_placement`), or the
same on every TP rank without sequence parallelism. Heads are sharded over TP, in whole head groups.
"""

from typing import TYPE_CHECKING

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
    norm_config,
    set_decoder_sharding_config,
    set_dense_ffn_sharding,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig, SpmdLayout

from titan_gdn.layers.linear_attention import LinearAttention

if TYPE_CHECKING:
    from titan_gdn.models.hybrid.model import HybridModel

EXPERTS = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}

# The modules of the linear attention layers, each of which has some of them.
PER_HEAD = ("in_proj_qkv", "in_proj_z", "in_proj_ba", "in_proj_b", "f_b", "g_b", "conv")
REPLICATED = ("f_a", "g_a", "norm")


def set_hybrid_sharding(config: "HybridModel.Config", *, enable_sp: bool, enable_ep: bool) -> None:
    """Write the placements into `config` and its layers, but for their full attention.

    Args:
        config: the model.
        enable_sp: sequence parallelism.
        enable_ep: expert parallelism.
    """
    set_decoder_sharding_config(config, enable_sp=enable_sp)
    for layer in config.layers:
        layer.attention_norm.sharding_config = norm_config(enable_sp=enable_sp)
        layer.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
        if layer.linear_attention is not None:
            set_linear_attention(layer.linear_attention, enable_sp)
        if layer.feed_forward is not None:
            set_dense_ffn_sharding(
                layer.feed_forward, attn_x_layout=between_layers(enable_sp), enable_sp=enable_sp
            )
        if layer.moe is not None:
            set_moe_sharding_config(
                layer.moe, enable_ep=enable_ep, enable_sp=enable_sp, expert_param_layout=EXPERTS
            )


def between_layers(enable_sp: bool) -> SpmdLayout:
    """Hidden states between layers."""
    return dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)


def set_linear_attention(config: LinearAttention.Config, enable_sp: bool) -> None:
    """A linear attention layer, whose exchange gathers and exchanges what it needs."""
    for names, tp in ((PER_HEAD, spmd.S(0)), (REPLICATED, spmd.R), (("out_proj",), spmd.S(1))):
        set_weights(tp, *(getattr(config, name) for name in names if hasattr(config, name)))
    per_head = dense_param_placement(tp=spmd.S(0))
    config.decay.sharding_config = ShardingConfig(state_shardings={"A_log": per_head, "dt_bias": per_head})
    config.sharding_config = local_region(enable_sp, "x_BLD", rate_N=per_head, dt_bias_N=per_head)


def set_weights(tp: spmd.PerMeshAxisSpmdType, *modules: Module.Config) -> None:
    """Give the weight of each module this placement over TP."""
    for module in modules:
        module.sharding_config = ShardingConfig(state_shardings={"weight": dense_param_placement(tp=tp)})


def local_region(enable_sp: bool, x: str, **others: SpmdLayout) -> ShardingConfig:
    """A layer that works on local tensors: it takes hidden states as they are between layers.

    Args:
        enable_sp: sequence parallelism.
        x: the name of the hidden states, first argument of the layer's forward.
        **others: its further positional arguments in order, and their placements.
    """
    between, summand = between_layers(enable_sp), dense_activation_placement(tp=spmd.P)
    # Without sequence parallelism TP ranks compute with the same states: their gradients are summed.
    inside = between if enable_sp else dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        in_src_shardings={x: between, **others},
        in_dst_shardings={x: inside, **others},
        out_src_shardings=summand,
        out_dst_shardings=between,
        local_map=LocalMapConfig(in_grad_placements=(between if enable_sp else summand, *others.values())),
    )
