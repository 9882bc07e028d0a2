"""RMS norms as Qwen3-Next has them. Both compute in float32 and return the dtype of their input."""

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
        """`[..., dim]` to the same. The argument's name is the one that TorchTitan's norm shardings use."""
        return F.rms_norm(input.float(), self.weight.shape, 1 + self.weight.float(), self.eps).type_as(input)


class GatedRMSNorm(_RMSNorm):
    """`weight * x / rms(x) * gate` over the last dimension, the gate through `silu` or `sigmoid`.

    transformers, `Qwen3NextRMSNormGated` (silu) and Kimi Linear's output norm (sigmoid).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_RMSNorm.Config):
        gate: Literal["silu", "sigmoid"] = "silu"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.activation = F.silu if config.gate == "silu" else torch.sigmoid

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """`x` and `gate` `[..., dim]` to `[..., dim]`."""
        normed = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * self.activation(gate.float())).type_as(x)
