"""How a head-parallel layer comes by all tokens of some heads, and its tokens by all heads.

A layer says how it projects and how many head groups it has, never which collective runs:

    y, narrow, home = exchange.to_heads(x, project, bottleneck, groups, sequence)  # all tokens, own groups
    out = exchange.to_tokens(rule(y, narrow), sequence)                            # own tokens, all groups

Shape suffixes: B batch, T all tokens, L tokens of this CP rank, S of them this TP rank's (L without
sequence parallelism), D model width, G head groups of this TP rank, g of this CP rank, W group width, r
width of what is needed of every token whatever the head.
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

Bottleneck = Callable[[Tensor], Tensor | None]
"""`[B, tokens, D]` hidden states to what the rule needs whatever the head, `[B, tokens, r]`, or None."""

ExchangeName = Literal["all_to_all", "all_gather"]


class Exchange(Protocol):
    """What a head-parallel layer needs to know of context parallelism."""

    def groups(self, groups: int) -> slice:
        """The run of this TP rank's `groups` head groups whose rule runs here."""

    def to_heads(
        self, x: Tensor, project: Project, bottleneck: Bottleneck, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Projections of all tokens.

        Args:
            x: hidden states as they are between layers, `[B, S, D]`.
            project: the layer's projection, group by group.
            bottleneck: what else it needs, whatever the group.
            groups: head groups of this TP rank.
            sequence: the order of the shards.

        Returns:
            `[B, T, g, W]` and `[B, T, r]` in natural order, and the hidden states `[B, L, D]` of this rank's
            tokens.
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
        self, x: Tensor, project: Project, bottleneck: Bottleneck, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Project, no more."""
        home = gather_sequence(x, self.tp_mesh)
        return project(home, self.groups(groups)), bottleneck(home), home

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
        self, x: Tensor, project: Project, bottleneck: Bottleneck, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """One collective: `Shard(sequence) -> Shard(head group)` of everything that was projected.

        A bottleneck is gathered from where hidden states lie, `Shard(sequence) -> Replicate`.
        """
        home = gather_sequence(x, self.tp_mesh)
        y_BTgW = exchange(project(home, slice(0, groups)), self.mesh, 1, 2)
        narrow = bottleneck(x)
        if narrow is not None:
            narrow = in_order(gather_all(narrow, self.mesh, self.tp_mesh), self.mesh, self.tp_mesh, sequence)
        return reorder(y_BTgW, sequence.from_shards), narrow, home

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
        self, x: Tensor, project: Project, bottleneck: Bottleneck, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """`Shard(sequence) -> Replicate` over CP, then over TP; backward reduce-scatters in reverse."""

        def gather_and_project(x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
            gathered = gather_all(x, self.mesh, self.tp_mesh)
            home = x
            if self.tp_mesh is not None:
                # Rows stand [tp][cp][tokens]: this rank's own are one run of each TP rank's.
                by_rank = gathered.unflatten(1, (self.tp_mesh.size(), self.mesh.size(), -1))
                home = by_rank[:, :, self.mesh.get_local_rank()].flatten(1, 2)
            return project(gathered, self.groups(groups)), bottleneck(gathered), home

        if self.regather:
            y_BTgW, narrow, home = checkpoint(gather_and_project, x, use_reentrant=False)
        else:
            y_BTgW, narrow, home = gather_and_project(x)
        y_BTgW, narrow = (
            None if x is None else in_order(x, self.mesh, self.tp_mesh, sequence) for x in (y_BTgW, narrow)
        )
        return y_BTgW, narrow, home

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


def gather_all(x: Tensor, mesh: DeviceMesh, tp_mesh: DeviceMesh | None) -> Tensor:
    """All tokens of what lies as hidden states do between layers; rows stand `[tp][cp][tokens]`.

    Over CP first, so that over CP go `1/tp` of the bytes, then over TP.
    """
    return gather_sequence(gather_sequence(x, mesh), tp_mesh)


def in_shards(x: Tensor, mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> Tensor:
    """Put what `gather_all` gathered, or was made of it, in the order of CP shards, `[cp][tp][tokens]`."""
    if mesh is None or tp_mesh is None:
        return x
    return x.unflatten(1, (tp_mesh.size(), mesh.size(), -1)).transpose(1, 2).flatten(1, 3)


def in_order(x: Tensor, mesh: DeviceMesh, tp_mesh: DeviceMesh | None, sequence: SequenceLayout) -> Tensor:
    """The same in the natural order."""
    return reorder(in_shards(x, mesh, tp_mesh), sequence.from_shards)


def reorder(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows of dimension 1 by `index`; None leaves them."""
    return x if index is None else x.index_select(1, index)
