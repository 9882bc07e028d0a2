"""The documents of a batch and the order in which CP ranks hold its tokens.

A model builds one `SequenceLayout` in each forward and passes it to every layer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_gdn.parallel.segments import Order, Segments, offsets_of, shard_order, shares


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """How sequences are sharded over ranks.

    Attributes:
        mesh: the one-dimensional CP sub-mesh.
        order: which tokens each rank holds. It comes from the configuration alone.
        agreement_mesh: the mesh of all ranks that run the same forward. They agree that tokens are in the
            wrong order before any of them raises, so that no rank is left waiting in a collective.
    """

    mesh: DeviceMesh
    order: Order
    agreement_mesh: DeviceMesh


class SequenceLayout(NamedTuple):
    """The documents of a batch `[B, T]` flattened to one sequence `[B*T]`, and its shards over CP.

    Attributes:
        cu_seqlens: `[N + 1]` int64 offsets of the documents in natural order, on the tokens' device.
        cu_seqlens_cpu: the same on the CPU. A tensor rather than Python integers, for which `torch.compile`
            would specialize until it gives up after a few batches.
        from_shards: `[T]`, for each token in natural order its row in the concatenation of all ranks'
            shards. None if the two orders are the same.
        to_shards: `[T]`, the inverse of `from_shards`.
        tokens_cpu: `[T / cp]` on the CPU, the natural positions of this rank's tokens. None without CP.
        segments: the runs of consecutive tokens that this rank holds, for exchanges whose tokens stay on
            their rank. None without CP.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    from_shards: Tensor | None = None
    to_shards: Tensor | None = None
    tokens_cpu: Tensor | None = None
    segments: Segments | None = None

    @classmethod
    def from_positions(
        cls, positions: Tensor, context_parallel: ContextParallel | None = None
    ) -> "SequenceLayout":
        """Find the documents from the positions that the data loader provides.

        Args:
            positions: `[B, T / cp]` integers, the position of each of this rank's tokens in its document,
                starting at 0. A row starts a document whatever its first position is.
            context_parallel: how the sequence is sharded.

        Raises:
            ValueError: on all ranks, if the segments of a rank are not equally long, or if a position does
                not follow its predecessor in the declared order. This finds most wrong orders but not all:
                documents may end exactly where shards do.
        """
        device = positions.device
        if context_parallel is None:
            starts_cpu = _starts(positions)
            offsets = offsets_of(starts_cpu.flatten())
            return cls(offsets.to(device, non_blocking=True), offsets)
        mesh, order = context_parallel.mesh, context_parallel.order
        cp, rank = mesh.size(), mesh.get_local_rank()
        parts = shares(cp, order)
        if positions.shape[1] % parts.shape[1]:
            raise ValueError(
                f"{positions.shape[1]} tokens of each of {cp} ranks are not divisible by {parts.shape[1]}, "
                f"the segments of a rank in the order {order!r}"
            )
        to_shards = shard_order(positions.shape[1] * cp, cp, order)
        from_shards = None
        positions = wait_tensor(all_gather_single(positions.contiguous(), 1, mesh))
        if order != "contiguous":
            from_shards = torch.argsort(to_shards).to(device, non_blocking=True)
            positions = positions[:, from_shards]
        starts_cpu = _starts(positions, context_parallel)
        offsets = offsets_of(starts_cpu.flatten())
        return cls(
            cu_seqlens=offsets.to(device, non_blocking=True),
            cu_seqlens_cpu=offsets,
            from_shards=from_shards,
            to_shards=None if from_shards is None else to_shards.to(device, non_blocking=True),
            tokens_cpu=to_shards.view(cp, -1)[rank],
            segments=Segments.from_starts(starts_cpu, parts, rank).to(device),
        )


def _starts(positions: Tensor, context_parallel: ContextParallel | None = None) -> Tensor:
    """Where documents start, `[B, T]` bool on the CPU, from positions in natural order."""
    starts = positions == 0
    starts[:, 0] = True
    if context_parallel is None:
        return starts.cpu()
    broken = (~starts[:, 1:] & (positions[:, 1:] != positions[:, :-1] + 1)).any()
    broken = wait_tensor(all_reduce(broken.int(), "max", context_parallel.agreement_mesh))
    # The only transfer to the host in a forward.
    flags = torch.cat([starts.flatten(), broken.bool()[None]]).cpu()
    # The fake backend's all-gather repeats the local shard, so positions mean nothing there.
    if flags[-1] and dist.get_backend() != "fake":
        raise ValueError(
            f"tokens did not arrive in the declared order {context_parallel.order!r}: positions inside a "
            "document do not increase by one. Set parallelism.context_parallel_load_balancer to the order in "
            "which the batch was sharded"
        )
    return flags[:-1].view(starts.shape)
