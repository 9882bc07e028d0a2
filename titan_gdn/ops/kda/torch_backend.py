"""Kimi Delta Attention in PyTorch, chunk by chunk, on any device.

Kimi Linear (arXiv 2510.26692), section 3: the gated delta rule with a decay per key channel. For each value
head and chunk, with `Gc` the cumulative sum of the log decay inside the chunk and `S` the state that it
receives:

    A_ij = beta_i sum_c k_ic k_jc exp(Gc_ic - Gc_jc)  for j < i      u = (I + A)^-1 beta (v - (exp(Gc) k) S)
    P_ij = scale sum_c q_ic k_jc exp(Gc_ic - Gc_jc)                  o = scale (exp(Gc) q) S + P u
                                                S <- exp(Gc_C) S + (exp(Gc_C - Gc) k)^T u

The decay of a pair cannot be split into one factor per row and one per column for a whole chunk: the sums in
a chunk differ by hundreds, and one of the factors would overflow. So pairs are computed by halving. In each
run of 2, 4, .. tokens, the rows of the second half decay from the middle `m`, and the columns of the first
half decay to it: `exp(Gc_i - Gc_m) exp(Gc_m - Gc_j)`. Both exponents are at most 0 for any gate, every pair
belongs to exactly one run, and all of this is matrix products. Sums inside halves are added up from those of
half the length, so a large sum is never subtracted from another.

Shape suffixes as in `titan_gdn.ops.chunked_rule`, with B runs of 2s tokens. Each value head has its own keys
here, so H is the number of value heads and R is 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_gdn.ops.chunk_plan import CHUNK
from titan_gdn.ops.chunked_operator import define
from titan_gdn.ops.chunked_rule import ChunkGradients, Chunks


class _Halves(NamedTuple):
    """Decays in runs of `2s` tokens: from the middle in second halves, to the middle in first halves."""

    from_middle_NHBsK: Tensor
    to_middle_NHBsK: Tensor

    @property
    def size(self) -> int:
        """`s`, half the length of a run."""
        return self.from_middle_NHBsK.shape[3]

    def rows(self, qk_NHDK: Tensor) -> Tensor:
        """View the queries and keys of the second halves as `[N, H, B, 2, s, K]`."""
        return self._runs(qk_NHDK)[..., 1, :, :].transpose(2, 3)

    def columns(self, qk_NHDK: Tensor) -> Tensor:
        """View the keys of the first halves as `[N, H, B, s, K]`."""
        return self._runs(qk_NHDK)[:, :, 1, :, 0]

    def _runs(self, qk_NHDK: Tensor) -> Tensor:
        return qk_NHDK.unflatten(2, (2, -1, 2, self.size))

    def decayed(self, qk_NHDK: Tensor) -> tuple[Tensor, Tensor]:
        """Return `rows` decayed from the middle, `[N, H, B, 2s, K]`, and `columns` decayed to it."""
        rows = self.rows(qk_NHDK)
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        torch.mul(rows, self.from_middle_NHBsK.unsqueeze(3), out=out)
        return out.flatten(3, 4), self.columns(qk_NHDK) * self.to_middle_NHBsK

    def pairs(self, pairs_NHDC: Tensor) -> Tensor:
        """View the pairs that these runs hold as `[N, H, B, 2, s, s]`."""
        split = self._runs(pairs_NHDC.unflatten(3, (-1, 2, self.size)))
        return split[:, :, :, :, 1, :, :, 0].diagonal(dim1=3, dim2=5).movedim(-1, 2)


def _halves_of(since_start: Tensor, until_end: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """View both halves of runs of `2s` tokens of `since_start`, and the first half of `until_end`.

    Each is `[N, H, B, s, K]`.
    """
    first, second = since_start.unflatten(2, (-1, 2, size)).unbind(3)
    return first, second, until_end.unflatten(2, (-1, 2, size))[:, :, :, 0]


def _halve(g_NHCK: Tensor) -> tuple[list[_Halves], Tensor, Tensor]:
    """Compute the decays of all runs, from each chunk's start through each token, and after it to the end."""
    since_start, until_end, levels = g_NHCK.clone(), torch.zeros_like(g_NHCK), []
    size = 1
    while size < CHUNK:
        first, second, before = _halves_of(since_start, until_end, size)
        levels.append(_Halves(second.exp(), before.exp()))
        before += second[..., -1:, :]
        second += first[..., -1:, :]
        size *= 2
    return levels, since_start.exp_(), until_end.exp_()


