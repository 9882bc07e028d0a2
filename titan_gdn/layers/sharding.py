"""Functions with which layers declare the placements of their parameters and activations.

Between layers, hidden states are sharded over the sequence under sequence parallelism, and replicated over TP
without it. Each layer's `Config.set_sharding` calls these functions.
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
    """Returns the placement of hidden states between layers."""
    return dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)


def set_weights(tp: spmd.PerMeshAxisSpmdType, *modules: Module.Config) -> None:
    """Sets the placement of each module's weight on the TP sub-mesh to `tp`."""
    for module in modules:
        module.sharding_config = ShardingConfig(state_shardings={"weight": dense_param_placement(tp=tp)})


def local_region(enable_sp: bool, x: str, **others: SpmdLayout) -> ShardingConfig:
    """Returns the placements of a layer that computes on local tensors and does its own communication.

    The layer returns partial sums over TP.

    Args:
        enable_sp: whether hidden states between layers are sharded over TP.
        x: name of the hidden states, the first argument of the layer's forward.
        **others: names and placements of the other positional arguments, in order.
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
