"""What a linear attention layer sends over each mesh axis, computes and holds because its sequence is split.

Bytes, messages and FLOPs are those of one rank, one layer and one pass, from widths and degrees alone
(DESIGN section 4). `titan_gdn.parallel.cost` makes time of them.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import get_args

from titan_gdn.ops.fla_documents import FLA_CHUNK
from titan_gdn.ops.flops import chunked_rule_flops
from titan_gdn.parallel.exchange import ExchangeName
from titan_gdn.parallel.sequence import Order

EXCHANGES: tuple[ExchangeName, ...] = get_args(ExchangeName)
FLOAT32 = 4
"""Bytes of an element of the states and their transitions, whatever the activations are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """A linear attention layer, whole.

    Attributes:
        width: `D`, of the hidden states.
        exchanged: `W`, elements a token that are projected and cross in: `G * (2K + R*V + 2R)` for GDN.
        output: `O`, elements a token that cross back: `G * R * V`.
        bottleneck: `r`, elements a token that every rank needs, whatever its heads; 0 for GDN.
        key_heads: `G`, head groups, what TP and the head exchanges divide.
        value_heads: `G * R`, each with a state `[K, V]`.
        key_dim: `K`.
        value_dim: `V`.
        channels: rows of `in_proj_qkv`, which the convolution sees.
        kernel_size: `C`, tokens that it sees.
        per_channel: a decay per key channel (KDA), not per head (GDN).
        fla: the rule runs by FLA's kernels, which keep some rows for the backward, not by PyTorch's.
    """

    width: int
    exchanged: int
    output: int
    bottleneck: int = 0
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel_size: int
    per_channel: bool
    fla: bool = True


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """A batch, and how it lies on the ranks.

    Attributes:
        batch: rows of a forward.
        length: `T`, tokens of a row, those of all CP ranks together.
        cp: degree of context parallelism.
        tp: degree of tensor parallelism.
        sequence_parallel: whether hidden states are sharded over TP between layers, where there is TP.
        order: the tokens of each CP rank.
        itemsize: bytes of an element of the activations.
        regather: gather again in the backward instead of keeping what was gathered.
    """

    batch: int
    length: int
    cp: int
    tp: int
    sequence_parallel: bool
    order: Order
    itemsize: int
    regather: bool = False

    @property
    def segments(self) -> int:
        """Runs of tokens of a rank that do not touch: 1, or 2 under "headtail"."""
        return 2 if self.order == "headtail" else 1

    @property
    def sharded(self) -> bool:
        """Whether sequence parallelism has an effect: it needs TP."""
        return self.sequence_parallel and self.tp > 1

    @property
    def tokens(self) -> int:
        """Tokens of all ranks: `B * T`."""
        return self.batch * self.length

    @property
    def tokens_of_cp_rank(self) -> int:
        """`B * T / cp`."""
        return self.tokens // self.cp

    @property
    def tokens_between_layers(self) -> int:
        """Tokens of a rank between layers: `B * T / (cp * tp)` under sequence parallelism."""
        return self.tokens_of_cp_rank // (self.tp if self.sharded else 1)


@dataclass(frozen=True, slots=True)
class PassCost:
    """One way through the layer, for one rank.

    Attributes:
        cp_bytes: sent over CP.
        tp_bytes: sent over TP.
        cp_messages: collectives over CP.
        tp_messages: collectives over TP.
        flops: matrix FLOPs beyond this rank's share of the layer's without CP; below 0 where it saves some.
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
        backward: what the backward does, without the recompute of a checkpointed layer.
        transient: bytes of the largest buffers that the exchange adds while the layer runs.
        kept: bytes that it adds to what is kept from forward to backward.
        collected: bytes of what its collectives over CP give, those that `Exchange.saved` names: selective
            checkpointing may keep them instead.
        computed: bytes of what operators that it adds give, which selective checkpointing keeps.
    """

    forward: PassCost
    backward: PassCost
    transient: int
    kept: int
    collected: int = 0
    computed: int = 0