class DecayPerChannel:
    """A decay per key channel (a `titan_gdn.ops.chunked_operator.Decay`)."""

    shares_keys = False

    def __init__(
        self, qk_NHDK: Tensor, v_NHRCV: Tensor, g_NHRCK: Tensor, beta_NHRC: Tensor, scale: float
    ) -> None:
        self.qk_NHDK = qk_NHDK
        q_NHCK, k_NHCK = qk_NHDK.split(CHUNK, 2)
        self.levels, self.since_start_NHCK, self.until_end_NHCK = _halve(g_NHRCK.squeeze(2))
        pairs_NHDC = qk_NHDK.new_zeros(*qk_NHDK.shape[:3], CHUNK)
        for halves in self.levels:
            rows, columns = halves.decayed(qk_NHDK)
            halves.pairs(pairs_NHDC).copy_((rows @ columns.mT).unflatten(3, (2, -1)))
        pairs_NHDC[:, :, :CHUNK].diagonal(dim1=-2, dim2=-1).copy_((q_NHCK * k_NHCK).sum(-1))
        self.chunks = Chunks.of_pairs(
            pairs_NHDC.unsqueeze(2),
            v_NHRCV,
            beta_NHRC,
            scale,
            reads_NHDK=self._since_start(qk_NHDK),
            read_NHRD1=None,
            writes_NHCK=k_NHCK * self.until_end_NHCK,
            write_NHRC1=None,
            forget=self.since_start_NHCK[:, :, -1, :, None, None],
        )

    def _since_start(self, qk_NHDK: Tensor) -> Tensor:
        return (qk_NHDK.unflatten(2, (2, CHUNK)) * self.since_start_NHCK.unsqueeze(2)).flatten(2, 3)

    def backward(self, gradients: ChunkGradients) -> tuple[Tensor, Tensor]:
        """Compute the gradients of `qk` and `g`.

        The gradients of the exponents go from the longest runs to the shortest, in the reverse order of
        `_halve`. The gradient of a decay is never a difference of two sums, so it is accurate even where it
        is much smaller than the gradients of what it multiplies.
        """
        q, k = self.qk_NHDK.split(CHUNK, 2)
        d_rows = self._since_start(gradients.d_reads_NHDK)
        d_columns = torch.zeros_like(self.qk_NHDK)  # the rows of its queries are not used
        d_columns[:, :, CHUNK:] = gradients.d_writes_NHCK * self.until_end_NHCK
        d_since_start = (self.qk_NHDK * d_rows).unflatten(2, (2, CHUNK)).sum(2)
        d_since_start[:, :, -1] += gradients.d_forget.squeeze(-1)
        d_until_end = k * d_columns[:, :, CHUNK:]
        d_pairs = gradients.d_pairs_NHRDC.squeeze(2)
        for halves in reversed(self.levels):
            rows, columns = halves.decayed(self.qk_NHDK)
            d_run = halves.pairs(d_pairs).flatten(3, 4)
            d_row, d_column = d_run @ columns, d_run.mT @ rows
            halves.rows(d_rows).addcmul_(d_row.unflatten(3, (2, -1)), halves.from_middle_NHBsK.unsqueeze(3))
            halves.columns(d_columns).addcmul_(d_column, halves.to_middle_NHBsK)
            first, second, before = _halves_of(d_since_start, d_until_end, halves.size)
            first[..., -1, :] += second.sum(-2)
            second[..., -1, :] += before.sum(-2)
            second += (rows * d_row).unflatten(3, (2, -1)).sum(3)
            before += columns * d_column
        d_self = d_pairs[:, :, :CHUNK].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        d_rows[:, :, :CHUNK].addcmul_(d_self, k)
        d_rows[:, :, CHUNK:].addcmul_(d_self, q).add_(d_columns[:, :, CHUNK:])
        return d_rows, d_since_start.unsqueeze(2)


rule_forward, rule_backward = define("chunk_kda", DecayPerChannel)
