"""Kimi Linear: Kimi Delta Attention and latent attention, 3 to 1, and a first layer that is dense.

Reference: arXiv 2510.26692; `transformers`, `models/kimi_linear/modeling_kimi_linear.py`.
"""

from dataclasses import dataclass

from titan_gdn.models.hybrid.model import HybridModel
from titan_gdn.models.kimi_linear.sharding import set_kimi_linear_sharding


class KimiLinearModel(HybridModel):
    """A hybrid model without positions: its length has no limit."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridModel.Config):
        set_sharding = set_kimi_linear_sharding
