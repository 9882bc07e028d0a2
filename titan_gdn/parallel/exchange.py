"""How a head-parallel layer comes by all tokens of some heads, and its tokens by all heads.

A layer says how it projects and how many head groups it has, never which collective runs:

    y, home = exchange.to_heads(x, project, groups, sequence)   # all tokens of this rank's groups
    out = exchange.to_tokens(rule(y), sequence)                 # this rank's tokens of all groups

Shape suffixes: B batch, T all tokens, L tokens of this CP rank, S of them this TP rank's (L without
sequence parallelism), D model width, G head groups of this TP rank, g of this CP rank, W group width.
"""

from collections.abc import Callable
from typing import Literal, Protocol, get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from titan_gdn.parallel.sequence import SequenceLayout

Project = Callable[[Tensor, slice], Tensor]
"""`[B, tokens, D]` hidden states and a run of groups to `[B, tokens, groups, W]`."""

ExchangeName = Literal["all_to_all", "all_gather"]


class Exchange(Protocol):
    """What a head-parallel layer needs to know of context parallelism."""

    def groups(self, groups: int) -> slice:
        """The run of this TP rank's `groups` head groups whose rule runs here."""

    def to_heads(
        self, x: Tensor, project: Project, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """Projections of all tokens.

        Args:
            x: hidden states as they are between layers, `[B, S, D]`.
            project: the layer's projection, group by group.
            groups: head groups of this TP rank.
            sequence: the order of the shards.

        Returns:
            `[B, T, g, W]` in natural order, and the hidden states `[B, L, D]` of this rank's tokens.
        """

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """The rule's output `[B, T, g * n, V]` in natural order to this rank's tokens `[B, L, G * n, V]`."""


class NoExchange:
    """Without context parallelism every rank has all tokens.

    Args:
        tp_mesh: the TP sub-mesh under sequence parallelism, over which hidden states are gathered.
    """

    def __init__(self, tp_mesh: DeviceMesh | None = None) -> None:
        self.tp_mesh = tp_mesh

    def groups(self, groups: int) -> slice:
        """All of them."""
        return slice(0, groups)

    def to_heads(
        self, x: Tensor, project: Project, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """Project, no more."""
        home = gather_sequence(x, self.tp_mesh)
        return project(home, self.groups(groups)), home

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """Nothing to do."""
        return out


class AllToAll:
    """Project this rank's tokens, then exchange tokens for heads; the same back (Megatron-core's scheme).

    Args:
        mesh: the CP sub-mesh.
        tp_mesh: the TP sub-mesh under sequence parallelism, over which hidden states are gathered first.
    """

    def __init__(self, mesh: DeviceMesh, tp_mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.tp_mesh = tp_mesh

    def groups(self, groups: int) -> slice:
        """This rank's share."""
        return share(groups, self.mesh)

    def to_heads(
        self, x: Tensor, project: Project, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """One collective: `Shard(sequence) -> Shard(head group)` of everything that was projected."""
        home = gather_sequence(x, self.tp_mesh)
        y_BLGW = project(home, slice(0, groups))
        return reorder(exchange(y_BLGW, self.mesh, 1, 2), sequence.from_shards), home

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """One collective: `Shard(head) -> Shard(sequence)`."""
        return exchange(reorder(out, sequence.to_shards), self.mesh, 2, 1)


class AllGather:
    """Gather the hidden states, then project this rank's heads only (SkyRL's scheme); back as `AllToAll`.

    Args:
        mesh: the CP sub-mesh.
        tp_mesh: the TP sub-mesh under sequence parallelism. Each rank gathers its own shard over CP first,
            so that over CP go `1/tp` of the bytes, then over TP.
        regather: gather again in the backward instead of keeping the gathered states.
    """

    def __init__(self, mesh: DeviceMesh, tp_mesh: DeviceMesh | None, regather: bool) -> None:
        self.mesh = mesh
        self.tp_mesh = tp_mesh
        self.regather = regather
        self.back = AllToAll(mesh, tp_mesh)

    def groups(self, groups: int) -> slice:
        """This rank's share."""
        return share(groups, self.mesh)

    def to_heads(
        self, x: Tensor, project: Project, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor]:
        """`Shard(sequence) -> Replicate` over CP, then over TP; backward reduce-scatters in reverse."""

        def gather_and_project(x: Tensor) -> tuple[Tensor, Tensor]:
            gathered = gather_sequence(x, self.mesh)
            if self.tp_mesh is None:
                return project(gathered, self.groups(groups)), x
            gathered = gather_sequence(gathered, self.tp_mesh)
            # Rows stand [tp][cp][tokens]: this rank's own are one run of each TP rank's.
            by_rank = gathered.unflatten(1, (self.tp_mesh.size(), self.mesh.size(), -1))
            return project(gathered, self.groups(groups)), by_rank[:, :, self.mesh.get_local_rank()].flatten(
                1, 2
            )

        if self.regather:
            y_BTgW, home = checkpoint(gather_and_project, x, use_reentrant=False)
        else:
            y_BTgW, home = gather_and_project(x)
        if self.tp_mesh is not None:
            y_BTgW = (
                y_BTgW.unflatten(1, (self.tp_mesh.size(), self.mesh.size(), -1)).transpose(1, 2).flatten(1, 3)
            )
        return reorder(y_BTgW, sequence.from_shards), home

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """As `AllToAll`."""
        return self.back.to_tokens(out, sequence)


def make_exchange(
    name: ExchangeName, mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None = None, regather: bool = False
) -> Exchange:
    """The exchange of a name.

    Args:
        name: "all_to_all" or "all_gather".
        mesh: the CP sub-mesh, None without context parallelism.
        tp_mesh: the TP sub-mesh under sequence parallelism, else None.
        regather: see `AllGather`.

    Raises:
        ValueError: an unknown name, or "auto", which a model replaces when it is configured.
    """
    if mesh is None:
        return NoExchange(tp_mesh)
    if name == "all_to_all":
        return AllToAll(mesh, tp_mesh)
    if name == "all_gather":
        return AllGather(mesh, tp_mesh, regather)
    raise ValueError(f"exchange {name!r} is unknown; possible are {', '.join(get_args(ExchangeName))}")


def share(groups: int, mesh: DeviceMesh) -> slice:
    """The run of head groups that this rank of `mesh` owns."""
    count = groups // mesh.size()
    return slice(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)


def exchange(x: Tensor, mesh: DeviceMesh, src: int, dst: int) -> Tensor:
    """One all-to-all: `x` is a shard of dimension `src`, the result one of `dst`."""
    return (
        DTensor.from_local(x, mesh, [Shard(src)], run_check=False)
        .redistribute(placements=[Shard(dst)])
        .to_local()
    )


def gather_sequence(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """All ranks' tokens `[B, n * tokens, ...]`. Each rank uses them differently: gradients are summed."""
    if mesh is None:
        return x
    whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def reorder(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows of dimension 1 by `index`; None leaves them."""
    return x if index is None else x.index_select(1, index)
