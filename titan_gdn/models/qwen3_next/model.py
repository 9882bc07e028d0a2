"""Qwen3-Next: three Gated DeltaNet layers, then one of gated attention; feed-forwards are dense or sparse.

Reference: `transformers`, `models/qwen3_next/modeling_qwen3_next.py`.
"""

from dataclasses import dataclass
from typing import Any, Self

from titan_gdn.models.hybrid.gated import GatedArguments


@dataclass(frozen=True, kw_only=True)
class Qwen3NextArguments(GatedArguments):
    """The arguments of Qwen3-Next. The defaults are the published Qwen3-Next-80B-A3B (`config.json`)."""

    vocab_size: int = 151936
    dim: int = 2048
    n_layers: int = 48
    hidden_dim: int = 5120
    n_experts: int = 512
    n_experts_per_token: int = 10
    expert_hidden_dim: int = 512
    shared_expert_hidden_dim: int = 512

    norm_topk_prob: bool = True
    """Whether the scores of the selected experts are normalized to sum to 1."""

    decoder_sparse_step: int = 1
    """The layers whose numbers (from 1) are multiples of this have experts."""

    mlp_only_layers: list[int] | None = None
    """Layers (numbers from 0) that are dense in spite of `decoder_sparse_step`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_1("decoder_sparse_step")
        for layer in self.mlp_only_layers or []:
            if not 0 <= layer < self.n_layers:
                self.refuse("mlp_only_layers", f"layers from 0 to {self.n_layers - 1}")

    @property
    def normalized_scores(self) -> bool:
        """`norm_topk_prob`."""
        return self.norm_topk_prob

    def sparse(self, i: int) -> bool:
        """Whether layer `i` (from 0) has experts."""
        step = self.decoder_sparse_step
        return self.n_experts > 0 and (i + 1) % step == 0 and i not in (self.mlp_only_layers or [])

    def overridden(self, **overrides: Any) -> Self:
        """Returns these arguments with some replaced. Lists of layers are cut to a smaller `n_layers`."""
        n_layers = overrides.get("n_layers", self.n_layers)
        if self.mlp_only_layers is not None and 0 < n_layers < self.n_layers:
            dense = [layer for layer in self.mlp_only_layers if layer < n_layers]
            overrides = {"mlp_only_layers": dense} | overrides
        return super().overridden(**overrides)
