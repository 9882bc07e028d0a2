"""Validates a run against a model before anything is built."""

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
from titan_gdn.ops.delta_rule import too_wide
from titan_gdn.parallel.exchange.registry import impossible

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def check(
    model: Decoder.Config,
    mtp: bool,
    converters: list[QuantizationConverter.Config],
    config: "Trainer.Config",
) -> None:
    """Validates a run against a model, on any machine.

    Args:
        model: the model.
        mtp: whether it predicts the token after the next.
        converters: what is quantized, and how.
        config: the run.

    Raises:
        ValueError: heads, widths or the sequence length are not divisible by the degrees that shard them, or
            the exchange, the pipeline stages, the experts or the optimizer's groups do not fit the model.
    """
    check_pipeline(len(model.layers), model.enable_weight_tying, mtp, config)
    _check_widths(model, config.parallelism)
    _check_experts(model, config.parallelism)
    _check_routing(model, config)
    _check_length(model, config.parallelism, config.training.seq_len)
    _check_exchange(model, config)
    quantize.check(model, converters, config)
    _check_compile(model, config)
    _check_checkpointing(config)
    _check_optimizer(model, mtp, config)


def check_device(model: Decoder.Config, converters: list[QuantizationConverter.Config]) -> None:
    """Checks that kernels and number formats run on this machine.

    Args:
        model: the model.
        converters: what is quantized, and how.

    Raises:
        ValueError: says what does not run on this machine, why, and what is possible.
    """
    kernel = next((layer.run.kernel for layer in linear_layers(model.layers)), "auto")
    widest = max((kind.key_head_dim for kind in linear_kinds(model.layers)), default=0)
    if kernel == "fla" and (reason := why_not_fla(torch.device(device_type)) or too_wide(widest)):
        raise ValueError(f"linear_attention.kernel = 'fla': {reason} Possible here are 'auto' and 'torch'.")
    quantize.check_device(converters)


def _check_widths(model: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """Checks that heads, hidden widths and the vocabulary are divisible by the degree of TP."""
    tp = parallelism.tensor_parallel_degree
    sharded = {"rows of the vocabulary": model.vocab_size}
    for kind in linear_kinds(model.layers):
        sharded[f"key heads of {kind.layer_class.title}"] = kind.n_key_heads
    if model.first_attention:
        sharded["query heads of the full attention"] = model.first_attention.n_heads
    for layer in model.layers:
        sharded |= _hidden_widths(layer, parallelism.expert_parallel_degree)
    for name, count in sharded.items():
        if count % tp:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {tp} does not divide the {count} {name}; possible "
                f"degrees: {_divisors(list(sharded.values()))}"
            )
    key_value_heads = getattr(model.first_attention, "n_key_value_heads", 1)
    if tp % key_value_heads and key_value_heads % tp:
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {tp} and the {key_value_heads} key-value heads of the "
            "full attention: one must divide the other"
        )


def _hidden_widths(layer: HybridBlock.Config, ep: int) -> dict[str, int]:
    """Returns the widths of a feed-forward that TP shards. EP never shards a single expert."""
    widths = {}
    if layer.feed_forward is not None:
        widths["hidden dimensions of a feed-forward"] = layer.feed_forward.w1.out_features
    if layer.moe is None:
        return widths
    if layer.moe.shared_experts is not None:
        widths["hidden dimensions of the shared expert"] = layer.moe.shared_experts.w1.out_features
    if ep == 1:
        # In units of 8, because torch's grouped products need rows of 16 bytes.
        hidden_dim = layer.moe.routed_experts.inner_experts.hidden_dim
        widths["times 8 hidden dimensions of an expert"] = hidden_dim // 8
    return widths


def _divisors(counts: list[int]) -> str:
    return ", ".join(str(tp) for tp in range(1, min(counts) + 1) if not any(count % tp for count in counts))


def _check_experts(model: Decoder.Config, parallelism: ParallelismConfig) -> None:
    """Checks that experts are divisible by the degree of EP, and their rows by FSDP if it shards them."""
    ep = parallelism.expert_parallel_degree
    layer = next((layer.moe for layer in model.layers if layer.moe is not None), None)
    if layer is None:
        if ep > 1:
            raise ValueError(
                f"parallelism.expert_parallel_degree = {ep}: this model has no experts, so set it to 1"
            )
        return
    experts = layer.routed_experts.inner_experts
    if experts.num_experts % ep:
        raise ValueError(
            f"parallelism.expert_parallel_degree = {ep} does not divide the {experts.num_experts} "
            f"experts; possible degrees: {_divisors([experts.num_experts])}"
        )
    tp = parallelism.tensor_parallel_degree
    shards = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    # The ranks that `apply_fsdp_to_decoder` counts. The caller has resolved a degree of -1.
    if ep > 1:
        ranks, shards, rows = shards * tp, shards * tp // ep, experts.hidden_dim
    else:
        ranks = shards * parallelism.data_parallel_replicate_degree
        ranks *= tp if parallelism.spmd_backend == "spmd_types" else 1
        rows = experts.hidden_dim // tp
    if ranks > experts.num_experts and (rows % shards or experts.dim % shards):
        raise ValueError(
            f"[parallelism]: {ranks} ranks outnumber the {experts.num_experts} experts, so FSDP shards the "
            f"rows of each expert into {shards} parts, but {rows} or {experts.dim} rows are not divisible by "
            f"{shards}: change parallelism.data_parallel_shard_degree, parallelism.context_parallel_degree, "
            "parallelism.expert_parallel_degree or model.overrides.expert_hidden_dim"
        )


