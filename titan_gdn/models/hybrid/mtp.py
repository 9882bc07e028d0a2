"""Multi-token prediction: a further layer that predicts the token after the next, and its loss.

The trainer gives the model the tokens and the next tokens as one batch `[2B, L]` (`HybridTrainer`), and the
model returns as many rows: the hidden states of the main model, then those of this layer. Embedding, head and
TorchTitan's chunked loss see one tensor each and run once.

Reference: DeepSeek-V3 (arXiv 2412.19437, section 2.2), whose hidden states are those before the final norm;
Qwen3-Next and Qwen3.5 take those after it (transformers, `modeling_layers.MtpModel`).
"""

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder_sharding import dense_activation_placement, norm_config
from torchtitan.protocols.module import Module, ModuleDict
from torchtitan.protocols.sharding import ShardingConfig

from titan_gdn.layers.sharding import between_layers
from titan_gdn.models.hybrid.block import HybridBlock
from titan_gdn.parallel.sequence import SequenceLayout


class Gather(Module):
    """Gathers hidden states that sequence parallelism shards: the head and the loss take whole rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns `input`, which the module's placements have gathered."""
        return input


class MultiTokenPrediction(Module):
    """One layer on the hidden states of the main model and the embeddings of the next tokens.

    It has the attributes of TorchTitan's decoders, so that activation checkpointing, compilation, FSDP and
    expert balancing handle it as a decoder of one layer. Its embedding and head are those of the main model.
    """

    tok_embeddings = None
    lm_head = None
    enable_weight_tying = False

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        embedding_norm: Module.Config
        hidden_norm: Module.Config
        fc: Linear.Config
        layer: HybridBlock.Config
        norm: Module.Config
        loss_weight: float

        gather: Gather.Config
        """Gathers the rows of both hidden states; see `set_sharding`."""

        def set_sharding(self, *, enable_sp: bool) -> None:
            """Declares the placements of all modules but those of the layer."""
            for norm in (self.embedding_norm, self.hidden_norm, self.norm):
                norm.sharding_config = norm_config(enable_sp=enable_sp)
            # Every TP rank multiplies its tokens by the whole weight, as a norm does: under sequence
            # parallelism that is no more work than to shard the weight, and no communication.
            self.fc.sharding_config = norm_config(enable_sp=enable_sp)
            self.gather.sharding_config = ShardingConfig(
                in_src_shardings={"input": between_layers(enable_sp)},
                in_dst_shardings={"input": dense_activation_placement(tp=spmd.R)},
            )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding_norm = config.embedding_norm.build()
        self.hidden_norm = config.hidden_norm.build()
        self.fc = config.fc.build()
        self.layers = ModuleDict({"0": config.layer.build()})
        self.norm = config.norm.build()
        self.gather = config.gather.build()

    def forward(
        self,
        h_BLD: torch.Tensor,
        next_BLD: torch.Tensor,
        attention_masks: AttentionMasksType | None,
        positions: torch.Tensor,
        *,
        sequence: SequenceLayout,
    ) -> torch.Tensor:
        """Computes the hidden states from which the head predicts the token after the next.

        Args:
            h_BLD: hidden states of the main model after its final norm, `[B, L, D]`.
            next_BLD: embeddings of the next tokens, `[B, L, D]`.
            attention_masks: the block mask of FlexAttention.
            positions: positions inside documents, `[B, L]`.
            sequence: the documents of this forward.

        Returns:
            `[B, L, D]`.
        """
        both = torch.cat([self.embedding_norm(next_BLD), self.hidden_norm(h_BLD)], -1)
        x_BLD = self.layers["0"](self.fc(both), attention_masks, positions, None, sequence=sequence)
        return self.norm(x_BLD)


class MultiTokenLoss(CrossEntropyLoss):
    """The loss of the next tokens plus the weighted loss of the tokens after the next.

    Both are mean cross-entropies, each over its own targets of the whole batch. The gradient is that of the
    sum. The returned value is the loss of the next tokens alone; the other one accumulates in `summed`.

    Attributes:
        targets: the number of tokens after the next that all ranks predict in this step, a tensor.
        summed: this rank's part of the mean loss of the tokens after the next, since `begin`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        weight: float
        """Weight of the loss of the tokens after the next."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self.weight = config.weight
        self.targets: torch.Tensor | None = None
        self.summed: torch.Tensor | None = None

    def begin(self, targets: torch.Tensor) -> None:
        """Begins a step that predicts `targets` tokens after the next on all ranks."""
        self.targets = targets.clamp(min=1)
        self.summed = None

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes the loss of rows `[2B, L]`: of next tokens, then of tokens after the next.

        A validation, which gives no `global_valid_tokens`, has rows of next tokens alone.
        """
        if global_valid_tokens is None:
            return super().__call__(pred, labels, None, **kwargs)
        (pred, pred_after), (labels, labels_after) = pred.chunk(2), labels.chunk(2)
        loss, metrics = super().__call__(pred, labels, global_valid_tokens, **kwargs)
        after, _ = super().__call__(pred_after, labels_after, self.targets, **kwargs)
        value = after.detach()
        self.summed = value if self.summed is None else self.summed + value
        weighted = self.weight * after
        # The second term has the value 0, so that the logged loss is that of the next tokens alone and can be
        # compared with a run without this layer, and it has the gradient of the weighted loss.
        return loss + (weighted - weighted.detach()), metrics


def mtp_of(model: nn.Module) -> list[MultiTokenPrediction]:
    """Returns the model's layer of multi-token prediction in a list, an empty one without it."""
    mtp = getattr(model, "mtp", None)
    return [] if mtp is None else [mtp]
