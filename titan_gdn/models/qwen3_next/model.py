"""Qwen3-Next: Gated DeltaNet and gated attention, 3 to 1, over dense or sparse feed-forwards.

Reference: `transformers`, `models/qwen3_next/modeling_qwen3_next.py`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_gdn.models.hybrid.model import HybridModel
from titan_gdn.models.qwen3_next.sharding import set_qwen3_next_sharding

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


class Qwen3NextModel(HybridModel):
    """A hybrid model with key-value heads fewer than TP ranks, and a rotary embedding that has an end."""

    @dataclass(kw_only=True, slots=True)
    class Config(HybridModel.Config):
        def check(self, config: "Trainer.Config") -> None:
            """Refuse the run that cannot be, before anything is built.

            Raises:
                ValueError: as `HybridModel.Config.check`; also key-value heads that neither divide TP nor are
                    divided by it, or a sequence beyond the rotary embedding.
            """
            # `super()` would not find it: the dataclass decorator with slots makes a new class.
            HybridModel.Config.check(self, config)
            tp, seq_len = config.parallelism.tensor_parallel_degree, config.training.seq_len
            attention = self.first_attention
            if attention and tp % attention.n_key_value_heads and attention.n_key_value_heads % tp:
                raise ValueError(
                    f"parallelism.tensor_parallel_degree = {tp} and the {attention.n_key_value_heads} "
                    "key-value heads of the full attention: one must divide the other"
                )
            if seq_len > self.max_seq_len:
                raise ValueError(
                    f"training.seq_len = {seq_len} exceeds the {self.max_seq_len} tokens of the rotary "
                    "embedding: shorten it, or raise model.overrides.context_length or .yarn_factor"
                )

        set_sharding = set_qwen3_next_sharding
