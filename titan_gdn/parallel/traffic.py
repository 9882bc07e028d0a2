"""Bytes, messages, FLOPs and memory that sharding a sequence adds to a linear attention layer.

Numbers are those of one rank, one layer and one pass. They follow from widths and degrees alone (DESIGN
section 4). The formulas of each exchange stand with the exchange (`titan_gdn.parallel.exchange`); here are
their inputs, their results and what they share. `titan_gdn.parallel.cost` turns them into time.
"""

from dataclasses import astuple, dataclass

from titan_gdn.ops.rules import Rule
from titan_gdn.parallel.segments import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The widths of a linear attention layer before it is sharded.

    Attributes:
        width: `D`, width of the hidden states.
        exchanged: `W`, elements per token that are projected for each head: `G * (2K + R*V + 2R)` for GDN.
        output: `O`, elements per token that the rule returns: `G * R * V`.
        low_rank: `r`, elements per token of the low-rank projection, which every head needs; 0 for GDN.
        key_heads: `G`, head groups, which TP and exchanges of heads divide.
        value_heads: `G * R`, each with a state `[K, V]`.
        key_dim: `K`, width of a key head.
        value_dim: `V`, width of a value head.
        channels: rows of `in_proj_qkv`, which are the channels of the convolution.
        kernel_size: `C`, tokens that the convolution reads.
        rule: the layer's rule, for what it computes and keeps.
        fla: whether FLA's kernels run the rule; they keep more rows for the backward than PyTorch's.
    """

    width: int
    exchanged: int
    output: int
    low_rank: int = 0
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel_size: int
    rule: Rule
    fla: bool = True


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """The batch of one forward and how it is sharded.

    Attributes:
        rows: `B`, number of sequences.
        length: `T`, tokens of a row, over all CP ranks.
        cp: degree of context parallelism.
        tp: degree of tensor parallelism.
        sequence_parallel: whether hidden states are sharded over TP between layers, if there is TP.
        order: which tokens each CP rank holds.
        itemsize: bytes of an element of the activations.
        regather: whether the backward gathers again instead of keeping what was gathered.
    """

    rows: int
    length: int
    cp: int
    tp: int
    sequence_parallel: bool
    order: Order
    itemsize: int
    regather: bool = False

    @property
    def segments(self) -> int:
        """Runs of consecutive tokens that a rank holds of each row: 1, or 2 under "headtail"."""
        return 2 if self.order == "headtail" else 1

    @property
    def sharded(self) -> bool:
        """Whether hidden states are sharded over TP: sequence parallelism has an effect only with TP."""
        return self.sequence_parallel and self.tp > 1

    @property
    def tokens(self) -> int:
        """Tokens of all ranks: `B * T`."""
        return self.rows * self.length

    @property
    def tokens_of_cp_rank(self) -> int:
        """Tokens of a CP rank: `B * T / cp`."""
        return self.tokens // self.cp

    @property
    def tokens_between_layers(self) -> int:
        """Tokens of a rank between layers: `B * T / (cp * tp)` under sequence parallelism."""
        return self.tokens_of_cp_rank // (self.tp if self.sharded else 1)


@dataclass(frozen=True, slots=True)
class PassCost:
    """What one pass through the layer sends and computes, for one rank.

    Attributes:
        cp_bytes: bytes sent over CP.
        tp_bytes: bytes sent over TP.
        cp_messages: collectives over CP.
        tp_messages: collectives over TP.
        flops: FLOPs of matrix products in addition to this rank's share of the layer without CP. Negative if
            the exchange saves some.
    """

    cp_bytes: int = 0
    tp_bytes: int = 0
    cp_messages: int = 0
    tp_messages: int = 0
    flops: int = 0

    def __add__(self, other: "PassCost") -> "PassCost":
        return PassCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Traffic:
    """A layer under an exchange, for one rank.

    Attributes:
        forward: what the forward sends and computes.
        backward: what the backward sends and computes, without the recompute of a checkpointed layer.
        transient: bytes of the largest buffers that the exchange adds while the layer runs.
        kept: bytes that it adds to what is kept from forward to backward.
        collected: bytes of the results of the collectives over CP that `Exchange.saved` names. Selective
            checkpointing may keep them instead of `kept`.
        computed: bytes of the results of operators that the exchange adds and selective checkpointing keeps.
    """

    forward: PassCost
    backward: PassCost
    transient: int
    kept: int
    collected: int = 0
    computed: int = 0


def heads_over_tp(shape: LayerShape, batch: ShardedBatch) -> str | None:
    """Says that TP does not divide the key heads, a condition of every exchange. None if it does."""
    if shape.key_heads % batch.tp == 0:
        return None
    tp = f"parallelism.tensor_parallel_degree = {batch.tp}"
    return f"the {shape.key_heads} key heads are not divisible by {tp}"


def way_out(shape: LayerShape, batch: ShardedBatch) -> PassCost:
    """One all-to-all of the rule's output, from all tokens of some heads to some tokens of all heads."""
    elements = batch.tokens_of_cp_rank * (shape.output // batch.tp) * (batch.cp - 1) // batch.cp
    return PassCost(batch.itemsize * elements, cp_messages=1)


def over_tp(shape: LayerShape, batch: ShardedBatch, tokens: int) -> PassCost:
    """Communication of hidden states over TP, the same in forward and backward.

    Under sequence parallelism they are gathered before the layer and its output is reduce-scattered. Without,
    outputs are all-reduced in the forward and gradients of inputs in the backward.

    Args:
        shape: the layer.
        batch: the batch and the mesh.
        tokens: how many tokens are gathered under sequence parallelism.
    """
    if batch.tp == 1:
        return PassCost()
    own = batch.itemsize * batch.tokens_of_cp_rank * shape.width * (batch.tp - 1) // batch.tp
    if not batch.sharded:
        return PassCost(tp_bytes=2 * own, tp_messages=1)
    return gather_over_tp(shape, batch, tokens) + PassCost(tp_bytes=own, tp_messages=1)


def gather_over_tp(shape: LayerShape, batch: ShardedBatch, tokens: int) -> PassCost:
    """One all-gather over TP of the hidden states of `tokens` tokens, or reduce-scatter of gradients."""
    if not batch.sharded:
        return PassCost()
    return PassCost(
        tp_bytes=batch.itemsize * tokens * shape.width * (batch.tp - 1) // batch.tp, tp_messages=1
    )
