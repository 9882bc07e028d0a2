"""What of a run cannot be with a model: sentences that come before anything is built."""

import re
from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import ParallelismConfig
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.utils import device_type

from titan_gdn.models.hybrid import quantize
from titan_gdn.models.hybrid.activation_checkpoint import SelectiveAC
from titan_gdn.models.hybrid.block import HybridBlock, linear_kinds, linear_layers
from titan_gdn.models.hybrid.config_registry import PATTERNS
from titan_gdn.models.hybrid.exchange_choice import batch_of, choice_of, recomputes
from titan_gdn.models.hybrid.pipeline import check_pipeline, stages_of
from titan_gdn.ops.backends import why_not_fla
from titan_gdn.parallel.exchange.registry import impossible

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def check(
    model: Decoder.Config, converters: list[QuantizationConverter.Config], config: "Trainer.Config"
) -> None:
    """Refuse the run that cannot be.

    Raises:
        ValueError: heads that TP does not divide, a length that TP and CP do not, experts that the ranks
            cannot share, an exchange or pipeline stages that cannot be.
    """
    check_pipeline(len(model.layers), model.enable_weight_tying, config)
    _check_widths(model, config.parallelism)
    _check_experts(model, config.parallelism)
    _check_routing(model, config)
    _check_length(model, config.parallelism, config.training.seq_len)
    _check_exchange(model, config)
    quantize.check(model, converters, config)
    _check_compile(model, config)
    _check_checkpointing(config)
    _check_optimizer(model, config)


def check_device(model: Decoder.Config, converters: list[QuantizationConverter.Config]) -> None:
    """Refuse what does not run on TorchTitan's device here; a plan is made for another machine.

    Raises:
        ValueError: says why, and what is possible.
    """
    kernel = next((layer.run.kernel for layer in linear_layers(model.layers)), "auto")
    if kernel == "fla" and (reason := why_not_fla(torch.device(device_type))):
        raise ValueError(f"linear_attention.kernel = 'fla': {reason} Possible here are 'auto' and 'torch'.")
    quantize.check_device(converters)


def _check_widths(model: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """What TP divides."""
    tp = parallelism.tensor_parallel_degree
    linear = next(iter(linear_layers(model.layers)), None)
    split = {"rows of the vocabulary": model.vocab_size}
    if linear:
        split[f"key heads of {linear._owner.title}"] = linear.n_key_heads
    if model.first_attention:
        split["query heads of the full attention"] = model.first_attention.n_heads
    for layer in model.layers:
        split |= _hidden_widths(layer, parallelism.expert_parallel_degree)
    for name, count in split.items():
        if count % tp:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {tp} does not divide the {count} {name}; "
                f"possible are {_divisors(list(split.values()))}"
            )
    key_value_heads = getattr(model.first_attention, "n_key_value_heads", 1)
    if tp % key_value_heads and key_value_heads % tp:
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {tp} and the {key_value_heads} key-value heads of the "
            "full attention: one must divide the other"
        )


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


