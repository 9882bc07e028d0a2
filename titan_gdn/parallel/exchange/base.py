"""What an exchange is, and what all exchanges share that give a rank all tokens of some heads.

Under context parallelism (CP) each rank holds a part of every sequence, but a recurrent layer has to see the
tokens of a document in order. An exchange is one way to arrange that. Either each rank receives all tokens of
some heads (`AllTokens`), or it keeps its own tokens and the ranks pass the recurrent state on
(`titan_gdn.parallel.exchange.state`). A layer calls an exchange as follows and never names a collective:

    y, low_rank, x_local = exchange.to_heads(x, project, project_low_rank, groups, sequence)
    y = exchange.convolve(convolution, y, reach, sequence)
    out = exchange.recur(rule, q, k, v, g, beta, sequence)  # all of them computed from y and low_rank
    out = exchange.to_tokens(out, sequence)

To add an exchange, write a subclass of `Exchange` in a file of its own and add it to
`titan_gdn.parallel.exchange.registry`. The configuration, `exchange = "auto"`, the planner, the benchmark,
quantization and selective checkpointing read what they need from the class.

Shape suffixes: B batch, T all tokens of a row, L tokens of this CP rank, S hidden states of this rank between
layers (`L / tp` under sequence parallelism, else L), t tokens for which this rank runs the rule (T, or L if
tokens stay), D model width, G head groups of this TP rank, g head groups for which this rank runs the rule,
W elements of a group, r width of the low-rank projection, N value heads for which this rank runs the rule,
K and V widths of a key and a value head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from titan_gdn.parallel.collectives import all_to_all, reorder
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import LayerShape, ShardedBatch, Traffic, heads_over_tp

Project = Callable[[Tensor, slice], Tensor]
"""`project(x, groups)`: hidden states `[B, tokens, D]` and `g` consecutive groups to `[B, tokens, g, W]`."""

ProjectLowRank = Callable[[Tensor], Tensor | None]
"""`project_low_rank(x)`: hidden states `[B, tokens, D]` to what every head needs of each token,
`[B, tokens, r]`. None if the layer has no such projection."""

Convolution = Callable[..., Tensor]
"""`convolution(x, cu_seqlens=..., cu_seqlens_cpu=...)`: the causal depthwise convolution of the packed
documents `x` `[1, tokens, g * W]`, with the documents' offsets `[documents + 1]` on the device and on the
CPU. Same shape as `x`."""

Rule = Callable[..., tuple[Tensor, Tensor | None]]
"""`rule(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=..., cu_seqlens_cpu=...)`:
a chunked rule of `titan_gdn.ops` over packed documents.

