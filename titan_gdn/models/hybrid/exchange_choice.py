"""Which exchange the layers of a model take in a run, and what of the run that depends on."""

from dataclasses import replace
from typing import TYPE_CHECKING

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
from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.traffic import ShardedBatch

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer


def choose_exchanges(model: Decoder.Config, config: "Trainer.Config") -> None:
    """Replace "auto" by the exchange that takes the least time, for each kind of layer."""
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
            f"Exchange of {kind._owner.title} at CP {parallelism.context_parallel_degree}, "
            f"TP {parallelism.tensor_parallel_degree}: {choice.name} ({choice.reason})"
        )


def choice_of(model: Decoder.Config, layer: LinearAttention.Config, config: "Trainer.Config") -> Choice:
    """The exchange that "auto" is for the layers of this kind.

    Raises:
        ValueError: none is possible.
    """
    alike = names_of(model.layers, layer)
    kept = max(
        sum(sum(name in alike for name in stage.modules) * stage.in_flight for stage in stages)
        for stages in stages_of(len(model.layers), config)
    )
    split = split_of(layer, config)
    return choose(layer.shape(), split, layer.run.machine, recomputes(config), kept, saved_exchanges(config))


def split_of(layer: LinearAttention.Config, config: "Trainer.Config") -> ShardedBatch:
    """How a forward's batch lies on the ranks of a run, for the traffic model."""
    parallelism, training = config.parallelism, config.training
    pipeline = parallelism.pipeline_parallel_degree > 1
    return ShardedBatch(
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
