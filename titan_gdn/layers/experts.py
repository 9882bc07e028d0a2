"""Routed experts that compute in the dtype of their weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common import moe


class GroupedExperts(moe.GroupedExperts):
    """TorchTitan's grouped SwiGLU experts, without its cast to bfloat16.

    TorchTitan casts weights and tokens to bfloat16 whatever their dtype, which gives a float32 model a
    relative error of 5e-3. FSDP's mixed precision already sets the dtype of the weights.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(moe.GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Applies each expert to its tokens.

        Args:
            x_RD: tokens sorted by expert, `[R, D]`.
            num_tokens_per_expert_E: number of tokens of each expert of this rank, `[E]`.

        Returns:
            `[R, D]` in the dtype of `x_RD`.
        """
        w1_EFD, w2_EDF, w3_EFD = (
            w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        input_RD = x_RD.to(w1_EFD.dtype)
        h_RF = F.silu(self._grouped_mm(A=input_RD, B_t=w1_EFD.mT, offs=ends_E))
        h_RF = h_RF * self._grouped_mm(A=input_RD, B_t=w3_EFD.mT, offs=ends_E)
        return self._grouped_mm(A=h_RF, B_t=w2_EDF.mT, offs=ends_E).type_as(x_RD)
