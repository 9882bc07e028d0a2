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
        agreement_mesh: the mesh over which ranks agree that the order is wrong before any of them raises: all
            that run the same forward, so that none is left waiting.
    """

    mesh: DeviceMesh
    order: Order
    agreement_mesh: DeviceMesh


class Segments(NamedTuple):
    """A rank's tokens as runs of consecutive ones, and which documents go on from one run to the next.

    A rank has `s` segments a row, 1 contiguous and 2 headtail, of `L / s` tokens each; its rows `[B, L]`
    folded are its segments `[B*s]` one after the other. Over all ranks a row has `P = cp * s`. Of a document
    a segment holds a *fragment*; only its first goes on from another segment, only its last may go on.

    Attributes:
        cu_seqlens: `[F + 1]` int64 offsets of this rank's fragments in its rows.
        cu_seqlens_cpu: the same on the CPU.
        first: `[B*s]`, of each own segment the fragment that it begins with.
        history: `[B*s]`, tokens before it of the document that goes on in it.
        last_rows: `[n]`, the rows of each own segment's last fragment, one after the other.
        last_cu_seqlens: `[B*s + 1]` their offsets.
        last_cu_seqlens_cpu: the same on the CPU.
        gathered: `[P, B]`, where a segment stands when the ranks' `[B*s]` are put one after the other.
        goes_on: `[P, B]` bool, a segment begins with tokens of a document that began before it.
        through: `[P, B]` bool, a segment is one fragment.
        own: `[B*s]`, where in `[P, B]` folded this rank's segments are.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    first: Tensor
    history: Tensor
    last_rows: Tensor
    last_cu_seqlens: Tensor
    last_cu_seqlens_cpu: Tensor
    gathered: Tensor
    goes_on: Tensor
    through: Tensor
    own: Tensor

    @classmethod
    def of(cls, starts_BT: Tensor, parts: Tensor, rank: int) -> "Segments":
        """Of a rank, from where documents start.

        Args:
            starts_BT: bool on the CPU, in natural order.
            parts: `[cp, s]`, which of the `P` parts of a row each rank has.
            rank: in the CP group.
        """
        batch, (cp, per_rank) = starts_BT.shape[0], parts.shape
        starts_BPl = starts_BT.unflatten(1, (cp * per_rank, -1))
        begins = torch.where(starts_BT, torch.arange(starts_BT.shape[1]), 0).cummax(1).values
        offset = parts[rank] * starts_BPl.shape[2]
        fragments = starts_BPl[:, parts[rank]].flatten(0, 1)
        fragments[:, 0] = True
        cu_seqlens_cpu = _cumulated(fragments.flatten())
        number = fragments.flatten().cumsum(0).view_as(fragments) - 1
        last = number == number[:, -1:]
        last_cu_seqlens_cpu = torch.nn.functional.pad(last.sum(1).cumsum(0), (1, 0))
        gathered = torch.empty(cp * per_rank, batch, dtype=torch.int64)
        rows = torch.arange(cp * batch * per_rank).view(cp, batch, per_rank)
        gathered[parts.flatten()] = rows.transpose(1, 2).flatten(0, 1)
        return cls(
            cu_seqlens=cu_seqlens_cpu,
            cu_seqlens_cpu=cu_seqlens_cpu,
            first=number[:, 0],
            history=(offset - begins[:, offset]).flatten(),
            last_rows=last.flatten().nonzero().flatten(),
            last_cu_seqlens=last_cu_seqlens_cpu,
            last_cu_seqlens_cpu=last_cu_seqlens_cpu,
            gathered=gathered,
            goes_on=~starts_BPl[:, :, 0].T,
            through=~starts_BPl[:, :, 1:].any(2).T,
            own=(parts[rank] * batch + torch.arange(batch)[:, None]).flatten(),
        )

    def to(self, device: torch.device) -> "Segments":
        """All of it but what is for the CPU on a device."""
        moved = {
            name: x.to(device, non_blocking=True)
            for name, x in self._asdict().items()
            if not name.endswith("_cpu")
        }
        return self._replace(**moved)


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
        segments: what this rank's tokens are to an exchange that hands on states. None without CP.
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
        """Read the documents off the positions that the data loader made.

        Args:
            positions: `[B, T / cp]` integers, this rank's tokens' positions in their documents, 0 at the
                first. A row begins a document whatever its first position is.
            context_parallel: how the sequence is split.

        Raises:
            ValueError: on all ranks, if in the declared order some position does not follow its
                predecessor's. That catches most wrong orders, not all: documents may end where parts do.
        """
        device = positions.device
        if context_parallel is None:
            starts_cpu = _starts(positions)
            offsets = _cumulated(starts_cpu.flatten())
            return cls(offsets.to(device, non_blocking=True), offsets)
        mesh, order = context_parallel.mesh, context_parallel.order
        cp, rank = mesh.size(), mesh.get_local_rank()
        to_shards = shard_order(positions.shape[1] * cp, cp, order)
        from_shards = None
        positions = wait_tensor(all_gather_single(positions.contiguous(), 1, mesh))
        if order != "contiguous":
            from_shards = torch.argsort(to_shards).to(device, non_blocking=True)
            positions = positions[:, from_shards]
        starts_cpu = _starts(positions, context_parallel)
        offsets = _cumulated(starts_cpu.flatten())
        return cls(
            cu_seqlens=offsets.to(device, non_blocking=True),
            cu_seqlens_cpu=offsets,
            from_shards=from_shards,
            to_shards=None if from_shards is None else to_shards.to(device, non_blocking=True),
            tokens_cpu=to_shards.view(cp, -1)[rank],
            segments=Segments.of(starts_cpu, shares(cp, order), rank).to(device),
        )


def shares(cp: int, order: Order) -> Tensor:
    """`[cp, s]`, which of the `cp * s` equal parts of a sequence each rank has."""
    ranks = torch.arange(cp)
    return ranks[:, None] if order == "contiguous" else torch.stack([ranks, 2 * cp - 1 - ranks], 1)


def shard_order(length: int, cp: int, order: Order) -> Tensor:
    """`[T]`, the natural position of each row when the shards of `cp` ranks are put one after the other."""
    parts = shares(cp, order).flatten()
    return torch.arange(length).view(len(parts), -1)[parts].flatten()


def _starts(positions: Tensor, context_parallel: ContextParallel | None = None) -> Tensor:
    """Where documents start, `[B, T]` bool on the CPU, from positions in natural order."""
    starts = positions == 0
    starts[:, 0] = True
    if context_parallel is None:
        return starts.cpu()
    broken = (~starts[:, 1:] & (positions[:, 1:] != positions[:, :-1] + 1)).any()
    broken = wait_tensor(all_reduce(broken.int(), "max", context_parallel.agreement_mesh))
    # The only transfer to the host of a forward.
    flags = torch.cat([starts.flatten(), broken.bool()[None]]).cpu()
    # The fake backend's gather repeats the local shard, which is no sequence.
    if flags[-1] and dist.get_backend() != "fake":
        raise ValueError(
            f"tokens did not arrive in the declared order {context_parallel.order!r}: positions inside a "
            "document do not rise by one. parallelism.context_parallel_load_balancer must say how the "
            "batch was sharded"
        )
    return flags[:-1].view(starts.shape)


def _cumulated(starts: Tensor) -> Tensor:
    """`cu_seqlens` of what starts at the flags `[n]`."""
    return torch.cat([starts.nonzero().flatten(), torch.tensor([starts.numel()])])
