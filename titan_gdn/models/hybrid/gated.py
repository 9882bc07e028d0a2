"""What Qwen3-Next and Qwen3.5 share: Gated DeltaNet and gated attention, dense or sparse feed-forwards.

References: `transformers`, `models/qwen3_next/modeling_qwen3_next.py`, `models/qwen3_5/modeling_qwen3_5.py`
and `models/qwen3_5_moe/modeling_qwen3_5_moe.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.models.common import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.moe import MoE
from torchtitan.tools.utils import device_type

from titan_gdn.layers.document_attention import inner_attention
from titan_gdn.layers.gated_attention import GatedAttention
from titan_gdn.layers.gated_delta_net import GatedDeltaNet
from titan_gdn.layers.initialization import linear
from titan_gdn.layers.norms import OffsetRMSNorm
from titan_gdn.layers.rotary import PartialRotary
from titan_gdn.models.hybrid.builders import MultiTokenArguments, decoder, feed_forward, moe
from titan_gdn.models.hybrid.model import HybridModel

DEBUG: dict[str, Any] = {
    "vocab_size": 264,  # the 257 tokens of the byte tokenizer, rounded up to a multiple of 8 TP ranks
    "dim": 128,
    "n_layers": 4,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "head_dim": 32,
    "context_length": 8192,
    "n_linear_key_heads": 4,
    "n_linear_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hidden_dim": 384,
    "n_experts": 0,
}
"""The arguments of the dense model that trains in minutes on a CPU."""

DEBUG_MOE: dict[str, Any] = DEBUG | {
    "n_experts": 8,
    "n_experts_per_token": 2,
    "expert_hidden_dim": 96,
    "shared_expert_hidden_dim": 96,
}
"""The same with experts in every layer."""


@dataclass(frozen=True, kw_only=True)
class GatedArguments(MultiTokenArguments):
    """The arguments of Qwen3-Next and Qwen3.5."""

    norm_eps: float = 1e-6

    tie_word_embeddings: bool = False
    """Whether embedding and head share one weight."""

    n_heads: int = 16

    n_key_value_heads: int = 2
    """Key-value heads of the full attention."""

    head_dim: int = 256
    """Width of the heads of the full attention."""

    partial_rotary_factor: float = 0.25
    """Fraction of `head_dim` that the rotary embedding rotates."""

    rope_theta: float = 1e7
    """Base of the rotary frequencies."""

    context_length: int = 262144
    """Longest sequence of the rotary embedding without YaRN, in tokens."""

    yarn_factor: float = 1.0
    """Factor by which YaRN (arXiv 2309.00071) extends `context_length`."""

    n_linear_key_heads: int = 16
    n_linear_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128

    load_balance_coeff: float | None = None
    """Step size of TorchTitan's bias that balances experts (arXiv 2408.15664); none: no such bias. The
    published models have none, and Hugging Face checkpoints of them cannot store one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_1("n_key_value_heads", "head_dim", "context_length")
        self.check_divides("n_key_value_heads", "n_heads")
        if not 1 < self.rope_theta < math.inf:
            self.refuse("rope_theta", "a number above 1")
        if not 1 <= self.yarn_factor < math.inf:
            self.refuse("yarn_factor", "a number of at least 1 (1 means no extension)")
        rotated = self.head_dim * self.partial_rotary_factor
        if not 2 <= rotated <= self.head_dim or int(rotated) % 2:
            self.refuse(
                "partial_rotary_factor",
                f"a fraction whose product with head_dim = {self.head_dim} is an even number",
            )

    @property
    def normalized_scores(self) -> bool:
        """Whether the scores of the selected experts are normalized to sum to 1."""
        return True

    @property
    def mrope_section(self) -> tuple[int, int, int] | None:
        """`PartialRotary.Config.mrope_section`."""
        return None

    def sparse(self, i: int) -> bool:
        """Whether layer `i` (from 0) has experts."""
        return self.n_experts > 0

    def config(self) -> HybridModel.Config:
        """Returns the configuration of the model."""
        return decoder(
            self,
            linear_attention=lambda: GatedDeltaNet.configure(self.linear_attention_widths()),
            attention=self._attention,
            mlp=self._mlp,
            norm=self._norm,
            enable_weight_tying=self.tie_word_embeddings,
            mtp_loss_weight=self.mtp_loss_weight if self.mtp else None,
        )

    def _norm(self, width: int) -> OffsetRMSNorm.Config:
        return OffsetRMSNorm.Config(dim=width, eps=self.norm_eps, param_init={"weight": nn.init.zeros_})

    def _attention(self) -> GatedAttention.Config:
        return GatedAttention.Config(
            n_heads=self.n_heads,
            n_key_value_heads=self.n_key_value_heads,
            head_dim=self.head_dim,
            rope=PartialRotary.Config(
                dim=int(self.head_dim * self.partial_rotary_factor),
                max_seq_len=int(self.context_length * self.yarn_factor),
                theta=self.rope_theta,
                mrope_section=self.mrope_section,
                scaling="yarn" if self.yarn_factor > 1 else "none",
                rope_factor=self.yarn_factor,
                original_seq_len=self.context_length,
            ),
            wq=linear(self.dim, 2 * self.n_heads * self.head_dim),
            wk=linear(self.dim, self.n_key_value_heads * self.head_dim),
            wv=linear(self.dim, self.n_key_value_heads * self.head_dim),
            wo=linear(self.n_heads * self.head_dim, self.dim),
            q_norm=self._norm(self.head_dim),
            k_norm=self._norm(self.head_dim),
            inner_attention=inner_attention(device_type),
        )

    def _mlp(self, i: int) -> FeedForward.Config | MoE.Config:
        if not self.sparse(i):
            return feed_forward(self.dim, self.hidden_dim)
        shared = feed_forward(self.dim, self.shared_expert_hidden_dim)
        return moe(
            self,
            shared_experts=SigmoidGatedFeedForward.Config(
                w1=shared.w1, w2=shared.w2, w3=shared.w3, gate=linear(self.dim, 1)
            ),
            score_func="softmax",
            route_norm=self.normalized_scores,
        )