def traffic(name: ExchangeName, shape: LayerShape, split: ShardedBatch) -> Traffic:
    """What one layer costs under an exchange; with `cp` 1 nothing crosses CP, whichever it is.

    Gradients of weights are not counted: FSDP sums them over CP, once a step, whatever the exchange.
    `impossible` says whether the exchange can be; here heads and tokens are taken to divide.
    """
    if split.cp == 1:
        tp = _over_tp(shape, split, split.tokens)
        return Traffic(tp, tp, transient=0, kept=0)
    return _OF[name](shape, split)


def impossible(name: ExchangeName, shape: LayerShape, split: ShardedBatch) -> str | None:
    """Why an exchange cannot be, and what can; None where it can."""
    heads, cp, tp = shape.key_heads, split.cp, split.tp
    if heads % tp:
        return f"the {heads} key heads do not divide by tensor_parallel_degree = {tp}"
    if cp == 1:
        return None
    if name != "state":
        if heads % (tp * cp) == 0:
            return None
        possible = ", ".join(str(cp) for cp in range(1, heads // tp + 1) if heads // tp % cp == 0)
        return (
            f"the {heads} key heads do not divide by tensor_parallel_degree = {tp} times "
            f"context_parallel_degree = {cp}; with this tp, cp may be {possible}, or any with exchange = "
            '"state", which needs heads to divide by tp only'
        )
    segment, halo = split.length // (cp * split.segments), shape.kernel_size - 1
    if segment >= halo:
        return None
    return (
        f"segments of {segment} tokens (seq_len = {split.length} over {cp * split.segments}) are shorter "
        f"than the {halo} tokens that the convolution of {shape.kernel_size} needs of the segment before"
    )


def _all_to_all(shape: LayerShape, split: ShardedBatch) -> Traffic:
    tokens, own, cp, tp = split.tokens, split.tokens_of_cp_rank, split.cp, split.tp
    between, narrow = split.tokens_between_layers, shape.bottleneck
    way_in = PassCost(
        split.itemsize * (own * (shape.exchanged // tp) * (cp - 1) // cp + between * narrow * (cp - 1)),
        cp_messages=2 if narrow else 1,
    )
    both = way_in + _way_out(shape, split) + _over_tp(shape, split, own)
    if narrow and split.sharded:
        both += PassCost(tp_bytes=split.itemsize * cp * between * narrow * (tp - 1), tp_messages=1)
    # The bottleneck is made where hidden states lie, without CP of all tokens on every TP rank.
    saved = 2 * (between - own) * shape.width * narrow
    return Traffic(
        both + PassCost(flops=saved),
        both + PassCost(flops=2 * saved),
        transient=split.itemsize * (own * (shape.exchanged // tp) + tokens * narrow),
        kept=split.itemsize * (tokens - own) * narrow,
        collected=split.itemsize * (own * ((shape.exchanged + shape.output) // tp) + cp * between * narrow),
    )


def _all_gather(shape: LayerShape, split: ShardedBatch) -> Traffic:
    tokens, own, cp, tp = split.tokens, split.tokens_of_cp_rank, split.cp, split.tp
    gather = PassCost(split.itemsize * split.tokens_between_layers * shape.width * (cp - 1), cp_messages=1)
    rest = _way_out(shape, split) + _over_tp(shape, split, tokens)
    bottleneck = 2 * tokens * shape.width * shape.bottleneck  # on every rank
    more = bottleneck * (cp - 1) // cp
    forward = gather + rest + PassCost(flops=more)
    backward = gather + rest + PassCost(flops=2 * more)
    if split.regather:  # and what is projected from it
        project = 2 * own * shape.width * (shape.exchanged // tp)
        over_tp = _gather_over_tp(shape, split, tokens)
        backward += gather + over_tp + PassCost(flops=project + bottleneck)
    gathered = split.itemsize * tokens * shape.width
    return Traffic(
        forward,
        backward,
        # In the forward what is gathered, in the backward its gradient.
        transient=gathered + split.itemsize * tokens * shape.bottleneck,
        kept=(0 if split.regather else gathered) + split.itemsize * (tokens - own) * shape.bottleneck,
        collected=split.itemsize * own * (shape.output // tp),
    )


def _state(shape: LayerShape, split: ShardedBatch) -> Traffic:
    own, cp, tp = split.tokens_of_cp_rank, split.cp, split.tp
    heads, K, V = shape.value_heads // tp, shape.key_dim, shape.value_dim
    # Of two segments the first begins with nothing, and nothing follows the second: no transition is needed.
    transition = 0 if cp * split.segments == 2 else K
    states = split.segments * split.batch * heads  # of this rank
    halo_rows = split.segments * split.batch * (shape.kernel_size - 1)
    halo = PassCost()
    if halo_rows:
        halo = PassCost(split.itemsize * halo_rows * (shape.channels // tp) * (cp - 1), cp_messages=1)
    summary = PassCost(FLOAT32 * states * K * (V + transition) * (cp - 1), cp_messages=1)
    gradient = PassCost(
        FLOAT32 * states * K * (V + (transition if split.regather else 0)) * (cp - 1), cp_messages=1
    )
    # The rule once more, over the last fragment of each segment; one document, so over all tokens.
    again = chunked_rule_flops(own, shape.key_heads // tp, heads, K, V + transition, shape.per_channel)
    # Every rank applies all transitions, but for the first and last segment's, and in the backward has the
    # gradients of its own.
    inner = (cp * split.segments - 2) * split.batch * heads
    product = 2 * K * transition * V
    over_tp = _over_tp(shape, split, own)
    # The second pass has copies of its tokens, for of documents it needs the last fragments alone.
    copies = split.itemsize * own * ((shape.key_heads // tp) * K + heads * (V + transition))
    copies += FLOAT32 * own * heads * ((K if shape.per_channel else 1) + 1)
    # Results of the second pass: outputs that nobody asks for, and what FLA's kernels keep of each chunk.
    outputs = split.itemsize * own * heads * (V + transition)
    rows = split.itemsize * own * heads * FLA_CHUNK * (2 if shape.per_channel else 1) if shape.fla else 0
    gathered = FLOAT32 * cp * states * K * (V + transition)
    kept_transitions = (states if split.regather else inner) * K * transition
    return Traffic(
        halo + summary + over_tp + PassCost(flops=again[0] + inner * product),
        halo + gradient + over_tp + PassCost(flops=again[1] + (inner + states) * product),
        transient=gathered + copies + outputs,
        kept=copies + rows + FLOAT32 * (states * K * V + kept_transitions),
        collected=gathered + split.itemsize * cp * halo_rows * (shape.channels // tp),
        computed=outputs + rows,
    )


_OF: dict[ExchangeName, Callable[[LayerShape, ShardedBatch], Traffic]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "state": _state,
}


def _way_out(shape: LayerShape, split: ShardedBatch) -> PassCost:
    """The rule's output from heads to tokens, one all-to-all."""
    elements = split.tokens_of_cp_rank * (shape.output // split.tp) * (split.cp - 1) // split.cp
    return PassCost(split.itemsize * elements, cp_messages=1)


def _over_tp(shape: LayerShape, split: ShardedBatch, rows: int) -> PassCost:
    """What hidden states need over TP, forward or backward.

    Args:
        shape: the layer.
        split: the mesh.
        rows: tokens that are gathered under sequence parallelism. Without it, outputs forward and input
            gradients backward are all-reduced, this CP rank's tokens.
    """
    if split.tp == 1:
        return PassCost()
    own = split.itemsize * split.tokens_of_cp_rank * shape.width * (split.tp - 1) // split.tp
    if not split.sharded:
        return PassCost(tp_bytes=2 * own, tp_messages=1)
    return _gather_over_tp(shape, split, rows) + PassCost(tp_bytes=own, tp_messages=1)  # and reduce-scatter


def _gather_over_tp(shape: LayerShape, split: ShardedBatch, rows: int) -> PassCost:
    """Hidden states of `rows` tokens from sequence-parallel shards; the other way, their gradients."""
    if not split.sharded:
        return PassCost()
    return PassCost(tp_bytes=split.itemsize * rows * shape.width * (split.tp - 1) // split.tp, tp_messages=1)
