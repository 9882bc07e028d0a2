"""The memory of a block, tracked while its own code runs with fake tensors of a rank's shapes.

No collective runs. Stand-ins return tensors of the size that a collective would return, so that the same
tensors are alive.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from titan_gdn.layers.gated_attention import GatedAttention
from titan_gdn.layers.latent_attention import LatentAttention
from titan_gdn.layers.linear_attention import Decay, LinearAttention
from titan_gdn.models.hybrid.block import HybridBlock
from titan_gdn.ops.rules import FLAOperator
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import ShardedBatch


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes of a block on a rank, without its parameters and without what an exchange adds.

    Attributes:
        kept: from forward to backward, including the block's input if the block keeps it.
        peak: the maximum during its backward: what the block keeps or recomputes, the gradients of its
            parameters before they are reduced, and temporary tensors.
    """

    kept: int
    peak: int


def block_memory(
    block: HybridBlock,
    width: int,
    batch: ShardedBatch,
    dtype: torch.dtype,
    checkpointed: Callable[[nn.Module], nn.Module],
) -> BlockMemory:
    """Run the forward and backward of a block and return the memory that they need.

    Args:
        block: the block with the parameters of one TP rank, on any device. It is modified.
        width: `D`, the width of the hidden states.
        batch: the batch and the mesh. Each row is one document.
        dtype: the dtype of activations and of all parameters except those of the decay.
        checkpointed: wraps a block for activation checkpointing.
    """
    _stand_in_for_collectives(block, batch)
    if block.linear_attention is not None:
        _choose_kernel(block.linear_attention)
    length = batch.length // batch.cp
    offsets = torch.arange(batch.rows + 1) * length
    # Operators read the offsets on the CPU, so these must be real tensors.
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(block, dtype)
        decay = None if block.linear_attention is None else block.linear_attention.decay()
        run = checkpointed(block)
        given = torch.empty(batch.rows, batch.tokens_between_layers // batch.rows, width, dtype=dtype)
        given.requires_grad_()
        positions = torch.arange(length).expand(batch.rows, -1)
        tracker = MemTracker()
        tracker.track_external(block, given)
        with tracker:
            before = _alive(tracker)
            # `given * 1`: between layers no one but the block holds a reference to its input.
            out = run(given * 1, None, positions, decay, sequence=SequenceLayout(offsets, offsets))
            kept = _alive(tracker) - before - out.nbytes
            out.backward(torch.ones_like(out))
        return BlockMemory(kept, _alive(tracker, "peak") - before)


def _alive(tracker: MemTracker, when: str = "current") -> int:
    return sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot(when).values())


def _make_fake(block: nn.Module, dtype: torch.dtype) -> None:
    """Replace buffers, and parameters in the dtype in which FSDP gathers them, with fake tensors."""
    for module in block.modules():
        for name, x in module.named_parameters(recurse=False):
            own = x.dtype if isinstance(module, Decay) else dtype
            setattr(module, name, nn.Parameter(torch.empty(x.shape, dtype=own)))
        for name, x in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(x.shape, dtype=x.dtype))


def _choose_kernel(layer: LinearAttention) -> None:
    """Let the layer run the rule that it runs on a GPU; fake tensors would get PyTorch's."""
    kernel, layer.run = layer.run.kernel, replace(layer.run, kernel="torch")
    if kernel != "torch" and layer.rule.fla is not None:
        layer.run_rule = partial(_fla_rule, layer.rule.fla)


def _fla_rule(
    fla: FLAOperator,
    *inputs: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    return fla.forward(*inputs, 1.0, None, cu_seqlens, cu_seqlens_cpu, True, *fla.flags)[0], None


def _stand_in_for_collectives(block: HybridBlock, batch: ShardedBatch) -> None:
    """Replace the collectives around the parts of a block with local operations of the same sizes."""
    parts = [block.linear_attention, block.attention, block.feed_forward, block.moe]
    if block.moe is not None:
        experts = block.moe.routed_experts.inner_experts
        experts._grouped_mm = _grouped_product
        if len(experts.w1_EFD) < experts.num_experts:
            # Expert parallelism: each rank sends its own tokens and receives as many.
            parts[-1] = block.moe.shared_experts
    if batch.sharded:
        for part in parts:
            if part is not None:
                part.forward = partial(_of_all_shards, part.forward, batch.tp)
    attention = block.attention
    if attention is None:
        return
    if isinstance(attention, GatedAttention) and batch.tp > attention.n_key_value_heads:
        # The rows of the head that this rank's queries share. The tracker does not know slices of weights.
        for linear in (attention.wk, attention.wv):
            linear.weight = nn.Parameter(linear.weight.detach()[: attention.head_dim])
    if batch.cp > 1 and isinstance(attention, LatentAttention):
        attention.gather = lambda kv_BSC, sequence: kv_BSC.repeat(1, batch.cp, 1)
    elif batch.cp > 1:
        attention.inner_attention.forward = partial(_of_all_keys, attention.inner_attention.forward, batch.cp)


def _grouped_product(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Replaces torch's grouped product, which does not support float32 on fake tensors."""
    return _GroupedProduct.apply(A, B_t)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A_RD: Tensor, B_EDF: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(A_RD, B_EDF)
        return A_RD.new_empty(A_RD.shape[0], B_EDF.shape[2])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:  # noqa: D102
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _of_all_shards(forward: Callable[..., Tensor], tp: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for gathering hidden states over TP and reduce-scattering the output."""
    return forward(x.repeat(1, tp, 1), *args, **kwargs)[:, : x.shape[1]].clone()


def _of_all_keys(
    forward: Callable[..., Tensor], cp: int, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any
) -> Tensor:
    """Stand in for gathering keys and values over CP."""
    return forward(q, k.repeat(1, cp, 1, 1), v.repeat(1, cp, 1, 1), **kwargs)
