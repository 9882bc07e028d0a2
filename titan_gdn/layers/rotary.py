"""Rotary position embedding of the first dimensions of a head."""

import math
from dataclasses import dataclass

import torch
from torchtitan.models.common.rope import CosSinRoPE


class PartialRotary(CosSinRoPE):
    """TorchTitan's cosine and sine rotation, for the first `dim` dimensions of a wider head.

    With YaRN (arXiv 2309.00071) the attention temperature `0.1 ln(factor) + 1` multiplies cosine and
    sine, as transformers has it. TorchTitan leaves it to the scale of the softmax, which would also
    scale the dimensions that do not turn.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        cache = super()._precompute_cache()
        if self.config.scaling == "yarn" and self.config.rope_factor > 1:
            cache = cache * (0.1 * math.log(self.config.rope_factor) + 1)
        return cache

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn `[B, L, N, H]` queries and `[B, L, M, H]` keys at `[B, L]` positions."""
        dim = self.config.dim
        turned = super().forward(query[..., :dim], key[..., :dim], positions)
        return tuple(torch.cat([x, y[..., dim:]], -1) for x, y in zip(turned, (query, key), strict=True))
