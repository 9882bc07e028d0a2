"""The gated delta rule in PyTorch, chunk by chunk, on any device.

Gated Delta Networks (arXiv 2412.06464), section 3.3, for each value head and chunk, with `Gc` the cumulative
sum of the log decay inside the chunk and `S` the state that the chunk receives:

    A_ij = beta_i (k_i . k_j) exp(Gc_i - Gc_j)   for j < i          P_ij = scale (q_i . k_j) exp(Gc_i - Gc_j)
    u    = (I + A)^-1 beta (v - exp(Gc) k S)                        o    = scale exp(Gc) q S + P u
    S    <- exp(Gc_C) S + k^T (exp(Gc_C - Gc) u)

The decays multiply the values, so the `R` value heads of a key head share its `q` and `k`. The products of
keys with `R` states are one product with `R * V` columns, and no key is repeated.

Shape suffixes as in `titan_gdn.ops.chunked_rule`.
"""

import torch
from torch import Tensor

from titan_gdn.ops.chunk_plan import CHUNK
from titan_gdn.ops.chunked_operator import define
from titan_gdn.ops.chunked_rule import ChunkGradients, Chunks, per_value_head

STRONGEST = -1e4
"""The lower bound that log decays are clamped to."""


class DecayPerHead:
    """A decay per value head (a `titan_gdn.ops.chunked_operator.Decay`)."""

    shares_keys = True

    def __init__(
        self, qk_NHDK: Tensor, v_NHRCV: Tensor, g_NHRC: Tensor, beta_NHRC: Tensor, scale: float
    ) -> None:
        self.qk_NHDK = qk_NHDK
        k_NHCK = qk_NHDK[:, :, CHUNK:]
        # Any stronger decay is 0 in every dtype, and differences of infinite sums would be NaN.
        g_NHRC = g_NHRC.clamp_min(STRONGEST)
        # The sums of a chunk may be large and their differences small: float64 until those are taken.
        sum_NHRC = g_NHRC.cumsum(-1, dtype=torch.float64)
        # Mask before exp: above the diagonal the exponents are positive and may overflow.
        decay = (sum_NHRC.unsqueeze(-1) - sum_NHRC.unsqueeze(-2)).tril_().to(g_NHRC.dtype).exp_().tril_()
        self.decay_NHR1CC = decay.unsqueeze(3)
        self.until_end_NHRC1 = (sum_NHRC[..., -1:] - sum_NHRC).exp().to(g_NHRC.dtype).unsqueeze(-1)
        pairs_NHRDC = self._decay_pairs((qk_NHDK @ k_NHCK.mT).unsqueeze(2))
        since_start_NHRC1 = sum_NHRC.exp().to(g_NHRC.dtype).unsqueeze(-1)
        self.chunks = Chunks.of_pairs(
            pairs_NHRDC,
            v_NHRCV,
            beta_NHRC,
            scale,
            reads_NHDK=qk_NHDK,
            read_NHRD1=since_start_NHRC1.repeat(1, 1, 1, 2, 1),
            writes_NHCK=k_NHCK,
            write_NHRC1=self.until_end_NHRC1,
            forget=since_start_NHRC1[..., -1:, :].transpose(2, 3),
        )

    def _decay_pairs(self, pairs_NHRDC: Tensor) -> Tensor:
        """Multiply the rows of the queries and those of the keys by the same decay."""
        return (pairs_NHRDC.unflatten(3, (2, CHUNK)) * self.decay_NHR1CC).flatten(3, 4)

    def backward(self, gradients: ChunkGradients) -> tuple[Tensor, Tensor]:
        """Compute the gradients of `qk` and `g`."""
        qk, k = self.qk_NHDK, self.qk_NHDK[:, :, CHUNK:]
        d_products = self._decay_pairs(gradients.d_pairs_NHRDC).sum(2)
        d_qk = gradients.d_reads_NHDK
        d_qk.flatten(0, 1).baddbmm_(d_products.flatten(0, 1), k.flatten(0, 1))
        dk = gradients.d_writes_NHCK
        dk.flatten(0, 1).baddbmm_(d_products.flatten(0, 1).mT, qk.flatten(0, 1))
        d_qk[:, :, CHUNK:] += dk
        return d_qk, self._d_decay(gradients)

    def _d_decay(self, gradients: ChunkGradients) -> Tensor:
        """Compute the gradient of `g` from the gradients of the exponents, each a decay times its gradient.

        Each pair adds to one cumulative sum and subtracts from another, and the gradient of `g` is a sum of
        these sums. float64 keeps the cancellation exact enough.
        """
        u, R = gradients.u_NHRCV, gradients.u_NHRCV.shape[2]
        of_o, of_u = (gradients.d_pairs_NHRDC * self.chunks.pairs_NHRDC).split(CHUNK, 3)
        pairs_NHRCC = of_o.double() + of_u
        reads_NHRD = (per_value_head(gradients.d_read_NHDW, R) * gradients.recalled_NHRDV).sum(-1)
        keeps_NHRC1 = (per_value_head(gradients.d_kept_NHCW, R) * u).sum(-1, keepdim=True).double()
        keeps_NHRC = (keeps_NHRC1 * self.until_end_NHRC1).squeeze(-1)
        d_sum_NHRC = pairs_NHRCC.sum(-1) - pairs_NHRCC.sum(-2) - keeps_NHRC
        d_sum_NHRC += reads_NHRD.unflatten(-1, (2, CHUNK)).sum(-2)
        d_sum_NHRC[..., -1] += keeps_NHRC.sum(-1) + gradients.d_forget.sum(2)
        return d_sum_NHRC.flip(-1).cumsum(-1).flip(-1)


rule_forward, rule_backward = define("chunk_gated_delta_rule", DecayPerHead)
