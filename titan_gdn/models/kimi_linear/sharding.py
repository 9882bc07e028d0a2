"""The placements of what only Kimi Linear has: its latent attention."""

from typing import TYPE_CHECKING

import spmd_types as spmd

from titan_gdn.layers.latent_attention import LatentAttention
from titan_gdn.models.hybrid.sharding import local_region, set_hybrid_sharding, set_weights

if TYPE_CHECKING:
    from titan_gdn.models.kimi_linear.model import KimiLinearModel


def set_kimi_linear_sharding(
    config: "KimiLinearModel.Config", *, tp: int, enable_sp: bool, enable_ep: bool
) -> None:
    """As `HybridModel.Config.set_sharding`."""
    set_hybrid_sharding(config, enable_sp=enable_sp, enable_ep=enable_ep)
    for layer in config.layers:
        if layer.attention is not None:
            set_latent_attention(layer.attention, enable_sp)


def set_latent_attention(config: LatentAttention.Config, enable_sp: bool) -> None:
    """Heads are split over TP; what makes the compressed vector is whole on every rank."""
    set_weights(spmd.S(0), config.wq, config.wkv_b)
    set_weights(spmd.R, config.wkv_a, config.kv_norm)
    set_weights(spmd.S(1), config.wo)
    config.sharding_config = local_region(enable_sp, "x_BSD")
