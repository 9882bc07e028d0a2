"""Which tokens of a sequence each CP rank holds, and the runs of consecutive tokens among them."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Order = Literal["contiguous", "headtail"]
"""Which tokens CP rank `r` of `cp` holds. "contiguous": part `r` of `cp` equal parts. "headtail": of `2 cp`
equal parts, part `r` from the start and part `r` from the end."""


class Segments(NamedTuple):
    """A rank's tokens as runs of consecutive tokens, and which documents continue from one run to the next.

    A rank holds `s` segments of each row, 1 if contiguous and 2 if headtail, of `L / s` tokens each. Its rows
    `[B, L]`, flattened, are its segments `[B*s]` one after the other. Over all ranks a row has `P = cp * s`
    segments. The part of a document that lies in a segment is a *fragment*: only the first fragment of a
    segment can continue a document of the segment before, and only the last can continue in the next one.

    Attributes:
        cu_seqlens: `[F + 1]` int64 offsets of this rank's fragments in its rows.
        cu_seqlens_cpu: the same on the CPU.
        first: `[B*s]`, for each own segment the index of its first fragment.
        history: `[B*s]`, how many tokens before the segment belong to the document of its first fragment.
        last_rows: `[n]`, the rows of each own segment's last fragment, one segment after the other.
        last_cu_seqlens: `[B*s + 1]`, their offsets.
        last_cu_seqlens_cpu: the same on the CPU.
        gathered: `[P, B]`, the index of each segment in the concatenation of all ranks' `[B*s]`.
        goes_on: `[P, B]` bool, whether the segment begins with a document that began before it.
        through: `[P, B]` bool, whether the segment consists of one fragment.
        own: `[B*s]`, the indices of this rank's segments in `[P, B]`, flattened.
    """

    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    first: Tensor
    history: Tensor
    last_rows: Tensor
    last_cu_seqlens: Tensor
    last_cu_seqlens_cpu: Tensor
    gathered: Tensor
    goes_on: Tensor
    through: Tensor
    own: Tensor

    @classmethod
    def from_starts(cls, starts_BT: Tensor, parts: Tensor, rank: int) -> "Segments":
        """Find the segments of a rank from where documents start.

        Args:
            starts_BT: bool on the CPU, in natural order.
            parts: `[cp, s]`, which of the `P` parts of a row each rank holds.
            rank: the rank in the CP group.
        """
        batch, (cp, per_rank) = starts_BT.shape[0], parts.shape
        starts_BPl = starts_BT.unflatten(1, (cp * per_rank, -1))
        begins = torch.where(starts_BT, torch.arange(starts_BT.shape[1]), 0).cummax(1).values
        offset = parts[rank] * starts_BPl.shape[2]
        fragments = starts_BPl[:, parts[rank]].flatten(0, 1)
        fragments[:, 0] = True
        cu_seqlens_cpu = offsets_of(fragments.flatten())
        number = fragments.flatten().cumsum(0).view_as(fragments) - 1
        last = number == number[:, -1:]
        last_cu_seqlens_cpu = torch.nn.functional.pad(last.sum(1).cumsum(0), (1, 0))
        gathered = torch.empty(cp * per_rank, batch, dtype=torch.int64)
        rows = torch.arange(cp * batch * per_rank).view(cp, batch, per_rank)
        gathered[parts.flatten()] = rows.transpose(1, 2).flatten(0, 1)
        return cls(
            cu_seqlens=cu_seqlens_cpu,
            cu_seqlens_cpu=cu_seqlens_cpu,
            first=number[:, 0],
            history=(offset - begins[:, offset]).flatten(),
            last_rows=last.flatten().nonzero().flatten(),
            last_cu_seqlens=last_cu_seqlens_cpu,
            last_cu_seqlens_cpu=last_cu_seqlens_cpu,
            gathered=gathered,
            goes_on=~starts_BPl[:, :, 0].T,
            through=~starts_BPl[:, :, 1:].any(2).T,
            own=(parts[rank] * batch + torch.arange(batch)[:, None]).flatten(),
        )

    def to(self, device: torch.device) -> "Segments":
        """Move every field to a device, except those that stay on the CPU."""
        moved = {
            name: x.to(device, non_blocking=True)
            for name, x in self._asdict().items()
            if not name.endswith("_cpu")
        }
        return self._replace(**moved)


def shares(cp: int, order: Order) -> Tensor:
    """`[cp, s]`, which of the `cp * s` equal parts of a sequence each rank holds."""
    ranks = torch.arange(cp)
    return ranks[:, None] if order == "contiguous" else torch.stack([ranks, 2 * cp - 1 - ranks], 1)


def shard_order(length: int, cp: int, order: Order) -> Tensor:
    """`[T]`, the natural position of each row in the concatenation of the shards of `cp` ranks."""
    parts = shares(cp, order).flatten()
    return torch.arange(length).view(len(parts), -1)[parts].flatten()


def offsets_of(starts: Tensor) -> Tensor:
    """`cu_seqlens` of the documents that start where `starts` `[n]` is True."""
    return torch.cat([starts.nonzero().flatten(), torch.tensor([starts.numel()])])
