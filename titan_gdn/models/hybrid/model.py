"""Decoders whose layers attend linearly or fully, each followed by a dense or sparse feed-forward."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common import FeedForward
from torchtitan.models.common.attention import AttentionMasksType, BaseAttention, FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from titan_gdn.layers.gated_delta_net import GatedDeltaNet
from titan_gdn.layers.kimi_delta_attention import KimiDeltaAttention
from titan_gdn.layers.linear_attention import Decay, LinearAttention
from titan_gdn.models.hybrid import quantize
from titan_gdn.models.hybrid.activation_checkpoint import SelectiveAC
from titan_gdn.models.hybrid.pipeline import check_pipeline
from titan_gdn.ops.backends import why_not_fla
from titan_gdn.parallel.cost import Choice, choose
from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.sequence import ContextParallel, SequenceLayout
from titan_gdn.parallel.traffic import Split, impossible

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

_LOWEST = -torch.finfo(torch.float32).max
NAMES = {GatedDeltaNet.Config: "Gated DeltaNet", KimiDeltaAttention.Config: "Kimi Delta Attention"}


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
        """`[B, L, D]` to `[B, L, D]`; `decay` is what this layer's `Decay` returned, if it has one."""
        h_BLD = self.attention_norm(x_BLD)
        if self.linear_attention is not None:
            h_BLD = self.linear_attention(h_BLD, *decay, sequence=sequence)
        else:
            h_BLD = self.attention(
                h_BLD, attention_masks=attention_masks, positions=positions, sequence=sequence
            )
        x_BLD = x_BLD + h_BLD
        feed_forward = self.moe if self.moe_enabled else self.feed_forward
        return x_BLD + feed_forward(self.ffn_norm(x_BLD))


