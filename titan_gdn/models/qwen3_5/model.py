"""Qwen3.5's text models: Qwen3-Next's layers with a dense feed-forward, or with experts in every layer.

The published models also take images. Their rotary embedding has three positions per token (time, height and
width), whose frequencies are interleaved (mrope). For text the three are equal, and then it is bit for bit
the partial rotary embedding of one position, which the trainer gives. `PartialRotary` takes three, too.

References: `transformers`, `models/qwen3_5/modeling_qwen3_5.py` and
`models/qwen3_5_moe/modeling_qwen3_5_moe.py`.
"""

from dataclasses import dataclass

from titan_gdn.models.hybrid.gated import GatedArguments


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Arguments(GatedArguments):
    """The arguments of Qwen3.5's text models. The defaults are the published Qwen3.5-9B (`config.json`)."""

    vocab_size: int = 248320
    dim: int = 4096
    n_layers: int = 32
    n_key_value_heads: int = 4
    hidden_dim: int = 12288

    n_experts: int = 0
    """Number of routed experts. 0 makes every layer dense; otherwise every layer has experts."""

    n_experts_per_token: int = 8
    expert_hidden_dim: int = 512
    shared_expert_hidden_dim: int = 512

    @property
    def mrope_section(self) -> tuple[int, int, int]:
        """The frequencies in three equal parts, 11, 11 and 10 in the published models."""
        frequencies = int(self.head_dim * self.partial_rotary_factor) // 2
        return (frequencies + 2) // 3, (frequencies + 1) // 3, frequencies // 3