def _check_experts(model: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """What EP divides, and FSDP where more ranks than experts share them: then it cuts their rows."""
    ep = parallelism.expert_parallel_degree
    layer = next((layer.moe for layer in model.layers if layer.moe is not None), None)
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


def _check_routing(model: Decoder.Config, config: "Trainer.Config") -> None:
    """TorchTitan's router that deals tokens out mixes DTensors and plain tensors under TP."""
    parallelism, tp = config.parallelism, config.parallelism.tensor_parallel_degree
    experts = any(layer.moe is not None for layer in model.layers)
    if experts and tp > 1 and parallelism.spmd_backend == "partial_dtensor" and deals_out(config):
        why = "debug.moe_force_load_balance = true"
        if not config.debug.moe_force_load_balance:
            why = "comm.mode = 'fake_backend' with parallelism.expert_parallel_degree > 1"
        raise ValueError(
            f"{why} deals tokens out to experts whatever their scores, which TorchTitan cannot with "
            f"parallelism.tensor_parallel_degree = {tp} and parallelism.spmd_backend = "
            "'partial_dtensor': set it to 'spmd_types'"
        )


def deals_out(config: "Trainer.Config") -> bool:
    """Whether routers give every expert as many tokens: where that is asked for, and in a dry run with EP.

    There a rank receives what it sends, and torch's fake backend refuses to repeat nothing.
    """
    dry = config.comm.mode == "fake_backend" and config.parallelism.expert_parallel_degree > 1
    return dry or config.debug.moe_force_load_balance


def _check_length(model: Decoder.Config, parallelism: ParallelismConfig, seq_len: int) -> None:
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
    attention = model.first_attention
    flex = attention and isinstance(attention.inner_attention, FlexAttention.Config)
    if cp > 1 and flex and seq_len % (128 * cp):
        raise ValueError(
            f"training.seq_len = {seq_len} does not divide by 128 * context_parallel_degree = "
            f"{128 * cp}, which FlexAttention's blocks need"
        )
    if seq_len > model.max_seq_len:
        raise ValueError(
            f"training.seq_len = {seq_len} exceeds the {model.max_seq_len} tokens of the rotary embedding: "
            "shorten it, or raise model.overrides.context_length or .yarn_factor"
        )


def _check_exchange(model: Decoder.Config, config: "Trainer.Config") -> None:
    """Whether the exchange of each kind of layer can be; of "auto", whether any can."""
    for layer in linear_kinds(model.layers):
        exchange = layer.run.exchange
        if exchange == "auto":
            choice_of(model, layer, config)
        elif reason := impossible(exchange, layer.shape(), batch_of(layer, config)):
            name = layer._owner.title
            raise ValueError(f'linear_attention.exchange = "{exchange}" of {name}: {reason}')


def _check_compile(model: Decoder.Config, config: "Trainer.Config") -> None:
    experts = any(layer.moe is not None for layer in model.layers)
    compiled = config.compile.enable and "model" in config.compile.components
    if experts and compiled and config.training.mixed_precision_param == "float32":
        raise ValueError(
            "compile.enable with experts needs training.mixed_precision_param = 'bfloat16': torch.compile "
            "does not trace grouped products in float32"
        )
    if not config.training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs = false: document offsets go to the host once a forward, which a "
            "CUDA graph cannot hold; leave it true"
        )


def _check_checkpointing(config: "Trainer.Config") -> None:
    policy = config.activation_checkpoint
    if isinstance(policy, SelectiveAC.Config) and policy.debug:
        raise ValueError(
            "activation_checkpoint.debug = true is for mode = 'full': torch has none for mode = 'selective'"
        )


def _check_optimizer(model: Decoder.Config, config: "Trainer.Config") -> None:
    """Every group has a parameter on every pipeline stage, of those that no group before it has.

    TorchTitan looks at the names that modules have when they are wrapped for checkpointing.
    """
    patterns = [group.pattern for group in config.optimizer.param_groups]
    if patterns == list(PATTERNS):  # which suit all stages that `check_pipeline` lets through
        return
    with torch.device("meta"):
        names = [name for name, _ in model.build().named_parameters()]
    for stage in (stage for stages in stages_of(len(model.layers), config) for stage in stages):
        left = {name for name in names if stage.holds(name)}
        if recomputes(config):
            left = {re.sub(r"^(layers\.\d+\.)", rf"\1{_CHECKPOINT_PREFIX}", name) for name in left}
        example = max(left)
        for pattern in patterns:
            found = {name for name in left if re.search(pattern, name)}
            if not found:
                where = ""
                if config.parallelism.pipeline_parallel_degree > 1:
                    where = f" of the pipeline stage of {', '.join(stage.modules)}"
                raise ValueError(
                    f"optimizer.param_groups: pattern = {pattern!r} matches no parameter{where} that no "
                    f"group before it has; names are such as {example!r}"
                )
            left -= found
        if left:
            raise ValueError(
                f"optimizer.param_groups: no pattern matches {len(left)} parameters, such as {max(left)!r}: "
                "add a last group of pattern = '.*'"
            )
