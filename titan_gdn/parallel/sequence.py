"""What the tokens of a forward are: where documents begin, and in which order the ranks hold them.

Built once a forward and given to every layer.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, all_reduce, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

Order = Literal["contiguous", "headtail"]
"""The tokens of CP rank `r` of `cp`: the `r`-th part, or of `2 cp` parts the `r`-th from either end."""


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """How sequences are split over ranks.

    Attributes:
        mesh: the one-dimensional CP sub-mesh.
        order: the tokens that each rank is given. It comes from the configuration alone.
        judges: the mesh over which ranks agree that the order is wrong before any of them raises: all
            that run the same forward, so that none is left waiting.
    """

    mesh: DeviceMesh
    order: Order
    judges: DeviceMesh


class SequenceLayout(NamedTuple):
    """The documents of a batch `[B, T]` folded to one sequence `[B*T]`, and its shards over CP.

    Attributes:
        cu_seqlens: `[N + 1]` int64 offsets of the documents in natural order, on the tokens' device.
        cu_seqlens_cpu: the same on the CPU. A tensor, not Python integers: `torch.compile` would
            specialise on those and give up after a few batches.
        from_shards: `[T]`, for each token in natural order its row when the ranks' shards are put one
            after the other. None where these are the same.
        to_shards: `[T]`, the inverse.
        tokens_cpu: `[T / cp]` on the CPU, the natural positions of this rank's tokens. None without CP.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    from_shards: Tensor | None = None
    to_shards: Tensor | None = None
    tokens_cpu: Tensor | None = None

    @classmethod
    def from_positions(
        cls, positions: Tensor, context_parallel: ContextParallel | None = None
    ) -> "SequenceLayout":
        """Read the documents off the positions that the data loader made.

        Args:
            positions: `[B, T / cp]` integers, this rank's tokens' positions in their documents, 0 at the
                first. A row begins a document whatever its first position is.
            context_parallel: how the sequence is split.

        Raises:
            ValueError: on all ranks, if in the declared order some position does not follow its
                predecessor's. That catches most wrong orders, not all: documents may end where parts do.
        """
        if context_parallel is None:
            return cls(*_offsets(positions))
        mesh, cp = context_parallel.mesh, context_parallel.mesh.size()
        to_shards = shard_order(positions.shape[1] * cp, cp, context_parallel.order)
        tokens_cpu = to_shards.view(cp, -1)[mesh.get_local_rank()]
        positions = wait_tensor(all_gather_single(positions.contiguous(), 1, mesh))
        if context_parallel.order == "contiguous":
            return cls(*_offsets(positions, context_parallel), tokens_cpu=tokens_cpu)
        from_shards = torch.argsort(to_shards).to(positions.device, non_blocking=True)
        offsets = _offsets(positions[:, from_shards], context_parallel)
        return cls(*offsets, from_shards, to_shards.to(positions.device, non_blocking=True), tokens_cpu)


def shard_order(length: int, cp: int, order: Order) -> Tensor:
    """`[T]`, the natural position of each row when the shards of `cp` ranks are put one after the other."""
    if order == "contiguous":
        return torch.arange(length)
    parts = torch.arange(length).view(2 * cp, -1)
    return torch.cat([torch.cat([parts[rank], parts[2 * cp - 1 - rank]]) for rank in range(cp)])


def _offsets(positions: Tensor, context_parallel: ContextParallel | None = None) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` on the device and on the CPU, from positions in natural order."""
    starts = positions == 0
    starts[:, 0] = True
    flags = starts.flatten()
    if context_parallel is not None:
        broken = (~starts[:, 1:] & (positions[:, 1:] != positions[:, :-1] + 1)).any()
        broken = wait_tensor(all_reduce(broken.int(), "max", context_parallel.judges))
        flags = torch.cat([flags, broken.bool()[None]])
    flags = flags.cpu()  # the only transfer to the host of a forward
    # The fake backend's gather repeats the local shard, which is no sequence.
    if context_parallel is not None and flags[-1] and dist.get_backend() != "fake":
        raise ValueError(
            f"tokens did not arrive in the declared order {context_parallel.order!r}: positions inside a "
            "document do not rise by one. parallelism.context_parallel_load_balancer must say how the "
            "batch was sharded"
        )
    cu_seqlens_cpu = torch.cat(
        [flags[: positions.numel()].nonzero().flatten(), torch.tensor([positions.numel()])]
    )
    return cu_seqlens_cpu.to(positions.device, non_blocking=True), cu_seqlens_cpu
