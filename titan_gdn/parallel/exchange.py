"""How a layer with a state runs over documents whose tokens are spread over ranks.

Either a rank comes by all tokens of some heads, and afterwards its tokens by all heads; or it keeps its
tokens, and the state is handed on (`titan_gdn.parallel.state`). A layer says how it projects, convolves and
recurs and how many head groups it has, never which collective runs:

    y, narrow, home = exchange.to_heads(x, project, bottleneck, groups, sequence)
    y = exchange.convolve(convolution, y, reach, sequence)
    out = exchange.to_tokens(exchange.recur(rule, *of(y, narrow), sequence), sequence)

Shape suffixes: B batch, T all tokens, L tokens of this CP rank, t those whose heads a rank runs (T, or L
where the state is handed on), S of L this TP rank's (L without sequence parallelism), D model width, G head
groups of this TP rank, g those that run here, W group width, r width of what is needed of every token
whatever the head, N value heads that run here.
"""

from collections.abc import Callable
from typing import Literal, Protocol, get_args

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from titan_gdn.parallel.collectives import (
    ALL_GATHER,
    ALL_TO_ALL,
    exchange,
    gather_all,
    gather_sequence,
    in_order,
    reorder,
)
from titan_gdn.parallel.in_place import InPlace
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.state import StatePassing

Project = Callable[[Tensor, slice], Tensor]
"""`[B, tokens, D]` hidden states and a run of groups to `[B, tokens, groups, W]`."""

Bottleneck = Callable[[Tensor], Tensor | None]
"""`[B, tokens, D]` hidden states to what the rule needs whatever the head, `[B, tokens, r]`, or None."""

Convolution = Callable[..., Tensor]
"""`causal_conv1d` of `[1, n, W]` with its keywords `cu_seqlens` and `cu_seqlens_cpu` left open."""

Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""One of the chunked rules of `titan_gdn.ops` with its states and offsets left open."""

ExchangeName = Literal["all_to_all", "all_gather", "state"]


class Exchange(Protocol):
    """What a layer with a state needs to know of context parallelism."""

    mesh: DeviceMesh | None
    """The CP sub-mesh."""

    saved: tuple[OpOverload, ...]
    """Collectives over CP whose results selective checkpointing keeps: all that gather no hidden states."""

    def groups(self, groups: int) -> slice:
        """The run of this TP rank's `groups` head groups whose rule runs here."""

    def to_heads(
        self, x: Tensor, project: Project, bottleneck: Bottleneck, groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Projections of the tokens that run here.

        Args:
            x: hidden states as they are between layers, `[B, S, D]`.
            project: the layer's projection, group by group.
            bottleneck: what else it needs, whatever the group.
            groups: head groups of this TP rank.
            sequence: the order of the shards.

        Returns:
            `[B, t, g, W]` and `[B, t, r]`, in natural order if these are all tokens, and the hidden states
            `[B, L, D]` of this rank's tokens.
        """

    def convolve(self, convolution: Convolution, x: Tensor, reach: int, sequence: SequenceLayout) -> Tensor:
        """The convolution of every document, `[1, B * t, g * W]`; it looks `reach` tokens back."""

    def recur(
        self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence: SequenceLayout
    ) -> Tensor:
        """The rule over every document, of `[1, B * t, ...]` to `[1, B * t, N, V]`."""

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """The rule's output `[B, t, N, V]` to this rank's tokens of all heads, `[B, L, G * R, V]`."""


class _AllTokens:
    """What all exchanges share after which a rank has all tokens of its heads: documents are whole."""

    def convolve(self, convolution: Convolution, x: Tensor, reach: int, sequence: SequenceLayout) -> Tensor:
        """Nothing else than that."""
        return convolution(x, cu_seqlens=sequence.cu_seqlens, cu_seqlens_cpu=sequence.cu_seqlens_cpu)

    def recur(
        self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence: SequenceLayout
    ) -> Tensor:
        """Nothing else than that."""
        out, _ = rule(
            q, k, v, g, beta, cu_seqlens=sequence.cu_seqlens, cu_seqlens_cpu=sequence.cu_seqlens_cpu
        )
        return out


class NoExchange(InPlace, _AllTokens):
    """Without context parallelism every rank has all tokens.

    Args:
        tp_mesh: the TP sub-mesh under sequence parallelism, over which hidden states are gathered.
    """

    mesh = None
    saved = ()


class AllToAll(_AllTokens):
    """Project this rank's tokens, then exchange tokens for heads; the same back (Megatron-core's scheme).

    Args:
        mesh: the CP sub-mesh.
        tp_mesh: the TP sub-mesh under sequence parallelism, over which hidden states are gathered first.
    """

    saved = (ALL_TO_ALL, ALL_GATHER)  # the second of a bottleneck

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


class AllGather(_AllTokens):
    """Gather the hidden states, then project this rank's heads only (SkyRL's scheme); back as `AllToAll`.

    Args:
        mesh: the CP sub-mesh.
        tp_mesh: the TP sub-mesh under sequence parallelism. Each rank gathers its own shard over CP first,
            so that over CP go `1/tp` of the bytes, then over TP.
        regather: gather again in the backward instead of keeping the gathered states.
    """

    saved = (ALL_TO_ALL,)

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
        name: "all_to_all", "all_gather" or "state".
        mesh: the CP sub-mesh, None without context parallelism.
        tp_mesh: the TP sub-mesh under sequence parallelism, else None.
        regather: see `AllGather` and `StatePassing`.

    Raises:
        ValueError: an unknown name, or "auto", which a model replaces when it is configured.
    """
    if mesh is None:
        return NoExchange(tp_mesh)
    if name == "all_to_all":
        return AllToAll(mesh, tp_mesh)
    if name == "all_gather":
        return AllGather(mesh, tp_mesh, regather)
    if name == "state":
        return StatePassing(mesh, tp_mesh, regather)
    raise ValueError(f"exchange {name!r} is unknown; possible are {', '.join(get_args(ExchangeName))}")


def share(groups: int, mesh: DeviceMesh) -> slice:
    """The run of head groups that this rank of `mesh` owns."""
    count = groups // mesh.size()
    return slice(mesh.get_local_rank() * count, (mesh.get_local_rank() + 1) * count)