`q` and `k` `[1, tokens, g, K]`, `v` `[1, tokens, N, V]`, log decay `g` `[1, tokens, N]` or
`[1, tokens, N, K]`, write strength `beta` `[1, tokens, N]`, `initial_state` `[documents, N, K, V]`. Returns
the output `[1, tokens, N, V]`, and the final states `[documents, N, K, V]` if `output_final_state` is set."""


class Projections(NamedTuple):
    """What `Exchange.to_heads` returns.

    Attributes:
        y: the projections of the tokens and groups that this rank runs, `[B, t, g, W]`. If these are all
            tokens, they are in natural order.
        low_rank: the low-rank projection of the same tokens, `[B, t, r]`. None if the layer has none.
        x_local: the hidden states of this CP rank's tokens, `[B, L, D]`. Under sequence parallelism they are
            gathered over TP.
    """

    y: Tensor
    low_rank: Tensor | None
    x_local: Tensor


class Exchange(ABC):
    """One way to run a recurrent layer over sequences that are sharded over CP.

    Args:
        mesh: the CP sub-mesh.
        tp_mesh: the TP sub-mesh if hidden states are sharded over it between layers (sequence parallelism),
            else None.
        regather: communicate again in the backward instead of keeping what was gathered. An exchange that
            keeps nothing may ignore it.
    """

    name: ClassVar[str]
    """The value of `linear_attention.exchange` that selects the exchange."""

    saved: ClassVar[tuple[OpOverload, ...]]
    """Collectives over CP whose results selective checkpointing keeps: all but gathers of hidden states."""

    sends_again: ClassVar[bool] = False
    """Whether a recomputed forward communicates over CP although the results of `saved` are kept. If False,
    a layer under selective checkpointing costs no second exchange."""

    slices_weights: ClassVar[bool] = False
    """Whether a rank multiplies by the rows of its own heads only, `1 / cp` of `in_proj_qkv`, so that
    quantized products are that much smaller."""

    def __init__(self, mesh: DeviceMesh, tp_mesh: DeviceMesh | None = None, regather: bool = False) -> None:
        self.mesh = mesh
        self.tp_mesh = tp_mesh
        self.regather = regather

    @staticmethod
    @abstractmethod
    def traffic(shape: LayerShape, batch: ShardedBatch) -> Traffic:
        """What a layer sends, computes and holds under this exchange, for one rank.

        Callers check `impossible` first. Gradients of weights are not counted: FSDP reduces them over CP once
        a step under every exchange.
        """

    @staticmethod
    @abstractmethod
    def impossible(shape: LayerShape, batch: ShardedBatch) -> str | None:
        """Why the exchange cannot run this layer and what to change. None if it can."""

    @abstractmethod
    def groups(self, groups: int) -> slice:
        """Which of this TP rank's `groups` head groups run on this rank."""

    @abstractmethod
    def to_heads(
        self,
        x: Tensor,
        project: Project,
        project_low_rank: ProjectLowRank,
        groups: int,
        sequence: SequenceLayout,
    ) -> Projections:
        """Project hidden states and move the projections to the ranks that run their heads.

        Args:
            x: hidden states as they are between layers, `[B, S, D]`.
            project: the layer's projection, group by group.
            project_low_rank: what the layer projects in addition for all groups.
            groups: `G`, head groups of this TP rank.
            sequence: the order of the shards.
        """

    @abstractmethod
    def convolve(self, convolution: Convolution, x: Tensor, reach: int, sequence: SequenceLayout) -> Tensor:
        """Convolve the tokens that run on this rank.

        Args:
            convolution: the layer's convolution.
            x: projections of packed rows, `[1, B * t, g * W]`.
            reach: how many tokens before its own the convolution reads.
            sequence: the documents.

        Returns:
            `[1, B * t, g * W]`.
        """

    @abstractmethod
    def recur(
        self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence: SequenceLayout
    ) -> Tensor:
        """Run the rule over the tokens that run on this rank.

        Args:
            rule: the layer's rule.
            q: `[1, B * t, g, K]`.
            k: `[1, B * t, g, K]`.
            v: `[1, B * t, N, V]`.
            g: log decay, `[1, B * t, N]`, or `[1, B * t, N, K]` per key channel.
            beta: write strength, `[1, B * t, N]`.
            sequence: the documents.

        Returns:
            `[1, B * t, N, V]`.
        """

    @abstractmethod
    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """Move the rule's output back to the ranks that own the tokens.

        Args:
            out: `[B, t, N, V]`.
            sequence: the order of the shards.

        Returns:
            This CP rank's tokens with all value heads of the TP rank, `[B, L, heads, V]`.
        """


class WholeDocuments(Exchange):
    """An exchange after which each document is whole on the rank, so that operators run as they are."""

    def convolve(self, convolution: Convolution, x: Tensor, reach: int, sequence: SequenceLayout) -> Tensor:
        """No communication."""
        return convolution(x, cu_seqlens=sequence.cu_seqlens, cu_seqlens_cpu=sequence.cu_seqlens_cpu)

    def recur(
        self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence: SequenceLayout
    ) -> Tensor:
        """No communication."""
        out, _ = rule(
            q, k, v, g, beta, cu_seqlens=sequence.cu_seqlens, cu_seqlens_cpu=sequence.cu_seqlens_cpu
        )
        return out


class AllTokens(WholeDocuments):
    """An exchange that gives each CP rank all tokens of `1 / cp` of the TP rank's heads."""

    @staticmethod
    def impossible(shape: LayerShape, batch: ShardedBatch) -> str | None:
        """Whether TP times CP divides the key heads."""
        heads, cp, tp = shape.key_heads, batch.cp, batch.tp
        if reason := heads_over_tp(shape, batch):
            return reason
        if heads % (tp * cp) == 0:
            return None
        possible = ", ".join(str(cp) for cp in range(1, heads // tp + 1) if heads // tp % cp == 0)
        return (
            f"the {heads} key heads are not divisible by parallelism.tensor_parallel_degree = {tp} times "
            f"parallelism.context_parallel_degree = {cp}; with this tp, cp may be {possible}, or any number "
            'with linear_attention.exchange = "state", which only needs heads that are divisible by tp'
        )

    def groups(self, groups: int) -> slice:
        """This CP rank's `1 / cp` of them."""
        count, rank = groups // self.mesh.size(), self.mesh.get_local_rank()
        return slice(rank * count, (rank + 1) * count)

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """One all-to-all: `Shard(head) -> Shard(sequence)`."""
        return all_to_all(reorder(out, sequence.to_shards), self.mesh, 2, 1)
