"""Rotary position embedding that rotates the first dimensions of a head."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torchtitan.models.common.rope import CosSinRoPE


class PartialRotary(CosSinRoPE):
    """TorchTitan's rotary embedding, applied to the first `dim` dimensions of a wider head.

    With YaRN (arXiv 2309.00071) the attention temperature `0.1 ln(factor) + 1` multiplies cosine and sine, as
    in transformers. TorchTitan multiplies the scale of the softmax instead, which would also scale the
    dimensions that are not rotated.

    A token may have three positions (time, height and width), whose frequencies are interleaved, as in
    Qwen3.5 (transformers, `apply_interleaved_mrope`). For text the three are equal, so that one is enough.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        mrope_section: tuple[int, int, int] | None = None
        """How many frequencies turn with time, height and width; None takes one position per token."""

        def __post_init__(self) -> None:
            if self.dim < 2 or self.dim % 2:
                raise ValueError(f"the rotary width dim = {self.dim}: expected an even number of at least 2")

    def _precompute_cache(self) -> torch.Tensor:
        cache = super()._precompute_cache()
        if self.config.scaling == "yarn" and self.config.rope_factor > 1:
            cache = cache * (0.1 * math.log(self.config.rope_factor) + 1)
        return cache

    def _reshape_cache(self, query: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None or positions.ndim == 2:
            return super()._reshape_cache(query, positions)
        section = cast(PartialRotary.Config, self.config).mrope_section
        if section is None:
            raise ValueError("positions of time, height and width need mrope_section")
        half = self.config.dim // 2
        kinds = torch.zeros(half, dtype=torch.int64, device=positions.device)
        for kind, count in enumerate(section):
            if kind > 0:  # the frequencies that are left turn with time
                kinds[kind : 3 * count : 3] = kind
        # The table has the cosines of all frequencies twice, then the sines twice.
        return self.cache[positions].gather(2, kinds.repeat(4).expand(*positions.shape[:2], 1, -1))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries `[B, L, N, H]` and keys `[B, L, M, H]` by positions `[B, L]` or `[B, L, 3]`."""
        dim = self.config.dim
        q, k = super().forward(query[..., :dim], key[..., :dim], positions)
        return torch.cat([q, query[..., dim:]], -1), torch.cat([k, key[..., dim:]], -1)
