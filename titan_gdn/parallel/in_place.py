"""Tokens that stay where they are: all heads of this TP rank run over the tokens of this CP rank."""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_gdn.parallel.collectives import gather_sequence
from titan_gdn.parallel.sequence import SequenceLayout

if TYPE_CHECKING:
    from titan_gdn.parallel.exchange import Bottleneck, Project


class InPlace:
    """What the exchanges share that send no projections over CP.

    Args:
        tp_mesh: the TP sub-mesh under sequence parallelism, over which hidden states are gathered.
    """

    def __init__(self, tp_mesh: DeviceMesh | None = None) -> None:
        self.tp_mesh = tp_mesh

    def groups(self, groups: int) -> slice:
        """All of them."""
        return slice(0, groups)

    def to_heads(
        self, x: Tensor, project: "Project", bottleneck: "Bottleneck", groups: int, sequence: SequenceLayout
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Project, no more: `[B, L, G, W]`."""
        home = gather_sequence(x, self.tp_mesh)
        return project(home, self.groups(groups)), bottleneck(home), home

    def to_tokens(self, out: Tensor, sequence: SequenceLayout) -> Tensor:
        """Nothing to do."""
        return out