def _check_routing(model: Decoder.Config, config: "Trainer.Config") -> None:
    """Checks forced load balancing. Under TP, TorchTitan's router then mixes DTensors and plain tensors."""
    parallelism, tp = config.parallelism, config.parallelism.tensor_parallel_degree
    experts = any(layer.moe is not None for layer in model.layers)
    if experts and tp > 1 and parallelism.spmd_backend == "partial_dtensor" and forces_load_balance(config):
        why = "debug.moe_force_load_balance = true"
        if not config.debug.moe_force_load_balance:
            why = "comm.mode = 'fake_backend' with parallelism.expert_parallel_degree > 1"
        raise ValueError(
            f"{why} assigns tokens to experts regardless of scores, which TorchTitan does not support with "
            f"parallelism.tensor_parallel_degree = {tp} and parallelism.spmd_backend = 'partial_dtensor': "
            "set the backend to 'spmd_types'"
        )


def forces_load_balance(config: "Trainer.Config") -> bool:
    """Whether routers assign the same number of tokens to every expert: on request, and in a dry run with EP.

    In a dry run each rank receives what it sends, and torch's fake backend cannot repeat an empty tensor.
    """
    dry = config.comm.mode == "fake_backend" and config.parallelism.expert_parallel_degree > 1
    return dry or config.debug.moe_force_load_balance


def _check_length(model: Decoder.Config, parallelism: ParallelismConfig, seq_len: int) -> None:
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    sp = tp if parallelism.enable_sequence_parallel else 1
    if cp > 1 and seq_len % (2 * cp * sp):
        raise ValueError(
            f"training.seq_len = {seq_len} is not divisible by 2 * parallelism.context_parallel_degree = "
            f"{2 * cp}"
            + (f" times parallelism.tensor_parallel_degree = {tp} (sequence parallelism)" if sp > 1 else "")
        )
    if parallelism.expert_parallel_degree > 1 and seq_len % (cp * tp):
        raise ValueError(
            f"training.seq_len = {seq_len} is not divisible by parallelism.context_parallel_degree = {cp} "
            f"times parallelism.tensor_parallel_degree = {tp}: with parallelism.expert_parallel_degree > 1 "
            "each of these ranks routes its own tokens"
        )
    attention = model.first_attention
    flex = attention and isinstance(attention.inner_attention, FlexAttention.Config)
    if cp > 1 and flex and seq_len % (128 * cp):
        raise ValueError(
            f"training.seq_len = {seq_len} is not divisible by 128 * parallelism.context_parallel_degree = "
            f"{128 * cp}, which FlexAttention's blocks need"
        )
    if seq_len > model.max_seq_len:
        raise ValueError(
            f"training.seq_len = {seq_len} exceeds the {model.max_seq_len} tokens of the rotary embedding: "
            "shorten it, or extend the model (Qwen3-Next and Qwen3.5: model.overrides.context_length or "
            "yarn_factor)"
        )


def _check_exchange(model: Decoder.Config, config: "Trainer.Config") -> None:
    """Checks that the exchange of each kind of layer is possible; for "auto", that any exchange is."""
    for layer in linear_kinds(model.layers):
        exchange = layer.run.exchange
        if exchange == "auto":
            choice_of(model, layer, config)
        elif reason := impossible(exchange, layer.shape(), batch_of(layer, config)):
            name = layer.layer_class.title
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
            "training.disable_cuda_graphs = false: each forward copies document offsets to the host, which a "
            "CUDA graph does not support; leave it true"
        )


def _check_checkpointing(config: "Trainer.Config") -> None:
    policy = config.activation_checkpoint
    if isinstance(policy, SelectiveAC.Config) and policy.debug:
        raise ValueError(
            "activation_checkpoint.debug = true needs activation_checkpoint.mode = 'full': torch does not "
            "support it with 'selective'"
        )


def _check_optimizer(model: Decoder.Config, mtp: bool, config: "Trainer.Config") -> None:
    """Checks that on every pipeline stage each group matches a parameter that no earlier group matches.

    TorchTitan matches the names that modules have when they are wrapped for activation checkpointing.
    """
    patterns = [group.pattern for group in config.optimizer.param_groups]
    if patterns == list(PATTERNS):  # the default groups fit all stages that `check_pipeline` accepts
        return
    with torch.device("meta"):
        names = [name for name, _ in model.build().named_parameters()]
    for stage in (stage for stages in stages_of(len(model.layers), config, mtp) for stage in stages):
        left = {name for name in names if stage.holds(name)}
        if recomputes(config):
            left = {re.sub(r"^((?:mtp\.)?layers\.\d+\.)", rf"\1{_CHECKPOINT_PREFIX}", name) for name in left}
        example = max(left)
        for pattern in patterns:
            found = {name for name in left if re.search(pattern, name)}
            if not found:
                where = ""
                if config.parallelism.pipeline_parallel_degree > 1:
                    where = f" of the pipeline stage of {', '.join(stage.modules)}"
                raise ValueError(
                    f"optimizer.param_groups: pattern = {pattern!r} matches no parameter{where} that no "
                    f"earlier group matches; an example of a name is {example!r}"
                )
            left -= found
        if left:
            raise ValueError(
                f"optimizer.param_groups: no pattern matches {len(left)} parameters, such as {max(left)!r}: "
                "add a last group with pattern = '.*'"
            )
