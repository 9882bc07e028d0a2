"""How much memory a rank needs.

What is stored for the whole run follows from the placements of the parameters and is exact. What blocks keep
and use is tracked while they run with fake tensors (`titan_gdn.plan.block_memory`). The rest is an estimate
from shapes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, MemoryBudgetAC
from torchtitan.distributed.parallel_dims import MeshAxisName, SpmdLayout

from titan_gdn.config.source import ConfigError
from titan_gdn.models.hybrid.block import HybridBlock
from titan_gdn.models.hybrid.model import HybridModel
from titan_gdn.models.hybrid.pipeline import Stage, microbatches_of, stages_of
from titan_gdn.parallel.traffic import ShardedBatch
from titan_gdn.plan.block_memory import BlockMemory, block_memory

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

ASSUMPTIONS = (
    "Parameters, gradients, optimizer and buffers are exact. Blocks are tracked in eager mode, with FLA's "
    "kernels unless kernel = torch, one document per row and equally loaded experts. FSDP keeps two blocks "
    "gathered and the gradients of one block to reduce; in a pipeline it keeps all stages of the rank "
    "gathered and their gradients whole. All gradients exist while all activations do, as with gradient "
    "accumulation. Not counted: temporary buffers inside operators, fragmentation, buffers of NCCL and CUDA, "
    "the data, and what compilation and quantization save."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank's device at the peak of a step. In a pipeline, of the rank that needs the most.

    Attributes:
        pipeline_rank: that pipeline rank.
        parameters: this rank's shards of the parameters, in `training.dtype`.
        gradients: their gradients, in the same dtype.
        optimizer: Adam's two averages in the same dtype, three with `amsgrad`.
        buffers: the rotary table and the experts' counters.
        activations: what all layers keep from forward to backward, with the run's activation checkpointing.
        exchange: what the exchanges of linear attention layers add to that.
        block: what the backward of the largest block uses in addition: what it recomputes, the buffers of its
            exchange, and its gradients until they are reduced.
        gathered: parameters that FSDP has gathered and gradients that it reduces while a block runs.
        loss: gathered hidden states, logits and head while the loss runs, instead of the last two.
    """

    pipeline_rank: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    exchange: int
    block: int
    gathered: int
    loss: int

    @property
    def total(self) -> int:
        """The larger of the two peaks, in a block's backward and in the loss."""
        stored = self.parameters + self.gradients + self.optimizer + self.buffers
        return stored + self.activations + self.exchange + max(self.block + self.gathered, self.loss)


@dataclass(frozen=True, slots=True)
class Added:
    """Bytes that the exchange of a linear attention layer adds.

    Attributes:
        kept: from forward to backward.
        transient: while the layer runs.
    """

    kept: int
    transient: int


def estimate(
    model: HybridModel,
    config: "Trainer.Config",
    dims: ParallelDims,
    batch: ShardedBatch,
    exchanges: Mapping[str, Added],
) -> Memory:
    """The memory of a rank. In a pipeline, of the rank that needs the most.

    Args:
        model: the model on the meta device, with placements in its configuration. Its parameters are replaced
            with the shards of one rank.
        config: the run.
        dims: its mesh.
        batch: its batch.
        exchanges: what the exchange of each layer adds, by the layer's name.
    """
    take_share(model, dims)
    model.share_rotary_table()
    buffers = list(model.named_buffers(remove_duplicate=False))
    sizes, blocks = stored(model, dims), _blocks(model, config, batch)
    pipeline = stages_of(len(model.layers), config, mtp=model.mtp is not None)
    on_device = 0 if config.training.enable_cpu_offload else 1

    def of_rank(rank: int) -> Memory:
        stages = pipeline[rank]

        def own(name: str) -> bool:
            return any(stage.holds(name) for stage in stages)

        stored_here = {name: size for name, size in sizes.items() if own(name)}
        gathered, with_head = _gathered(model, config, stages)
        kept, kept_by_exchange, at_work = 0, 0, []
        for name, in_flight in [(name, stage.in_flight) for stage in stages for name in stage.modules]:
            if name not in blocks:
                continue
            added = exchanges.get(name, Added(0, 0))
            kept += in_flight * blocks[name].kept
            kept_by_exchange += in_flight * added.kept
            at_work.append(blocks[name].peak - blocks[name].kept + added.transient)
        parameters = on_device * sum(stored_here.values())
        return Memory(
            pipeline_rank=rank,
            parameters=parameters,
            gradients=parameters,
            optimizer=on_device * sum(x * _averages(name, config) for name, x in stored_here.items()),
            buffers=sum({id(x): x.nbytes for name, x in buffers if own(name)}.values()),
            activations=kept + _beside_blocks(pipeline, rank, config, batch, model.norm.weight.shape[0]),
            exchange=kept_by_exchange,
            block=max(at_work, default=0),
            gathered=gathered,
            loss=with_head + _loss(model, config, batch) if own("lm_head.weight") else 0,
        )

    return max((of_rank(rank) for rank in range(len(pipeline))), key=lambda memory: memory.total)


