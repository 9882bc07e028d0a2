"""What a block keeps and holds: its own code, run with fake tensors of a rank's shapes and watched.

No collective runs. What one gives is a tensor of its size, so that what is alive is what would be.
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
    """Bytes of a block on a rank, without its parameters and what an exchange adds.

    Attributes:
        kept: from forward to backward, what it was given included if it keeps that.
        peak: at most, during its backward: what it keeps or computes again, gradients of its parameters
            before they are reduced, everything in between.
    """

    kept: int
    peak: int


def block_memory(
    block: HybridBlock,
    width: int,
    split: ShardedBatch,
    dtype: torch.dtype,
    checkpointed: Callable[[nn.Module], nn.Module],
) -> BlockMemory:
    """Run a block forward and backward.

    Args:
        block: on any device, its parameters those of one TP rank. It is changed.
        width: `D`, of the hidden states.
        split: the batch and the mesh; each of its rows is one document.
        dtype: of activations, and of parameters but the decay's.
        checkpointed: what activation checkpointing makes of it.
    """
    _stand_in_for_collectives(block, split)
    if block.linear_attention is not None:
        _choose_kernel(block.linear_attention)
    length = split.length // split.cp
    offsets = torch.arange(split.batch + 1) * length
    # Offsets are read, so they are no fake.
    with FakeTensorMode(allow_non_fake_inputs=True):
        _make_fake(block, dtype)
        decay = None if block.linear_attention is None else block.linear_attention.decay()
        run = checkpointed(block)
        given = torch.empty(split.batch, split.tokens_between_layers // split.batch, width, dtype=dtype)
        given.requires_grad_()
        positions = torch.arange(length).expand(split.batch, -1)
        tracker = MemTracker()
        tracker.track_external(block, given)
        with tracker:
            before = _alive(tracker)
            # Between layers nobody else holds the hidden states.
            out = run(given * 1, None, positions, decay, sequence=SequenceLayout(offsets, offsets))
            kept = _alive(tracker) - before - out.nbytes
            out.backward(torch.ones_like(out))
        return BlockMemory(kept, _alive(tracker, "peak") - before)


def _alive(tracker: MemTracker, when: str = "current") -> int:
    return sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot(when).values())


def _make_fake(block: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters, by such of the dtype in which FSDP gathers them, and buffers."""
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
    out, *_ = fla.forward(*inputs, 1.0, None, cu_seqlens, cu_seqlens_cpu, True, *fla.flags)
    return out, None


def _stand_in_for_collectives(block: HybridBlock, split: ShardedBatch) -> None:
    """Give the block's parts the sizes that they would gather, and take from them what they would scatter."""
    parts = [block.linear_attention, block.attention, block.feed_forward, block.moe]
    if block.moe is not None:
        experts = block.moe.routed_experts.inner_experts
        experts._grouped_mm = _grouped_product
        if len(experts.w1_EFD) < experts.num_experts:
            # Experts of many ranks: each sends its own tokens and is sent as many.
            parts[-1] = block.moe.shared_experts
    if split.sharded:
        for part in parts:
            if part is not None:
                part.forward = partial(_of_all_shards, part.forward, split.tp)
    attention = block.attention
    if attention is None:
        return
    if isinstance(attention, GatedAttention) and split.tp > attention.n_key_value_heads:
        # The rows of the head that this rank's queries share; the tracker knows no weights that are slices.
        for linear in (attention.wk, attention.wv):
            linear.weight = nn.Parameter(linear.weight.detach()[: attention.head_dim])
    if split.cp > 1 and isinstance(attention, LatentAttention):
        attention.gather = lambda kv_BLC, sequence: kv_BLC.repeat(1, split.cp, 1)
    elif split.cp > 1:
        attention.inner_attention.forward = partial(_of_all_keys, attention.inner_attention.forward, split.cp)


def _grouped_product(A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """In place of torch's, which takes float32 but on no fake tensors."""
    return _GroupedProduct.apply(A, B_t)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, A_RD: Tensor, B_EDF: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(A_RD, B_EDF)
        return A_RD.new_empty(A_RD.shape[0], B_EDF.shape[2])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _of_all_shards(forward: Callable[..., Tensor], tp: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Gather hidden states over TP, scatter the sum of what comes."""
    return forward(x.repeat(1, tp, 1), *args, **kwargs)[:, : x.shape[1]].clone()


def _of_all_keys(
    forward: Callable[..., Tensor], cp: int, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any
) -> Tensor:
    """Gather keys and values over CP."""
    return forward(q, k.repeat(1, cp, 1, 1), v.repeat(1, cp, 1, 1), **kwargs)
