"""`exchange = "state"`: tokens stay on their rank, and ranks pass the recurrent state on.

A segment maps the state that it receives affinely, `S_out = M S_in + b` (the delta rule in chunks, arXiv
2412.06464, section 3.3). `b` is the segment's final state if it starts from zero, and `M` is the product of
its tokens' transitions, which is the final state of values 0 if it starts from the identity. So ranks gather
`[b | M]` of all segments, each combines those before its own, and runs the rule from the state that results.
The backward does the same from the other end, with `M` transposed.

Shape suffixes in addition to those of `titan_gdn.parallel.exchange.base`: S segments of this rank, P segments
of a row over all ranks, N value heads of this TP rank, l tokens of a segment, h tokens that the convolution
looks back.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_gdn.ops.fla_documents import FLA_CHUNK
from titan_gdn.parallel.collectives import ALL_GATHER, gather_sequence
from titan_gdn.parallel.exchange.base import Convolution, Rule
from titan_gdn.parallel.exchange.local import LocalTokens
from titan_gdn.parallel.segments import Segments
from titan_gdn.parallel.sequence import SequenceLayout
from titan_gdn.parallel.traffic import (
    LayerShape,
    PassCost,
    ShardedBatch,
    Traffic,
    heads_over_tp,
    over_tp,
)

FLOAT32 = 4
"""Bytes of an element of states and transitions, whatever the dtype of activations."""


class StatePassing(LocalTokens):
    """Each rank runs all heads of its TP rank over its own tokens. TP must divide the heads; any CP works.

    With `regather` the backward gathers the transitions `M` again instead of keeping those of all segments,
    which are `(P - 2) * B * N * K * K` float32 numbers per layer.
    """

    name = "state"
    saved = (ALL_GATHER,)  # of the tokens before each segment, and of `[b | M]`

    def convolve(self, convolution: Convolution, x: Tensor, reach: int, sequence: SequenceLayout) -> Tensor:
        """One all-gather: each segment is preceded by the last `reach` tokens of the segment before it."""
        segments, width = sequence.segments, x.shape[-1]
        assert segments is not None, "the layout was built without CP"
        x_SlW = x.reshape(segments.first.shape[0], -1, width)
        length = x_SlW.shape[1]
        if reason := _too_short(length, segments.goes_on.shape[0], reach):
            raise ValueError(f'exchange = "state": {reason}')
        if reach:
            x_SlW = torch.cat([self._before(x_SlW[:, length - reach :], segments), x_SlW], 1)

        def moved(cu_seqlens: Tensor) -> Tensor:
            return cu_seqlens + reach * -(-cu_seqlens // length)

        out = convolution(
            x_SlW.view(1, -1, width),
            cu_seqlens=moved(segments.cu_seqlens),
            cu_seqlens_cpu=moved(segments.cu_seqlens_cpu),
        )
        return out.view(x_SlW.shape)[:, reach:].reshape(x.shape)

    def _before(self, tails_ShW: Tensor, segments: Segments) -> Tensor:
        """The last tokens of the segments before, `[S, h, W]`, 0 where they belong to another document."""
        reach = tails_ShW.shape[1]
        tails = gather_sequence(tails_ShW.flatten(0, 1).unsqueeze(0), self.mesh)
        tails = tails.view(-1, reach, tails_ShW.shape[2])
        batch = segments.gathered.shape[1]
        before = segments.gathered.flatten()[(segments.own - batch).clamp_min(0)]
        seen_Sh = torch.arange(reach, device=tails.device) >= reach - segments.history[:, None]
        return torch.where(seen_Sh.unsqueeze(-1), tails.index_select(0, before), 0)

    def recur(
        self, rule: Rule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence: SequenceLayout
    ) -> Tensor:
        """One all-gather in each direction: the rule starts from the states that earlier segments pass on."""
        segments = sequence.segments
        assert segments is not None, "the layout was built without CP"
        received_SNKV = self._received(rule, (k, v, g, beta), segments)
        states = received_SNKV.new_zeros(segments.cu_seqlens.shape[0] - 1, *received_SNKV.shape[1:])
        out, _ = rule(
            q,
            k,
            v,
            g,
            beta,
            initial_state=states.index_copy(0, segments.first, received_SNKV),
            cu_seqlens=segments.cu_seqlens,
            cu_seqlens_cpu=segments.cu_seqlens_cpu,
        )
        return out

    def _received(self, rule: Rule, inputs: tuple[Tensor, ...], segments: Segments) -> Tensor:
        """The state that each own segment receives, `[S, N, K, V]`, float32.

        Only the last fragment of a segment determines the state that the segment passes on. Its `[b | M]` is
        one run of the rule over values `[v | 0]` from the states `[0 | I]`, or from `[0 | 0]` if a document
        begins in the segment.
        """
        k, v, g, beta = (x.index_select(1, segments.last_rows) for x in inputs)
        K, V = k.shape[-1], v.shape[-1]
        inner = segments.goes_on.shape[0] > 2  # else no segment both receives a state and passes one on
        transitions = None
        if inner:
            v = torch.cat([v, v.new_zeros(*v.shape[:-1], K)], -1)
            through_S = segments.through.flatten()[segments.own]
            one = torch.eye(K, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
            one = torch.where(through_S.view(-1, 1, 1, 1), one, 0).expand(-1, v.shape[2], -1, -1)
            transitions = torch.nn.functional.pad(one, (V, 0))
        _, summary_SNKW = rule(
            k.detach(),  # in place of q: the output is not used
            k,
            v,
            g,
            beta,
            initial_state=transitions,
            output_final_state=True,
            cu_seqlens=segments.last_cu_seqlens,
            cu_seqlens_cpu=segments.last_cu_seqlens_cpu,
        )
        indices = (segments.gathered, segments.goes_on, segments.through, segments.own)
        return _Link.apply(summary_SNKW, V, self.mesh, inner and self.regather, *indices)

    @staticmethod
    def impossible(shape: LayerShape, batch: ShardedBatch) -> str | None:
        """Whether TP divides the key heads and a segment is as long as the convolution looks back."""
        if reason := heads_over_tp(shape, batch):
            return reason
        parts = batch.cp * batch.segments
        return _too_short(batch.length // parts, parts, shape.kernel_size - 1)

    @staticmethod
    def traffic(shape: LayerShape, batch: ShardedBatch) -> Traffic:
        """The last tokens and `[b | M]` of all segments, and a second pass of the rule that computes them."""
        own, cp, tp = batch.tokens_of_cp_rank, batch.cp, batch.tp
        heads, K, V = shape.value_heads // tp, shape.key_dim, shape.value_dim
        # Of two segments, the first receives no state and the second passes none on: no transition is needed.
        transition = 0 if cp * batch.segments == 2 else K
        states = batch.segments * batch.rows * heads  # of this rank
        halo_rows = batch.segments * batch.rows * (shape.kernel_size - 1)
        halo = PassCost()
        if halo_rows:
            halo = PassCost(batch.itemsize * halo_rows * (shape.channels // tp) * (cp - 1), cp_messages=1)
        summary = PassCost(FLOAT32 * states * K * (V + transition) * (cp - 1), cp_messages=1)
        gradient = PassCost(
            FLOAT32 * states * K * (V + (transition if batch.regather else 0)) * (cp - 1), cp_messages=1
        )
        # The second pass covers the last fragment of each segment: with one document per row, all tokens.
        again = shape.rule.flops(own, shape.key_heads // tp, heads, K, V + transition)
        # Each rank applies the transitions of all segments except the first and the last. In the backward it
        # also computes the gradients of its own transitions.
        inner = (cp * batch.segments - 2) * batch.rows * heads
        product = 2 * K * transition * V
        tp_cost = over_tp(shape, batch, own)
        # The second pass runs on copies of its tokens, because it selects the last fragments.
        copies = batch.itemsize * own * ((shape.key_heads // tp) * K + heads * (V + transition))
        copies += FLOAT32 * own * heads * ((K if shape.rule.per_channel else 1) + 1)
        # What the second pass returns: outputs that are not used, and what FLA's kernels keep of each chunk.
        outputs = batch.itemsize * own * heads * (V + transition)
        fla = shape.rule.fla if shape.fla else None
        rows = 0 if fla is None else batch.itemsize * own * heads * FLA_CHUNK * fla.kept
        gathered = FLOAT32 * cp * states * K * (V + transition)
        kept_transitions = (states if batch.regather else inner) * K * transition
        return Traffic(
            halo + summary + tp_cost + PassCost(flops=again[0] + inner * product),
            halo + gradient + tp_cost + PassCost(flops=again[1] + (inner + states) * product),
            transient=gathered + copies + outputs,
            kept=copies + rows + FLOAT32 * (states * K * V + kept_transitions),
            collected=gathered + batch.itemsize * cp * halo_rows * (shape.channels // tp),
            computed=outputs + rows,
        )


def _too_short(segment: int, parts: int, reach: int) -> str | None:
    """Why segments of so many tokens, so many in a row, are too short. None if they are not."""
    if segment >= reach:
        return None
    return (
        f"segments of {segment} tokens (training.seq_len = {segment * parts} over {parts}) are shorter than "
        f"the {reach} tokens that the convolution of {reach + 1} needs of the segment before"
    )


class _Link(torch.autograd.Function):
    """Maps the segments' `[b | M]` `[S, N, K, V + K]` to the states that they receive `[S, N, K, V]`.

    The forward accumulates the states from the first segment to the last, the backward their gradients from
    the last to the first. States of other documents are masked by selection rather than by a product with 0,
    which would pass on a number that is not finite.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        summary: Tensor,
        width: int,
        mesh: DeviceMesh,
        regather: bool,
        gathered: Tensor,
        goes_on: Tensor,
        through: Tensor,
        own: Tensor,
    ) -> Tensor:
        b, M = _gather(summary, mesh)[gathered].tensor_split([width], -1)
        states = [torch.zeros_like(b[0])]
        for p in range(len(b) - 1):
            out = b[p] if p == 0 else b[p] + _where(through[p], M[p] @ states[p])
            states.append(_where(goes_on[p + 1], out))
        received = torch.stack(states).flatten(0, 1)[own]
        ctx.mesh, ctx.regather, ctx.inner = mesh, regather, M.shape[-1] > 0
        kept = summary[..., width:] if regather else M[1:-1]
        ctx.save_for_backward(kept.contiguous(), received, gathered, goes_on, through, own)
        return received

    @staticmethod
    def backward(ctx: Any, d_received: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        M, received, gathered, goes_on, through, own = ctx.saved_tensors
        if ctx.regather:
            d_received = torch.cat([d_received, M], -1)
        d_states, M_again = _gather(d_received, ctx.mesh)[gathered].tensor_split([received.shape[-1]], -1)
        M = M_again[1:-1] if ctx.regather else M
        d_out, d_outs = torch.zeros_like(d_states[0]), []
        for p in reversed(range(len(d_states))):
            d_outs.append(d_out)
            d_in = d_states[p]
            if 0 < p < len(d_states) - 1:
                d_in = d_in + _where(through[p], M[p - 1].mT @ d_out)
            d_out = _where(goes_on[p], d_in)
        d_summary = torch.stack(d_outs[::-1]).flatten(0, 1)[own]
        if ctx.inner:
            d_M = _where(through.flatten()[own], d_summary @ received.mT)
            d_summary = torch.cat([d_summary, d_M], -1)
        return d_summary, *[None] * 7


def _gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return wait_tensor(all_gather_single(x.contiguous(), 0, mesh))


def _where(chosen: Tensor, x: Tensor) -> Tensor:
    """`x` `[n, N, K, V]` where `chosen` `[n]` is True, else 0."""
    return torch.where(chosen.view(-1, 1, 1, 1), x, 0)