def take_share(model: HybridModel, dims: ParallelDims) -> None:
    """Replace the parameters of a model on the meta device with the shards of one TP (and EP) rank.

    Layers read their heads and widths from their weights, so that afterwards they compute a rank's share.
    """
    shares: dict[int, nn.Parameter] = {}  # a tied weight stays one
    modules: list[Any] = list(model.modules())
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in shares:
                shape = _share(parameter, module._sharding_config.state_shardings[name], dims)
                shares[id(parameter)] = nn.Parameter(parameter.new_empty(shape))
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, shares[id(parameter)])


def _share(parameter: Tensor, layout: SpmdLayout, dims: ParallelDims) -> list[int]:
    """The shape of one TP or EP rank's shard."""
    degrees, shape = {MeshAxisName.TP: dims.tp, MeshAxisName.EP: dims.ep}, list(parameter.shape)
    for axis, placement in layout.per_axis_spmd_types().items():
        if isinstance(placement, spmd.Shard) and axis in degrees:
            shape[placement.dim] = _divided(shape[placement.dim], degrees[axis])
    return shape


def _divided(count: int, parts: int) -> int:
    return -(-count // parts)


def stored(model: HybridModel, dims: ParallelDims) -> dict[str, int]:
    """Bytes that FSDP stores of each parameter on a rank, of a model that `take_share` has changed.

    FSDP shards the first dimension; TorchTitan shards the second dimension of experts if there are fewer
    experts than ranks in the mesh. Uneven shards are padded to the size of the largest.
    """
    sizes = {}
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for prefix, module in modules:
        experts = module.num_experts if hasattr(module, "w1_EFD") else None
        degree = dims.dp_shard * dims.cp
        ranks = dims.dp_replicate * degree * (dims.tp if dims.spmd_backend == "spmd_types" else 1)
        if experts and dims.ep > 1:
            ranks = degree * dims.tp
            degree = ranks // dims.ep
        for name, parameter in module.named_parameters(recurse=False):
            shape = list(parameter.shape)
            dim = 1 if experts and ranks > experts else 0
            shape[dim] = _divided(shape[dim], degree)
            sizes[f"{prefix}.{name}"] = torch.Size(shape).numel() * parameter.element_size()
    return {name: sizes[name] for name, _ in model.named_parameters()}  # counts a tied weight once


def _averages(name: str, config: "Trainer.Config") -> int:
    """How many averages the optimizer keeps of a parameter: its group is the first whose pattern matches."""
    groups = config.optimizer.param_groups
    kwargs = next((x.optimizer_kwargs for x in groups if re.search(x.pattern, name)), None)
    return 0 if kwargs is None else 3 if kwargs.get("amsgrad") else 2


def _gathered(model: HybridModel, config: "Trainer.Config", stages: list[Stage]) -> tuple[int, int]:
    """What FSDP gathers and reduces while the backward of a block runs, and while the loss runs.

    A block is gathered while the block before it is still gathered and that block's gradients are copied for
    the reduction. The head is gathered once for all chunks of the loss, and its gradients accumulate in the
    dtype of the reduction. In a pipeline nothing is freed or reduced before the last micro-batch: stages stay
    gathered, and their whole gradients accumulate in the dtype of the reduction.
    """
    training, parallelism = config.training, config.parallelism
    size, reduced = (
        TORCH_DTYPE_MAP[name].itemsize
        for name in (training.mixed_precision_param, training.mixed_precision_reduce)
    )
    pipeline = parallelism.pipeline_parallel_degree > 1
    modules = {name: model.get_submodule(name) for stage in stages for name in stage.modules}
    decays = [x for module in modules.values() for x in _decay_of(module)]
    own = {id(x) for x in decays}

    def elements(*names: str) -> int:
        parameters = [x for name in names if name in modules for x in modules[name].parameters()]
        return sum({id(x): x.numel() for x in parameters if id(x) not in own}.values())

    blocks = [elements(name) for name in modules if name.startswith("layers.") or name == "mtp"]
    embedding, head = elements("tok_embeddings"), elements("norm", "lm_head")
    largest = max(blocks, default=0)  # a stage may consist of the head only
    always, running = sum(x.nbytes for x in decays), 2 * largest
    stays = 0
    if pipeline or parallelism.fsdp_reshard_after_forward == "never":
        always += size * embedding
        running = stays = sum(blocks)
    if pipeline:
        always += size * head + reduced * (embedding + sum(blocks) + head)
        return always + size * running, always + size * (stays + head)
    return always + size * running + reduced * largest, always + size * stays + (2 * size + reduced) * head


def _decay_of(block: nn.Module) -> list[nn.Parameter]:
    """Parameters of a block that FSDP gathers with those of the model."""
    linear = getattr(block, "linear_attention", None)
    return [] if linear is None else list(linear.decay.parameters())


def _beside_blocks(
    pipeline: list[list[Stage]], rank: int, config: "Trainer.Config", batch: ShardedBatch, width: int
) -> int:
    """Inputs and outputs of pipeline stages, in addition to what blocks keep.

    For each micro-batch of a step, torch allocates a buffer for the stage's input and one for the gradient
    that it receives. Inputs of micro-batches in flight are counted with the block that keeps them. Outputs
    are kept until their backward. Of the last stage these are the input and output of the norm and the
    gradient of the loss; `_loss` counts those of one micro-batch.
    """
    received, sent, lost = 0, 0, 0
    for place, stage in enumerate(pipeline[rank]):
        if (rank, place) != (0, 0):
            received += microbatches_of(config) - stage.in_flight
        if (rank, place) != (len(pipeline) - 1, len(pipeline[rank]) - 1):
            received += microbatches_of(config)
            sent += stage.in_flight
        else:
            lost += stage.in_flight - 1
    between = batch.tokens_between_layers * width * batch.itemsize * (received + sent)
    return between + batch.tokens_of_cp_rank * width * (2 * batch.itemsize + 4) * lost


def _loss(model: HybridModel, config: "Trainer.Config", batch: ShardedBatch) -> int:
    """Hidden states, whole and in chunks, their gradient in float32, and the logits of one chunk.

    The backward of the cross entropy holds several tensors of the size of the logits: the product itself, and
    in float32 the log-probabilities and what becomes their gradient, one more if the vocabulary is sharded.
    Multi-token prediction has a second row of hidden states, logits and log-probabilities for each row, and
    the backward of one of its two cross entropies after the other.
    """
    vocabulary, width = model.lm_head.weight.shape
    losses = 1 if model.mtp is None else 2
    states = losses * batch.tokens_of_cp_rank * width
    logits = batch.tokens_of_cp_rank // getattr(config.loss, "num_chunks", 1) * vocabulary
    copies = (4 if batch.tp > 1 else 3) + losses - 1
    return states * (2 * batch.itemsize + 4) + logits * (losses * batch.itemsize + 4 * copies)


_MTP_LAYER = "mtp.layers.0"


def _blocks(model: HybridModel, config: "Trainer.Config", batch: ShardedBatch) -> dict[str, BlockMemory]:
    """What each block keeps and uses. Blocks with the same shapes are run once.

    A memory budget is interpolated between full checkpointing (0) and no checkpointing (1).
    """
    kinds: dict[tuple, list[str]] = {}
    named = {f"layers.{number}": block for number, block in model.layers.items()}
    if model.mtp is not None:
        named[_MTP_LAYER] = model.mtp.layers["0"]
    for name, block in named.items():
        shapes = tuple((name, x.shape) for name, x in block.named_parameters())
        kinds.setdefault(shapes, []).append(name)
    policy, dtype = config.activation_checkpoint, TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    width = model.norm.weight.shape[0]
    tracked = {}
    for names in kinds.values():
        if policy is None or isinstance(policy, MemoryBudgetAC.Config):
            checkpointed = _not_checkpointed
        else:
            checkpointed = partial(_checkpointed, policy, names[0])
        block = block_memory(
            cast(HybridBlock, model.get_submodule(names[0])), width, batch, dtype, checkpointed
        )
        if isinstance(policy, MemoryBudgetAC.Config):
            given = batch.tokens_between_layers * width * batch.itemsize
            block = replace(block, kept=given + int(policy.memory_budget * (block.kept - given)))
        tracked |= dict.fromkeys(names, block)
    if model.mtp is not None:
        # Its layer, and what the three norms and `fc` keep: their inputs, those of norms in float32.
        beside = batch.tokens_between_layers * width * (3 * 4 + 2 * batch.itemsize)
        block = tracked.pop(_MTP_LAYER)
        tracked["mtp"] = replace(block, kept=block.kept + beside, peak=block.peak + beside)
    return tracked


def _not_checkpointed(block: nn.Module) -> nn.Module:
    return block


def _checkpointed(policy: ActivationCheckpointing.Config, name: str, block: nn.Module) -> nn.Module:
    try:
        return policy.build(dump_folder="")._wrap_block(block, base_fqn=name)
    except ValueError as error:
        raise ConfigError(f"[activation_checkpoint]: {error}") from error
