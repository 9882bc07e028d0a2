"""What the tokens of a forward are: where documents begin. Built once, given to every layer."""

from typing import NamedTuple

import torch
from torch import Tensor


class SequenceLayout(NamedTuple):
    """The documents of a batch `[B, T]` folded to one sequence `[B*T]`.

    Attributes:
        cu_seqlens: `[N + 1]` int64 offsets of the documents, on the device of the tokens.
        cu_seqlens_cpu: the same on the CPU. A tensor, not Python integers: `torch.compile` would
            specialise on those and give up after a few batches.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor

    @classmethod
    def from_positions(cls, positions: Tensor) -> "SequenceLayout":
        """Read the documents off the positions that the data loader made.

        Args:
            positions: `[B, T]` integers, 0 at the first token of each document. A row begins a
                document whatever its first position is.
        """
        # The only transfer to the host of a forward.
        starts = (positions == 0).cpu()
        starts[:, 0] = True
        cu_seqlens_cpu = torch.cat([starts.flatten().nonzero().flatten(), torch.tensor([positions.numel()])])
        return cls(cu_seqlens_cpu.to(positions.device, non_blocking=True), cu_seqlens_cpu)
