"""The RMS norms of Qwen3-Next and Kimi Linear. Both compute in float32 and keep the dtype of the input."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.protocols.module import Module


class _RMSNorm(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        eps: float = 1e-6

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.dim))


class OffsetRMSNorm(_RMSNorm):
    """`(1 + weight) * x / rms(x)` over the last dimension (transformers, `Qwen3NextRMSNorm`)."""

    @dataclass(kw_only=True, slots=True)
    class Config(_RMSNorm.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes `[..., dim]`. TorchTitan's shardings of norms require the argument's name `input`."""
        return F.rms_norm(input.float(), self.weight.shape, 1 + self.weight.float(), self.eps).type_as(input)


class GatedRMSNorm(_RMSNorm):
    """`weight * x / rms(x) * activation(gate)` over the last dimension.

    The activation is silu in Qwen3-Next (transformers, `Qwen3NextRMSNormGated`) and sigmoid in Kimi Linear.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_RMSNorm.Config):
        gate: Literal["silu", "sigmoid"] = "silu"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.activation = F.silu if config.gate == "silu" else torch.sigmoid

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalizes `x` `[..., dim]` and multiplies it by the activation of `gate` `[..., dim]`."""
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * self.activation(gate.float())).type_as(x)
