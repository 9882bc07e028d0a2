"""Softmax attention inside packed documents, whose keys and values may come from all ranks of a CP group."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

from titan_gdn.ops import document_attention
from titan_gdn.parallel.collectives import gather_sequence, reorder
from titan_gdn.parallel.sequence import SequenceLayout


class DocumentAttention(Module):
    """Inner attention where FlexAttention has no backward: masked, block by block, on local tensors."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    cp_mesh: DeviceMesh | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()

    @staticmethod
    def ordered(x: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
        """Keys or values of all ranks' shards, `[B, T, ...]`, as `forward` wants them: in natural order."""
        return reorder(x, sequence.from_shards)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        scale: float,
        sequence: SequenceLayout,
        **_: object,
    ) -> torch.Tensor:
        """As `titan_gdn.ops.document_attention`; what only FlexAttention wants is ignored."""
        if self.cp_mesh is not None:
            k_BLNH, v_BLNH = (
                self.ordered(gather_sequence(x, self.cp_mesh), sequence) for x in (k_BLNH, v_BLNH)
            )
        return document_attention(q_BLNH, k_BLNH, v_BLNH, scale, sequence.cu_seqlens_cpu, sequence.tokens_cpu)


class DocumentFlexAttention(FlexAttention):
    """FlexAttention, which gathers keys and values over CP itself, whatever TorchTitan's backend."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    cp_mesh: DeviceMesh | None = None

    @staticmethod
    def ordered(x: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
        """As `DocumentAttention.ordered`: under CP the block mask's keys are in the shards' order."""
        return x

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """As TorchTitan's."""
        if self.cp_mesh is not None:
            k_BLNH, v_BLNH = (gather_sequence(x, self.cp_mesh) for x in (k_BLNH, v_BLNH))
        return super().forward(q_BLNH, k_BLNH, v_BLNH, **kwargs)


def inner_attention(device_type: str) -> DocumentAttention.Config | DocumentFlexAttention.Config:
    """The inner attention that trains on a device: FlexAttention has no backward on a CPU."""
    return DocumentAttention.Config() if device_type == "cpu" else DocumentFlexAttention.Config()
