"""`exchange = "all_to_all"`: exchange tokens for heads before the rule, and heads for tokens after it.

This is what DeepSpeed calls Ulysses, and Megatron-core's scheme for linear attention.
"""

from torch import Tensor

from titan_gdn.parallel.collectives import (
    ALL_GATHER,
    ALL_TO_ALL,
    all_to_all,
    gather_all,
    gather_sequence,
    in_order,
    reorder,
)
from titan_gdn.parallel.exchange.base import AllTokens, Project, Projections, ProjectLowRank
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import LayerShape, PassCost, ShardedBatch, Traffic, over_tp, way_out


class AllToAll(AllTokens):
    """Each rank projects its own tokens for all heads, then an all-to-all exchanges tokens for heads.

    Under sequence parallelism hidden states are gathered over TP first.
    """

    name = "all_to_all"
    saved = (ALL_TO_ALL, ALL_GATHER)  # the gather is that of the low-rank projection

    def to_heads(
        self,
        x: Tensor,
        project: Project,
        project_low_rank: ProjectLowRank,
        groups: int,
        sequence: SequenceLayout,
    ) -> Projections:
        """One all-to-all, `Shard(sequence) -> Shard(head group)`, of all projections of all heads.

        The low-rank projection, which every head needs, is computed before hidden states are gathered over
        TP, and then gathered over CP and TP: `Shard(sequence) -> Replicate`.
        """
        x_local = gather_sequence(x, self.tp_mesh)
        y_BTgW = all_to_all(project(x_local, slice(0, groups)), self.mesh, 1, 2)
        low_rank = project_low_rank(x)
        if low_rank is not None:
            gathered = gather_all(low_rank, self.mesh, self.tp_mesh)
            low_rank = in_order(gathered, self.mesh, self.tp_mesh, sequence)
        return Projections(reorder(y_BTgW, sequence.from_shards), low_rank, x_local)

    @staticmethod
    def traffic(shape: LayerShape, batch: ShardedBatch) -> Traffic:
        """Projections of all heads before the rule, the rule's output after it."""
        tokens, own, cp, tp = batch.tokens, batch.tokens_of_cp_rank, batch.cp, batch.tp
        between, low_rank = batch.tokens_between_layers, shape.low_rank
        way_in = PassCost(
            batch.itemsize * (own * (shape.exchanged // tp) * (cp - 1) // cp + between * low_rank * (cp - 1)),
            cp_messages=2 if low_rank else 1,
        )
        both = way_in + way_out(shape, batch) + over_tp(shape, batch, own)
        if low_rank and batch.sharded:
            both += PassCost(tp_bytes=batch.itemsize * cp * between * low_rank * (tp - 1), tp_messages=1)
        # Without CP every TP rank computes the low-rank projection of all tokens; here, of its own shard.
        saved = 2 * (between - own) * shape.width * low_rank
        return Traffic(
            both + PassCost(flops=saved),
            both + PassCost(flops=2 * saved),
            transient=batch.itemsize * (own * (shape.exchanged // tp) + tokens * low_rank),
            kept=batch.itemsize * (tokens - own) * low_rank,
            collected=batch.itemsize
            * (own * ((shape.exchanged + shape.output) // tp) + cp * between * low_rank),
        )
