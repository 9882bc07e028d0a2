"""Kimi Linear: three layers of Kimi Delta Attention, then one of latent attention; the first layer is dense.

Reference: arXiv 2510.26692; `transformers`, `models/kimi_linear/modeling_kimi_linear.py`.
"""

from dataclasses import dataclass, replace

from torchtitan.models.common import FeedForward, RMSNorm
from torchtitan.models.common.moe import MoE
from torchtitan.tools.utils import device_type

from titan_gdn.layers.document_attention import inner_attention
from titan_gdn.layers.initialization import linear
from titan_gdn.layers.kimi_delta_attention import KimiDeltaAttention
from titan_gdn.layers.latent_attention import LatentAttention
from titan_gdn.layers.linear_attention import Widths
from titan_gdn.models.hybrid.builders import SparseArguments, decoder, feed_forward, moe
from titan_gdn.models.hybrid.model import HybridModel


@dataclass(frozen=True, kw_only=True)
class KimiLinearArguments(SparseArguments):
    """The arguments of Kimi Linear. The defaults are the published Kimi-Linear-48B-A3B (`config.json`)."""

    vocab_size: int = 163840
    dim: int = 2304
    n_layers: int = 27

    full_attention_interval: int = 4
    """The last layer and the layers whose numbers (from 1) are multiples of this have full attention."""

    norm_eps: float = 1e-5
    """Epsilon of all norms but `kv_norm`, which has 1e-6."""

    n_heads: int = 32

    key_head_dim: int = 128
    """Width of the part of a key that each head has for itself."""

    qk_rope_head_dim: int = 64
    """Width of the part of a key that all heads share. Kimi Linear does not rotate it."""

    value_head_dim: int = 128
    """Width of the values of the full attention, per head."""

    kv_lora_rank: int = 512
    """Width of the compressed vector from which keys and values are projected."""

    n_linear_key_heads: int = 32
    n_linear_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128

    linear_gate_rank: int = 128
    """Rank of the low-rank gates of Kimi Delta Attention."""

    lower_bound: float | None = None
    """Lower bound of Kimi Delta Attention's log decay, negative (GLM-5.3-Flash: -5); none: unbounded."""

    hidden_dim: int = 9216

    n_dense_layers: int = 1
    """Number of layers at the beginning that are dense."""

    n_experts: int = 256
    n_experts_per_token: int = 8
    expert_hidden_dim: int = 1024

    shared_expert_hidden_dim: int = 1024
    """Hidden width of all shared experts together."""

    route_norm: bool = True
    """Whether the scores of the selected experts are normalized to sum to 1."""

    route_scale: float = 2.446
    """Factor by which the scores are then multiplied."""

    load_balance_coeff: float = 1e-3
    """Step size of the bias that balances experts (arXiv 2408.15664). The bias is part of
    the published model. To keep it as it is loaded, choose a step far below float32's resolution."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_1(
            "key_head_dim", "qk_rope_head_dim", "value_head_dim", "kv_lora_rank", "linear_gate_rank"
        )
        if not 0 <= self.n_dense_layers <= self.n_layers:
            self.refuse("n_dense_layers", f"a number from 0 to n_layers = {self.n_layers}")
        if not self.route_scale > 0:
            self.refuse("route_scale", "a positive number")

    def kinds(self) -> list[str]:
        """One of `KINDS` for each layer. Unless `layer_types` is given, the last has full attention."""
        kinds = super().kinds()
        return kinds if self.layer_types is not None else [*kinds[:-1], "full_attention"]

    def linear_attention_widths(self) -> Widths:
        """Returns the sizes of the linear attention layers."""
        return replace(super().linear_attention_widths(), gate_rank=self.linear_gate_rank)

    def config(self) -> HybridModel.Config:
        """Returns the configuration of the model."""
        return decoder(
            self,
            linear_attention=lambda: KimiDeltaAttention.configure(
                self.linear_attention_widths(), self.lower_bound
            ),
            attention=self._attention,
            mlp=self._mlp,
            norm=self._norm,
        )

    def _norm(self, width: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=width, eps=self.norm_eps)

    def _attention(self) -> LatentAttention.Config:
        return LatentAttention.Config(
            n_heads=self.n_heads,
            kv_lora_rank=self.kv_lora_rank,
            key_head_dim=self.key_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            value_head_dim=self.value_head_dim,
            wq=linear(self.dim, self.n_heads * (self.key_head_dim + self.qk_rope_head_dim)),
            wkv_a=linear(self.dim, self.kv_lora_rank + self.qk_rope_head_dim),
            kv_norm=RMSNorm.Config(normalized_shape=self.kv_lora_rank, eps=1e-6),
            wkv_b=linear(self.kv_lora_rank, self.n_heads * (self.key_head_dim + self.value_head_dim)),
            wo=linear(self.n_heads * self.value_head_dim, self.dim),
            inner_attention=inner_attention(device_type),
        )

    def _mlp(self, i: int) -> FeedForward.Config | MoE.Config:
        if self.n_experts == 0 or i < self.n_dense_layers:
            return feed_forward(self.dim, self.hidden_dim)
        return moe(
            self,
            shared_experts=feed_forward(self.dim, self.shared_expert_hidden_dim),
            score_func="sigmoid",
            route_norm=self.route_norm,
            route_scale=self.route_scale,
        )
