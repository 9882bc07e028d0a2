"""The decoder whose layers have linear or full attention, and a dense or sparse feed-forward."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import RoPE
from torchtitan.models.utils import get_moe_model_nparams_and_flops

from titan_gdn.layers.linear_attention import Decay
from titan_gdn.models.hybrid import checks, quantize
from titan_gdn.models.hybrid.block import HybridBlock, linear_layers
from titan_gdn.models.hybrid.exchange_choice import choose_exchanges
from titan_gdn.models.hybrid.mtp import MultiTokenPrediction
from titan_gdn.models.hybrid.sharding import set_hybrid_sharding
from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


class HybridModel(Decoder):
    """A decoder whose layers are `HybridBlock`s. Each position of 0 begins a document."""

    full_precision: ClassVar[dict[str, str]] = {"lm_head": "logits"}
    """Linears that are never quantized, each with the quantity that it computes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        converters: list[QuantizationConverter.Config] = field(default_factory=list)
        """What is quantized, and how; see `titan_gdn.models.hybrid.quantize`."""

        mtp: MultiTokenPrediction.Config | None = None
        """The layer that predicts the token after the next."""

        arguments: Any = None
        """The `HybridArguments` from which `decoder` built this configuration."""

        @property
        def blocks(self) -> list[HybridBlock.Config]:
            """The layers, and that of multi-token prediction."""
            return self.layers if self.mtp is None else [*self.layers, self.mtp.layer]

        @property
        def max_seq_len(self) -> int:
            """The longest sequence of the rotary embedding, in tokens; unlimited without one."""
            rope = getattr(self.first_attention, "rope", None)
            return sys.maxsize if rope is None else rope.max_seq_len

        def check(self, config: "Trainer.Config") -> None:
            """Validates a run against the model before anything is built.

            Raises:
                ValueError: names the keys that do not fit the model, and what is possible.
            """
            checks.check(self, self.mtp is not None, self.converters, config)

        def check_device(self) -> None:
            """Checks that kernels and number formats run on this machine. The planner skips this check.

            Raises:
                ValueError: says what does not run on this machine, and what is possible.
            """
            checks.check_device(self, self.converters)

        def update_from_config(self, *, config: "Trainer.Config", **kwargs: object) -> None:
            """Completes the configuration with settings of the run. TorchTitan's trainer calls this.

            It replaces the method of `Decoder.Config`, which requires a rotary embedding in every attention.

            Args:
                config: the run.
                **kwargs: further arguments of the trainer, which are ignored.

            Raises:
                ValueError: the run does not fit the model or this machine.
            """
            parallelism = config.parallelism
            self.check(config)
            self.check_device()
            choose_exchanges(self, config)
            for layer in self.blocks:
                attention: Any = layer.attention
                if (rope := getattr(attention, "rope", None)) is not None:
                    attention.rope = replace(rope, max_seq_len=config.training.seq_len)
                if layer.moe is not None:
                    layer.moe.router._debug_force_load_balance = checks.forces_load_balance(config)
            set_hybrid_sharding(
                self,
                self.blocks,
                self.mtp,
                tp=parallelism.tensor_parallel_degree,
                enable_sp=parallelism.enable_sequence_parallel,
                enable_ep=parallelism.expert_parallel_degree > 1,
            )
            quantize.quantize(self, self.converters, config)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Returns the number of parameters, and the FLOPs per token of forward and backward.

            The cost of softmax attention per token grows with the sequence length. That of the recurrence
            does not: per value head and token, the forward multiplies a `[K, V]` state three times (recall,
            write, read), and the backward costs twice as much. As in TorchTitan, the causal mask does not
            lower the count.
            """
            attention: Any = self.first_attention
            heads, widths = (attention.n_heads, attention.pair_width) if attention else (0, 0)
            nparams, flops = get_moe_model_nparams_and_flops(self, model, heads, widths, seq_len)
            if self.mtp is not None:  # its attention, and the head once more; its weights are in the model's
                flops += 6 * (self.vocab_size * self.dim + heads * widths * seq_len)
            for layer in linear_layers(self.layers):
                flops += 3 * 3 * 2 * layer.n_value_heads * layer.key_head_dim * layer.value_head_dim
            return nparams, flops

    # How sequences are sharded over CP; set when the model is parallelized.
    context_parallel: ContextParallel | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mtp = config.mtp.build() if config.mtp else None

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initializes all parameters and buffers, and lets all layers share one rotary table."""
        super().init_states(buffer_device=buffer_device)
        self.share_rotary_table()

    def share_rotary_table(self) -> None:
        """Makes all layers use the rotary table of the first, because one for 1M tokens takes 0.5 GiB."""
        ropes = [module for module in self.modules() if isinstance(module, RoPE)]
        for rope in ropes[1:]:
            rope.cache = ropes[0].cache

    def decays(self) -> Iterator[Decay]:
        """Yields the decay modules of the layers on this pipeline stage, in order."""
        layers = cast(Iterable[HybridBlock], self.layers.values())
        return (layer.linear_attention.decay for layer in layers if layer.linear_attention is not None)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
    ) -> torch.Tensor:
        """Computes the logits of every token.

        Args:
            tokens: token ids `[B, L]`, on later pipeline stages hidden states `[B, L, D]`. With multi-token
                prediction also `[2B, L]`: the tokens, then for each of them the next token.
            positions: positions inside documents, `[B, L]`; 0 begins a document. If None, each row is one.
            attention_masks: the block mask of FlexAttention, which the trainer builds.

        Returns:
            Logits `[B, L, vocab_size]`. For tokens `[2B, L]`, those of the next token, then those of the
            token after it. Hidden states `[B, L, D]` if the loss applies the head, and on all pipeline stages
            but the last.

        Raises:
            ValueError: `positions` is None under context parallelism.
        """
        if positions is None:
            if self.context_parallel is not None:
                raise ValueError(
                    "context parallelism needs positions, because they place each shard in its sequence"
                )
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        sequence = SequenceLayout.from_positions(positions, self.context_parallel)
        decays = iter([decay() for decay in self.decays()])
        embed = _MakeContiguous.apply if self.tok_embeddings is None else self.tok_embeddings
        h_BLD = embed(tokens)
        next_BLD = None
        if self.mtp is not None and len(tokens) == 2 * len(positions):
            h_BLD, next_BLD = h_BLD.chunk(2)
        for layer in self.layers.values():
            decay = next(decays) if layer.linear_attention is not None else None
            h_BLD = layer(h_BLD, attention_masks, positions, decay, sequence=sequence)
        h_BLD = self.norm(h_BLD) if self.norm is not None else _MakeContiguous.apply(h_BLD)
        if self.mtp is not None:
            if next_BLD is not None:
                after_BLD = self.mtp(h_BLD, next_BLD, attention_masks, positions, sequence=sequence)
                h_BLD = torch.cat([h_BLD, after_BLD])
            h_BLD = self.mtp.gather(h_BLD)
        return h_BLD if self._skip_lm_head or self.lm_head is None else self.lm_head(h_BLD)


class _MakeContiguous(torch.autograd.Function):
    """Makes hidden states and their gradients contiguous, because pipeline stages send only such tensors.

    Shards of sequence parallelism may not be contiguous.
    """

    @staticmethod
    def forward(ctx: object, x_BLD: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x_BLD.contiguous()

    @staticmethod
    def backward(ctx: object, d_BLD: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return d_BLD.contiguous()