class HybridModel(Decoder):
    """The decoder. Documents are told apart by `positions`: 0 begins one.

    A model is a subclass whose `Config` says how its full attention is sharded, and what it refuses beyond
    `check`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        converters: list[QuantizationConverter.Config] = field(default_factory=list)
        """What is quantized, and how: see `titan_gdn.models.hybrid.quantize`."""

        @property
        def max_seq_len(self) -> int:
            """Tokens that the rotary embedding reaches, where there is one; nothing else has a limit."""
            rope = getattr(self.first_attention, "rope", None)
            return sys.maxsize if rope is None else rope.max_seq_len

        def linear_layers(self) -> list[LinearAttention.Config]:
            """The linear attention layers in order."""
            return [layer.linear_attention for layer in self.layers if layer.linear_attention is not None]

        def linear_kinds(self) -> list[LinearAttention.Config]:
            """One linear attention layer of each class; those of a class are alike."""
            return list({type(layer): layer for layer in reversed(self.linear_layers())}.values())

        def check(self, config: "Trainer.Config") -> None:
            """Refuse the run that cannot be, before anything is built.

            Raises:
                ValueError: heads that TP does not divide, a length that TP and CP do not, experts that the
                    ranks cannot share, an exchange or pipeline stages that cannot be.
            """
            check_pipeline(self, config)
            self._check_widths(config.parallelism)
            self._check_experts(config.parallelism)
            self._check_routing(config)
            self._check_length(config.parallelism, config.training.seq_len)
            self._check_exchange(config)
            for layer in self.linear_layers():
                if layer.run.lower_bound is not None and not isinstance(layer, KimiDeltaAttention.Config):
                    raise ValueError(
                        f"linear_attention.lower_bound = {layer.run.lower_bound} is for Kimi Delta "
                        "Attention, which this model does not have: leave it out"
                    )
                if layer.run.lower_bound is not None and not _LOWEST < layer.run.lower_bound < 0:
                    raise ValueError(
                        f"linear_attention.lower_bound = {layer.run.lower_bound}: expected a number below 0, "
                        "of which the log decay stays above, or none"
                    )
            quantize.check(self, config)
            experts = any(layer.moe is not None for layer in self.layers)
            compiled = config.compile.enable and "model" in config.compile.components
            if experts and compiled and config.training.mixed_precision_param == "float32":
                raise ValueError(
                    "compile.enable with experts needs training.mixed_precision_param = 'bfloat16': "
                    "torch.compile does not trace grouped products in float32"
                )

        def check_device(self) -> None:
            """Refuse what does not run on TorchTitan's device here; a plan is made for another machine.

            Raises:
                ValueError: says why, and what is possible.
            """
            kernel = next((layer.run.kernel for layer in self.linear_layers()), "auto")
            if kernel == "fla" and (reason := why_not_fla(torch.device(device_type))):
                raise ValueError(
                    f"linear_attention.kernel = 'fla': {reason} Possible here are 'auto' and 'torch'."
                )
            quantize.check_device(self.converters)

        def _check_widths(self, parallelism: ParallelismConfig) -> None:
            """What TP divides."""
            tp = parallelism.tensor_parallel_degree
            linear = next(iter(self.linear_layers()), None)
            split = {"rows of the vocabulary": self.vocab_size}
            if linear:
                split[f"key heads of {NAMES[type(linear)]}"] = linear.n_key_heads
            if self.first_attention:
                split["query heads of the full attention"] = self.first_attention.n_heads
            for layer in self.layers:
                split |= _hidden_widths(layer, parallelism.expert_parallel_degree)
            for name, count in split.items():
                if count % tp:
                    raise ValueError(
                        f"parallelism.tensor_parallel_degree = {tp} does not divide the {count} {name}; "
                        f"possible are {_divisors(list(split.values()))}"
                    )

        def _check_experts(self, parallelism: ParallelismConfig) -> None:
            """What EP divides, and FSDP where more ranks than experts share them: then it cuts their rows."""
            ep = parallelism.expert_parallel_degree
            layer = next((layer.moe for layer in self.layers if layer.moe is not None), None)
            if layer is None:
                if ep > 1:
                    raise ValueError(
                        f"parallelism.expert_parallel_degree = {ep}: this model has no experts, set it to 1"
                    )
                return
            experts = layer.routed_experts.inner_experts
            if experts.num_experts % ep:
                raise ValueError(
                    f"parallelism.expert_parallel_degree = {ep} does not divide the {experts.num_experts} "
                    f"experts; possible are {_divisors([experts.num_experts])}"
                )
            tp = parallelism.tensor_parallel_degree
            shards = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
            # As `apply_fsdp_to_decoder` counts them; a degree of -1 is known to who knows all ranks.
            if ep > 1:
                ranks, shards, rows = shards * tp, shards * tp // ep, experts.hidden_dim
            else:
                ranks = shards * parallelism.data_parallel_replicate_degree
                ranks *= tp if parallelism.spmd_backend == "spmd_types" else 1
                rows = experts.hidden_dim // tp
            if ranks > experts.num_experts and (rows % shards or experts.dim % shards):
                raise ValueError(
                    f"parallelism: {ranks} ranks share {experts.num_experts} experts, so that FSDP cuts the "
                    f"rows of each, {rows} and {experts.dim} on a rank, into {shards} parts, which does not "
                    "divide them: change data_parallel_shard_degree, context_parallel_degree or "
                    "expert_parallel_degree, or model.overrides.expert_hidden_dim"
                )

        def _check_routing(self, config: "Trainer.Config") -> None:
            """TorchTitan's router that deals tokens out mixes DTensors and plain tensors under TP."""
            parallelism, tp = config.parallelism, config.parallelism.tensor_parallel_degree
            experts = any(layer.moe is not None for layer in self.layers)
            if experts and tp > 1 and parallelism.spmd_backend == "partial_dtensor" and deals_out(config):
                why = "debug.moe_force_load_balance = true"
                if not config.debug.moe_force_load_balance:
                    why = "comm.mode = 'fake_backend' with parallelism.expert_parallel_degree > 1"
                raise ValueError(
                    f"{why} deals tokens out to experts whatever their scores, which TorchTitan cannot with "
                    f"parallelism.tensor_parallel_degree = {tp} and parallelism.spmd_backend = "
                    "'partial_dtensor': set it to 'spmd_types'"
                )

        def _check_length(self, parallelism: ParallelismConfig, seq_len: int) -> None:
            tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
            sp = tp if parallelism.enable_sequence_parallel else 1
            if cp > 1 and seq_len % (2 * cp * sp):
                raise ValueError(
                    f"training.seq_len = {seq_len} does not divide by 2 * context_parallel_degree = {2 * cp}"
                    + (f" times tensor_parallel_degree = {tp} (sequence parallelism)" if sp > 1 else "")
                )
            if parallelism.expert_parallel_degree > 1 and seq_len % (cp * tp):
                raise ValueError(
                    f"training.seq_len = {seq_len} does not divide by context_parallel_degree = {cp} times "
                    f"tensor_parallel_degree = {tp}: with expert_parallel_degree > 1 the ranks of both route "
                    "tokens of their own"
                )
            attention = self.first_attention
            flex = attention and isinstance(attention.inner_attention, FlexAttention.Config)
            if cp > 1 and flex and seq_len % (128 * cp):
                raise ValueError(
                    f"training.seq_len = {seq_len} does not divide by 128 * context_parallel_degree = "
                    f"{128 * cp}, which FlexAttention's blocks need"
                )

        def _check_exchange(self, config: "Trainer.Config") -> None:
            """Whether the exchange of each kind of layer can be; of "auto", whether any can."""
            for layer in self.linear_kinds():
                exchange = layer.run.exchange
                if exchange == "auto":
                    self.choice(layer, config)
                elif reason := impossible(exchange, layer.shape(), split_of(layer, config)):
                    name = NAMES[type(layer)]
                    raise ValueError(f'linear_attention.exchange = "{exchange}" of {name}: {reason}')

        def update_from_config(self, *, config: "Trainer.Config", **kwargs: object) -> None:
            """Complete the configuration with what the run says (called by TorchTitan's trainer).

            In place of `Decoder.Config`'s, which wants a rotary embedding of every attention.
            """
            parallelism = config.parallelism
            self.check(config)
            self.check_device()
            self._choose_exchange(config)
            for layer in self.layers:
                if (rope := getattr(layer.attention, "rope", None)) is not None:
                    layer.attention.rope = replace(rope, max_seq_len=config.training.seq_len)
                if layer.moe is not None:
                    layer.moe.router._debug_force_load_balance = deals_out(config)
            self.set_sharding(
                tp=parallelism.tensor_parallel_degree,
                enable_sp=parallelism.enable_sequence_parallel,
                enable_ep=parallelism.expert_parallel_degree > 1,
            )
            quantize.quantize(self, config)

        def set_sharding(self, *, tp: int, enable_sp: bool, enable_ep: bool) -> None:
            """Write the placements of every parameter and activation into the configuration.

            Args:
                tp: degree of tensor parallelism.
                enable_sp: sequence parallelism.
                enable_ep: expert parallelism.
            """
            raise NotImplementedError

        def choice(self, layer: LinearAttention.Config, config: "Trainer.Config") -> Choice:
            """The exchange that "auto" is for the layers of this kind.

            Raises:
                ValueError: none is possible.
            """
            alike = sum(type(other) is type(layer) for other in self.linear_layers())
            split = split_of(layer, config)
            return choose(
                layer.shape(), split, layer.run.machine, recomputes(config), alike, saved_exchanges(config)
            )

        def _choose_exchange(self, config: "Trainer.Config") -> None:
            """Replace "auto" by the exchange that takes the least time, for each kind of layer."""
            parallelism = config.parallelism
            if parallelism.context_parallel_degree == 1:
                return
            for kind in self.linear_kinds():
                if kind.run.exchange != "auto":
                    continue
                choice = self.choice(kind, config)
                for layer in self.linear_layers():
                    if type(layer) is type(kind):
                        layer.run = replace(layer.run, exchange=choice.name)
                logger.info(
                    f"Exchange of {NAMES[type(kind)]} at CP {parallelism.context_parallel_degree}, "
                    f"TP {parallelism.tensor_parallel_degree}: {choice.name} ({choice.reason})"
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and floating point operations a token of forward and backward.

            Softmax attention grows with the sequence, the recurrence does not: it costs three products
            with a `[K, V]` state per value head and token (recall, write, read), forward, and twice
            that backward. As in TorchTitan, causality is not counted.
            """
            attention = self.first_attention
            heads, widths = (attention.n_heads, attention.pair_width) if attention else (0, 0)
            nparams, flops = get_moe_model_nparams_and_flops(self, model, heads, widths, seq_len)
            for layer in self.linear_layers():
                flops += 3 * 3 * 2 * layer.n_value_heads * layer.key_head_dim * layer.value_head_dim
            return nparams, flops

    # How sequences are split over ranks; set when the model is parallelized.
    context_parallel: ContextParallel | None = None

    def decays(self) -> Iterator[Decay]:
        """The decay modules of this model part's layers, in order."""
        return (
            layer.linear_attention.decay
            for layer in self.layers.values()
            if layer.linear_attention is not None
        )

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
    ) -> torch.Tensor:
        """Logits of every token (hidden states, where the loss applies the head itself).

        Args:
            tokens: `[B, L]` token ids.
            positions: `[B, L]` positions inside documents, 0 beginning one. Without, every row is one.
            attention_masks: the block mask of FlexAttention, built by the trainer.
        """
        if positions is None:
            if self.context_parallel is not None:
                raise ValueError("context parallelism needs positions: a shard does not say where it stands")
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        sequence = SequenceLayout.from_positions(positions, self.context_parallel)
        decays = iter([decay() for decay in self.decays()])
        embed = _BetweenStages.apply if self.tok_embeddings is None else self.tok_embeddings
        h_BLD = embed(tokens)
        for layer in self.layers.values():
            decay = next(decays) if layer.linear_attention is not None else None
            h_BLD = layer(h_BLD, attention_masks, positions, decay, sequence=sequence)
        h_BLD = self.norm(h_BLD) if self.norm is not None else _BetweenStages.apply(h_BLD)
        return h_BLD if self._skip_lm_head or self.lm_head is None else self.lm_head(h_BLD)


