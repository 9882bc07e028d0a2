"""Selects the exchange of a model's layers for a run, and reads the settings of the run that decide it."""

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools.logging import logger

from titan_gdn.layers.linear_attention import LinearAttention
from titan_gdn.models.hybrid.activation_checkpoint import SelectiveAC
from titan_gdn.models.hybrid.block import linear_kinds, linear_layers, names_of
from titan_gdn.models.hybrid.pipeline import stages_of
from titan_gdn.parallel.cost import Choice, choose
from titan_gdn.parallel.exchange.registry import EXCHANGES
from titan_gdn.parallel.segments import Order
from titan_gdn.parallel.traffic import ShardedBatch

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def choose_exchanges(model: Decoder.Config, config: "Trainer.Config") -> None:
    """Replaces "auto" with the exchange that takes the least time, for each kind of layer."""
    parallelism = config.parallelism
    if parallelism.context_parallel_degree == 1:
        return
    for kind in linear_kinds(model.layers):
        if kind.run.exchange != "auto":
            continue
        choice = choice_of(model, kind, config)
        for layer in linear_layers(model.layers):
            if type(layer) is type(kind):
                layer.run = replace(layer.run, exchange=choice.name)
        logger.info(
            f"Exchange of {kind.layer_class.title} at CP {parallelism.context_parallel_degree}, "
            f"TP {parallelism.tensor_parallel_degree}: {choice.name} ({_in_short(choice)})"
        )


def _in_short(choice: Choice) -> str:
    """The times that decide. The planner prints what they consist of, and why an exchange is impossible."""
    ranked = sorted(choice.costs, key=lambda name: choice.costs[name].total)
    told = ", ".join(f"{name} {choice.costs[name].total * 1e3:.3g} ms" for name in ranked) + " per layer"
    if choice.name != ranked[0]:
        told += f"; within 1% of {ranked[0]}, with smaller buffers"
    if choice.impossible:
        told += f"; impossible: {', '.join(choice.impossible)}"
    return told


def choice_of(model: Decoder.Config, layer: LinearAttention.Config, config: "Trainer.Config") -> Choice:
    """Returns the exchange that "auto" selects for the layers of this kind, with the reason.

    Args:
        model: the model.
        layer: one of the layers of this kind.
        config: the run.

    Raises:
        ValueError: no exchange is possible.
    """
    same_kind = names_of(model.layers, layer)
    # Layers times micro-batches in flight, on the pipeline rank with the largest number.
    kept = max(
        sum(sum(name in same_kind for name in stage.modules) * stage.in_flight for stage in stages)
        for stages in stages_of(len(model.layers), config)
    )
    batch = batch_of(layer, config)
    return choose(layer.shape(), batch, layer.run.machine, recomputes(config), kept, saved_exchanges(config))


def batch_of(layer: LinearAttention.Config, config: "Trainer.Config") -> ShardedBatch:
    """Returns the batch of one forward and how the run shards it, for the traffic model."""
    parallelism, training = config.parallelism, config.training
    pipeline = parallelism.pipeline_parallel_degree > 1
    return ShardedBatch(
        rows=parallelism.pipeline_parallel_microbatch_size if pipeline else training.local_batch_size,
        length=training.seq_len,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        sequence_parallel=parallelism.enable_sequence_parallel,
        order=cast(Order, parallelism.context_parallel_load_balancer or "contiguous"),
        itemsize=TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize,
        regather=layer.run.regather,
    )


def recomputes(config: "Trainer.Config") -> bool:
    """Whether the backward repeats the forward of a linear attention layer, its exchange included.

    A memory budget counts as False. With a small budget, torch's partitioner does repeat an all-to-all,
    because it does not know that it is a collective. Which ones it repeats is only known after compilation.
    """
    return isinstance(config.activation_checkpoint, FullAC.Config | activation_checkpoint.SelectiveAC.Config)


def saves_exchange(config: "Trainer.Config") -> bool:
    """Whether selective checkpointing keeps the results of the collectives that `Exchange.saved` names."""
    policy = config.activation_checkpoint
    return isinstance(policy, SelectiveAC.Config) and policy.save_exchange


def saved_exchanges(config: "Trainer.Config") -> tuple[str, ...]:
    """Returns the exchanges that the backward does not repeat, because checkpointing keeps their results."""
    if not saves_exchange(config):
        return ()
    return tuple(name for name, exchange in EXCHANGES.items() if not exchange.sends_again)
