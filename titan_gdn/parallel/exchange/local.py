"""Tokens that stay on their rank: each CP rank runs all heads of its TP rank over its own tokens."""

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_gdn.parallel.collectives import gather_sequence
from titan_gdn.parallel.exchange.base import (
    Exchange,
    Project,
    Projections,
    ProjectLowRank,
    WholeDocuments,
)
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import LayerShape, ShardedBatch, Traffic, heads_over_tp, over_tp


class LocalTokens(Exchange):
    """An exchange that sends no projections over CP."""

    def groups(self, groups: int) -> slice:
        """All of them."""
        return slice(0, groups)

    def to_heads(
        self,
        x: Tensor,
        project: Project,
        project_low_rank: ProjectLowRank,
        groups: int,
        sequence: SequenceLayout,
    ) -> Projections:
        """No communication over CP. Under sequence parallelism hidden states are gathered over TP."""
        x_local = gather_sequence(x, self.tp_mesh)
        return Projections(project(x_local, self.groups(groups)), project_low_rank(x_local), x_local)

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """No communication."""
        return out


class NoExchange(LocalTokens, WholeDocuments):
    """Without context parallelism each rank has all tokens. It has no CP sub-mesh.

    Args:
        tp_mesh: the TP sub-mesh under sequence parallelism, else None.
    """

    saved = ()

    def __init__(self, tp_mesh: DeviceMesh | None = None) -> None:
        self.tp_mesh = tp_mesh

    @staticmethod
    def traffic(shape: LayerShape, batch: ShardedBatch) -> Traffic:
        """Communication over TP only."""
        each_pass = over_tp(shape, batch, batch.tokens)
        return Traffic(each_pass, each_pass, transient=0, kept=0)

    @staticmethod
    def impossible(shape: LayerShape, batch: ShardedBatch) -> str | None:
        """Whether TP divides the key heads."""
        return heads_over_tp(shape, batch)