def deals_out(config: "Trainer.Config") -> bool:
    """Whether routers give every expert as many tokens: where that is asked for, and in a dry run with EP.

    There a rank receives what it sends, and torch's fake backend refuses to repeat nothing.
    """
    dry = config.comm.mode == "fake_backend" and config.parallelism.expert_parallel_degree > 1
    return dry or config.debug.moe_force_load_balance


class _BetweenStages(torch.autograd.Function):
    """What a pipeline stage is given or gives: torch sends it, and its gradient, only if rows lie in order.

    Shards of sequence parallelism may not.
    """

    @staticmethod
    def forward(ctx: object, x_BLD: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return x_BLD.contiguous()

    @staticmethod
    def backward(ctx: object, d_BLD: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return d_BLD.contiguous()


def split_of(layer: LinearAttention.Config, config: "Trainer.Config") -> Split:
    """How a forward's batch lies on the ranks of a run, for the traffic model."""
    parallelism, training = config.parallelism, config.training
    pipeline = parallelism.pipeline_parallel_degree > 1
    return Split(
        batch=parallelism.pipeline_parallel_microbatch_size if pipeline else training.local_batch_size,
        length=training.seq_len,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        sequence_parallel=parallelism.enable_sequence_parallel,
        order=parallelism.context_parallel_load_balancer or "contiguous",
        itemsize=TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize,
        regather=layer.run.regather,
    )


def recomputes(config: "Trainer.Config") -> bool:
    """Whether the backward repeats the forward of a linear attention layer, its exchange included.

    The compiler's memory budget is taken not to. Torch's partitioner does repeat an all-to-all where the
    budget is small, for it is none of the collectives that it knows; which, is not known before it compiles.
    """
    return isinstance(config.activation_checkpoint, FullAC.Config | activation_checkpoint.SelectiveAC.Config)


def saved_exchanges(config: "Trainer.Config") -> tuple[ExchangeName, ...]:
    """The exchanges that are not repeated all the same: selective checkpointing keeps their results.

    Of "all_gather" it keeps what goes back alone, and repeats the gather, which is most of it.
    """
    policy = config.activation_checkpoint
    return ("all_to_all", "state") if isinstance(policy, SelectiveAC.Config) and policy.save_exchange else ()


def _hidden_widths(layer: HybridBlock.Config, ep: int) -> dict[str, int]:
    """What TP divides in a feed-forward. With expert parallelism a single expert is whole."""
    if layer.moe is None:
        return {"hidden dimensions of a feed-forward": layer.feed_forward.w1.out_features}
    widths = {"hidden dimensions of the shared expert": layer.moe.shared_experts.w1.out_features}
    if ep == 1:
        # Eight at a time: torch's grouped products want rows of 16 bytes.
        hidden_dim = layer.moe.routed_experts.inner_experts.hidden_dim
        widths["times 8 hidden dimensions of an expert"] = hidden_dim // 8
    return widths


def _divisors(counts: list[int]) -> str:
    return ", ".join(str(tp) for tp in range(1, min(counts) + 1) if not any(count % tp for count in counts))
