"""The vocabulary in which layers declare the placements of their parameters and activations.

Between layers, hidden states are sharded over the sequence under sequence parallelism, and replicated over TP
without it. Each layer's `Config.set_sharding` says the rest with these functions.
"""

import spmd_types as spmd
from torchtitan.models.common.decoder_sharding import (
    dense_activation_placement,
    dense_param_placement,
    dense_sequence_parallel_placement,
)
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig, SpmdLayout


def between_layers(enable_sp: bool) -> SpmdLayout:
    """The placement of hidden states between layers."""
    return dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)


def set_weights(tp: spmd.PerMeshAxisSpmdType, *modules: Module.Config) -> None:
    """Give the weight of each module the placement `tp` on the TP sub-mesh."""
    for module in modules:
        module.sharding_config = ShardingConfig(state_shardings={"weight": dense_param_placement(tp=tp)})


def local_region(enable_sp: bool, x: str, **others: SpmdLayout) -> ShardingConfig:
    """The placements of a layer that computes on local tensors and gathers what it needs itself.

    Args:
        enable_sp: sequence parallelism.
        x: name of the hidden states, the first argument of the layer's forward.
        **others: names of the other positional arguments in order, with their placements.
    """
    between, partial = between_layers(enable_sp), dense_activation_placement(tp=spmd.P)
    # Without sequence parallelism all TP ranks compute with the same hidden states, so their gradients are
    # partial sums.
    inside = between if enable_sp else dense_activation_placement(tp=spmd.R)
    return ShardingConfig(
        in_src_shardings={x: between, **others},
        in_dst_shardings={x: inside, **others},
        out_src_shardings=partial,
        out_dst_shardings=between,
        local_map=LocalMapConfig(in_grad_placements=(between if enable_sp else partial, *others.values())),
    )
