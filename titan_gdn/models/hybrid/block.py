"""The layer of hybrid models, and functions that select among a list of layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchtitan.models.common import FeedForward
from torchtitan.models.common.attention import AttentionMasksType, BaseAttention
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.module import Module

from titan_gdn.layers.linear_attention import LinearAttention
from titan_gdn.parallel.sequence import SequenceLayout


class HybridBlock(Module):
    """A layer: linear or full attention, then a dense or sparse feed-forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        linear_attention: LinearAttention.Config | None = None
        attention: BaseAttention.Config | None = None
        feed_forward: FeedForward.Config | None = None
        moe: MoE.Config | None = None
        attention_norm: Module.Config
        ffn_norm: Module.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear_attention = config.linear_attention.build() if config.linear_attention else None
        self.attention = config.attention.build() if config.attention else None
        self.feed_forward = config.feed_forward.build() if config.feed_forward else None
        self.moe = config.moe.build() if config.moe else None
        self.moe_enabled = config.moe is not None
        self.attention_norm = config.attention_norm.build()
        self.ffn_norm = config.ffn_norm.build()

    def forward(
        self,
        x_BLD: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor | None,
        decay: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        sequence: SequenceLayout,
    ) -> torch.Tensor:
        """Computes the hidden states after this layer.

        Args:
            x_BLD: hidden states `[B, L, D]`.
            attention_masks: the block mask of FlexAttention.
            positions: positions inside documents, `[B, L]`.
            decay: what the `Decay` of this layer returned in this forward, None if it has full attention.
            sequence: the documents of this forward.

        Returns:
            `[B, L, D]`.
        """
        h_BLD = self.attention_norm(x_BLD)
        if self.linear_attention is not None:
            assert decay is not None
            h_BLD = self.linear_attention(h_BLD, *decay, sequence=sequence)
        else:
            assert self.attention is not None
            h_BLD = self.attention(
                h_BLD, attention_masks=attention_masks, positions=positions, sequence=sequence
            )
        x_BLD = x_BLD + h_BLD
        feed_forward = self.moe if self.moe_enabled else self.feed_forward
        assert feed_forward is not None
        return x_BLD + feed_forward(self.ffn_norm(x_BLD))


def linear_layers(layers: Sequence[HybridBlock.Config]) -> list[LinearAttention.Config]:
    """Returns the configurations of the linear attention layers, in order."""
    return [layer.linear_attention for layer in layers if layer.linear_attention is not None]


def linear_kinds(layers: Sequence[HybridBlock.Config]) -> list[LinearAttention.Config]:
    """Returns one linear attention layer of each class, in order. Layers of one class have equal sizes."""
    return list({type(layer): layer for layer in reversed(linear_layers(layers))}.values())


def names_of(layers: Sequence[HybridBlock.Config], kind: LinearAttention.Config) -> list[str]:
    """Returns the names `"layers.0"`, ... of the layers whose linear attention has the class of `kind`."""
    return [f"layers.{i}" for i, layer in enumerate(layers) if type(layer.linear_attention) is type(kind)]
