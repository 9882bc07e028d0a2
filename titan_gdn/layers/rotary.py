"""Rotary position embedding that rotates the first dimensions of a head."""

import math
from dataclasses import dataclass

import torch
from torchtitan.models.common.rope import CosSinRoPE


class PartialRotary(CosSinRoPE):
    """TorchTitan's rotary embedding, applied to the first `dim` dimensions of a wider head.

    With YaRN (arXiv 2309.00071) the attention temperature `0.1 ln(factor) + 1` multiplies cosine and sine, as
    in transformers. TorchTitan multiplies the scale of the softmax instead, which would also scale the
    dimensions that are not rotated.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        def __post_init__(self) -> None:
            if self.dim < 2 or self.dim % 2:
                raise ValueError(f"the rotary width dim = {self.dim}: expected an even number of at least 2")

    def _precompute_cache(self) -> torch.Tensor:
        cache = super()._precompute_cache()
        if self.config.scaling == "yarn" and self.config.rope_factor > 1:
            cache = cache * (0.1 * math.log(self.config.rope_factor) + 1)
        return cache

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries `[B, L, N, H]` and keys `[B, L, M, H]` by their positions `[B, L]`."""
        dim = self.config.dim
        q, k = super().forward(query[..., :dim], key[..., :dim], positions)
        return torch.cat([q, query[..., dim:]], -1), torch.cat([k, key[..., dim:]], -1)
