"""How much memory a rank needs.

What lies in it for the whole run follows from the placements of the parameters and is exact; what the blocks
keep and hold is watched (`titan_gdn.plan.watch`); the rest is estimated from shapes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, MemoryBudgetAC
from torchtitan.distributed.parallel_dims import MeshAxisName, SpmdLayout

from titan_gdn.given import ConfigError
from titan_gdn.models.hybrid.model import HybridModel, recomputes
from titan_gdn.parallel.traffic import Split
from titan_gdn.plan.watch import Block, watch

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

ASSUMPTIONS = (
    "Parameters, gradients, optimizer and buffers are exact. A block counts with what its code keeps and "
    "holds in eager mode, by FLA's kernels unless kernel = torch, rows one document each, experts equally "
    "loaded. FSDP holds two blocks gathered and the gradients of one to be reduced. All gradients are there "
    "while all activations are, as when they accumulate. Not counted: what operators hold inside, fragments, "
    "NCCL's and CUDA's buffers, the data, and what compilation saves."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a rank's device at the worst moment of a step.

    Attributes:
        parameters: this rank's shards, in `training.dtype`.
        gradients: of them, in the same.
        optimizer: Adam's two averages in the same, three with `amsgrad`.
        buffers: rotary tables and the experts' counters.
        activations: what all layers keep from forward to backward, under the run's checkpointing.
        exchange: what the exchange of the linear attention adds to that, and its largest buffers.
        block: what else the largest block holds while its backward runs: what it computes again, and its
            gradients until they are reduced.
        gathered: parameters that FSDP gathered and gradients that it reduces, while a block runs.
        loss: hidden states, logits and the head, gathered, while the loss runs, in place of the last three.
    """

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
        """At the worse of the two moments, a block's and the loss's."""
        always = self.parameters + self.gradients + self.optimizer + self.buffers + self.activations
        return always + max(self.exchange + self.block + self.gathered, self.loss)


@dataclass(frozen=True, slots=True)
class Added:
    """What the exchange of some linear attention layers adds: `layers` times `kept`, once `transient`."""

    layers: int
    kept: int
    transient: int


def estimate(
    model: HybridModel,
    config: "Trainer.Config",
    dims: ParallelDims,
    split: Split,
    exchanges: Sequence[Added],
) -> Memory:
    """What a rank needs.

    Args:
        model: on the meta device, placements in its configuration. Its parameters are cut to one rank's.
        config: the run.
        dims: its mesh.
        split: its batch.
        exchanges: of each kind of linear attention.
    """
    take_share(model, dims)
    sizes = stored(model, dims)
    on_device = 0 if config.training.enable_cpu_offload else 1
    parameters = on_device * sum(sizes.values())
    optimizer = on_device * sum(size * _averages(name, config) for name, size in sizes.items())
    gathered, gathered_head = _gathered(model, config)
    loss = gathered_head + _loss(model, config, split)
    blocks = list(_blocks(model, config, split))
    keeping = [1 if recomputes(config) else x.layers for x in exchanges]
    return Memory(
        parameters=parameters,
        gradients=parameters,
        optimizer=optimizer,
        buffers=sum(x.nbytes for x in model.buffers()),
        activations=sum(count * block.kept for count, block in blocks),
        exchange=max(x.transient + x.kept * layers for x, layers in zip(exchanges, keeping, strict=True)),
        block=max(block.peak - block.kept for _, block in blocks),
        gathered=gathered,
        loss=loss,
    )


def take_share(model: HybridModel, dims: ParallelDims) -> None:
    """Replace the parameters of a model on the meta device by those of one TP (and EP) rank.

    Layers read their heads and widths off their weights, so afterwards they compute this rank's share.
    """
    shares: dict[int, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in shares:
                shape = _share(parameter, module._sharding_config.state_shardings[name], dims)
                shares[id(parameter)] = nn.Parameter(parameter.new_empty(shape))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, shares[id(parameter)])


def _share(parameter: Tensor, layout: SpmdLayout, dims: ParallelDims) -> list[int]:
    """The shape of one TP or EP rank's part."""
    degrees, shape = {MeshAxisName.TP: dims.tp, MeshAxisName.EP: dims.ep}, list(parameter.shape)
    for axis, placement in layout.per_axis_spmd_types().items():
        if isinstance(placement, spmd.Shard) and axis in degrees:
            shape[placement.dim] = _divided(shape[placement.dim], degrees[axis])
    return shape


