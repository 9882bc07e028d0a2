"""`exchange = "all_gather"`: gather hidden states, then project all tokens for this rank's heads (SkyRL)."""

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from titan_gdn.parallel.collectives import ALL_TO_ALL, gather_all, in_order
from titan_gdn.parallel.exchange.base import AllTokens, Project, Projections, ProjectLowRank
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import (
    LayerShape,
    PassCost,
    ShardedBatch,
    Traffic,
    gather_over_tp,
    over_tp,
    way_out,
)


class AllGather(AllTokens):
    """Each rank gathers the hidden states of all tokens and projects them for its own heads only.

    Under sequence parallelism each rank gathers its own shard over CP first and then over TP, so that only
    `1 / tp` of the hidden states cross CP. With `regather` the backward gathers hidden states again instead
    of keeping them.
    """

    name = "all_gather"
    saved = (ALL_TO_ALL,)
    sends_again = True  # gathered hidden states are most of what it sends, and are not kept
    slices_weights = True

    def to_heads(
        self,
        x: Tensor,
        project: Project,
        project_low_rank: ProjectLowRank,
        groups: int,
        sequence: SequenceLayout,
    ) -> Projections:
        """One all-gather of hidden states, `Shard(sequence) -> Replicate`. The backward reduce-scatters."""

        def gather_and_project(x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
            gathered = gather_all(x, self.mesh, self.tp_mesh)
            x_local = x
            if self.tp_mesh is not None:
                # Rows are ordered [tp][cp][tokens]: of each TP rank's rows, one run belongs to this CP rank.
                by_rank = gathered.unflatten(1, (self.tp_mesh.size(), self.mesh.size(), -1))
                x_local = by_rank[:, :, self.mesh.get_local_rank()].flatten(1, 2)
            return project(gathered, self.groups(groups)), project_low_rank(gathered), x_local

        if self.regather:
            y_BTgW, low_rank, x_local = checkpoint(gather_and_project, x, use_reentrant=False)
        else:
            y_BTgW, low_rank, x_local = gather_and_project(x)
        y_BTgW = in_order(y_BTgW, self.mesh, self.tp_mesh, sequence)
        if low_rank is not None:
            low_rank = in_order(low_rank, self.mesh, self.tp_mesh, sequence)
        return Projections(y_BTgW, low_rank, x_local)

    @staticmethod
    def traffic(shape: LayerShape, batch: ShardedBatch) -> Traffic:
        """Hidden states before the rule, the rule's output after it."""
        tokens, own, cp, tp = batch.tokens, batch.tokens_of_cp_rank, batch.cp, batch.tp
        gather = PassCost(
            batch.itemsize * batch.tokens_between_layers * shape.width * (cp - 1), cp_messages=1
        )
        rest = way_out(shape, batch) + over_tp(shape, batch, tokens)
        low_rank = 2 * tokens * shape.width * shape.low_rank  # every rank projects all tokens
        more = low_rank * (cp - 1) // cp
        forward = gather + rest + PassCost(flops=more)
        backward = gather + rest + PassCost(flops=2 * more)
        if batch.regather:  # the gathers, and the projections of what was gathered, run once more
            project = 2 * own * shape.width * (shape.exchanged // tp)
            backward += gather + gather_over_tp(shape, batch, tokens) + PassCost(flops=project + low_rank)
        gathered = batch.itemsize * tokens * shape.width
        return Traffic(
            forward,
            backward,
            # The gathered hidden states in the forward, their gradient in the backward.
            transient=gathered + batch.itemsize * tokens * shape.low_rank,
            kept=(0 if batch.regather else gathered) + batch.itemsize * (tokens - own) * shape.low_rank,
            collected=batch.itemsize * own * (shape.output // tp),
        )
