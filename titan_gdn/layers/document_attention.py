"""Softmax attention inside packed documents. Under CP, each rank gathers the keys and values of all ranks."""

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
    """Inner attention for devices where FlexAttention has no backward.

    It applies the document mask block by block and works on local tensors.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    cp_mesh: DeviceMesh | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()

    @staticmethod
    def order_keys(x: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
        """Returns gathered keys or values `[B, T, ...]` in the order that `forward` takes: natural order.

        Args:
            x: `[B, T, ...]`, the shards of all CP ranks, one after the other.
            sequence: the documents of this forward.
        """
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
        """Runs `titan_gdn.ops.document_attention`. Arguments that only FlexAttention takes are ignored.

        Args:
            q_BLNH: queries of this CP rank's tokens, `[B, L, N, H]`.
            k_BLNH: keys, of this CP rank's tokens if `cp_mesh` is set, of all tokens otherwise.
            v_BLNH: values of the same tokens. Their head width may differ from that of the keys.
            scale: factor of the scores.
            sequence: the documents of this forward.

        Returns:
            `[B, L, N, V]`.
        """
        if self.cp_mesh is not None:
            k_BLNH, v_BLNH = (
                self.order_keys(gather_sequence(x, self.cp_mesh), sequence) for x in (k_BLNH, v_BLNH)
            )
        return document_attention(q_BLNH, k_BLNH, v_BLNH, scale, sequence.cu_seqlens_cpu, sequence.tokens_cpu)


class DocumentFlexAttention(FlexAttention):
    """FlexAttention that gathers keys and values over CP itself, under both of TorchTitan's SPMD backends."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    cp_mesh: DeviceMesh | None = None

    @staticmethod
    def order_keys(x: torch.Tensor, sequence: SequenceLayout) -> torch.Tensor:
        """Returns `x` unchanged, because the block mask under CP has its keys in the order of the shards."""
        return x

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Gathers keys and values over CP if `cp_mesh` is set, then runs TorchTitan's FlexAttention."""
        if self.cp_mesh is not None:
            k_BLNH, v_BLNH = (gather_sequence(x, self.cp_mesh) for x in (k_BLNH, v_BLNH))
        return super().forward(q_BLNH, k_BLNH, v_BLNH, **kwargs)


def inner_attention(device_type: str) -> DocumentAttention.Config | DocumentFlexAttention.Config:
    """Returns the inner attention that can train on a device. FlexAttention has no backward on a CPU."""
    return DocumentAttention.Config() if device_type == "cpu" else DocumentFlexAttention.Config()