def _divided(count: int, parts: int) -> int:
    return -(-count // parts)


def stored(model: HybridModel, dims: ParallelDims) -> dict[str, int]:
    """Bytes that FSDP stores on a rank of each parameter of a model that `take_share` has cut.

    FSDP cuts the first dimension (TorchTitan: the second one of experts, where these are fewer than the
    ranks of its mesh), and stores parts that are not even as long as the longest.
    """
    sizes = {}
    for prefix, module in model.named_modules():
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
    return {name: sizes[name] for name, _ in model.named_parameters()}  # a tied weight once


def _averages(name: str, config: "Trainer.Config") -> int:
    """Of the group that a parameter belongs to, the first whose pattern fits."""
    groups = config.optimizer.param_groups
    kwargs = next((x.optimizer_kwargs for x in groups if re.search(x.pattern, name)), None)
    return 0 if kwargs is None else 3 if kwargs.get("amsgrad") else 2


def _gathered(model: HybridModel, config: "Trainer.Config") -> tuple[int, int]:
    """What FSDP gathers and reduces while a block's backward runs, and while the loss does.

    A block is gathered while the one before it still is, whose gradients lie copied for the reduction. The
    head is gathered once for all chunks of the loss, whose gradients it sums in the dtype of the reduction.
    """
    training = config.training
    size, reduced = (
        TORCH_DTYPE_MAP[name].itemsize
        for name in (training.mixed_precision_param, training.mixed_precision_reduce)
    )
    decays = {id(x) for decay in model.decays() for x in decay.parameters()}

    def elements(*modules: nn.Module) -> int:
        unit = {id(x): x.numel() for module in modules for x in module.parameters() if id(x) not in decays}
        return sum(unit.values())

    blocks = [elements(block) for block in model.layers.values()]
    always = sum(x.nbytes for decay in model.decays() for x in decay.parameters())
    running = 2 * max(blocks)
    if config.parallelism.fsdp_reshard_after_forward == "never":
        running = sum(blocks)
        always += size * elements(model.tok_embeddings)
    head = elements(model.norm, model.lm_head)
    before_it = size * running if config.parallelism.fsdp_reshard_after_forward == "never" else 0
    return (
        always + size * running + reduced * max(blocks),
        always + before_it + (2 * size + reduced) * head,
    )


def _loss(model: HybridModel, config: "Trainer.Config", split: Split) -> int:
    """Hidden states whole and in chunks, their gradient in float32, and the logits of one chunk.

    Of logits there are, in the backward of the cross entropy, the product, and in float32 the logarithm of
    probabilities and what becomes their gradient: two more, or three where the vocabulary is split.
    """
    vocabulary, width = model.lm_head.weight.shape
    states = split.tokens_of_cp_rank * width
    logits = split.tokens_of_cp_rank // config.loss.num_chunks * vocabulary
    copies = 4 if split.tp > 1 else 3
    return states * (2 * split.itemsize + 4) + logits * (split.itemsize + 4 * copies)


def _blocks(model: HybridModel, config: "Trainer.Config", split: Split) -> Iterator[tuple[int, Block]]:
    """Of each kind of block, how many there are and what one keeps and holds.

    A memory budget is taken between what full checkpointing keeps, 0, and none, 1.
    """
    kinds: dict[tuple, list[str]] = {}
    for number, block in model.layers.items():
        shapes = tuple((name, x.shape) for name, x in block.named_parameters())
        kinds.setdefault(shapes, []).append(number)
    policy, dtype = config.activation_checkpoint, TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    width = model.norm.weight.shape[0]
    for numbers in kinds.values():
        name = f"layers.{numbers[0]}"
        if policy is None or isinstance(policy, MemoryBudgetAC.Config):
            checkpointed = _as_it_is
        else:
            checkpointed = partial(_checkpointed, policy, name)
        block = watch(model.get_submodule(name), width, split, dtype, checkpointed)
        if isinstance(policy, MemoryBudgetAC.Config):
            given = split.tokens_between_layers * width * split.itemsize
            block = replace(block, kept=given + int(policy.memory_budget * (block.kept - given)))
        yield len(numbers), block


def _as_it_is(block: nn.Module) -> nn.Module:
    return block


def _checkpointed(policy: ActivationCheckpointing.Config, name: str, block: nn.Module) -> nn.Module:
    try:
        return policy.build(dump_folder="")._wrap_block(block, base_fqn=name)
    except ValueError as error:
        raise ConfigError(f"[activation_checkpoint] {error}") from error
