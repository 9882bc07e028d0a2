"""Hand on the recurrent state: tokens stay where they are, and no more than states crosses.

A segment maps the state that it receives affinely, `S_out = M S_in + b` (DESIGN of the delta rule in chunks:
arXiv 2412.06464, section 3.3), where `b` is its final state from none and `M` the product of its tokens'
transitions, the final state of values 0 from the identity. So ranks gather `[b | M]` of all segments, each
folds those before its own, and runs the rule from what it finds. The backward is the same from the other
end, with `M` transposed.

Shape suffixes beside those of `titan_gdn.parallel.exchange`: S segments of this rank, P of a row over all
ranks, N value heads of this TP rank, K and V head widths, l tokens of a segment, h tokens that the
convolution looks back.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_gdn.parallel.collectives import ALL_GATHER, gather_sequence
from titan_gdn.parallel.in_place import InPlace
from titan_gdn.parallel.sequence import Segments, SequenceLayout

if TYPE_CHECKING:
    from titan_gdn.parallel.exchange import Convolution, Rule


class StatePassing(InPlace):
    """Every rank runs its own tokens, all head groups: heads need divide by TP only, and any CP will do.

    Args:
        mesh: the CP sub-mesh.
        tp_mesh: the TP sub-mesh under sequence parallelism, over which hidden states are gathered.
        regather: gather the transitions `M` again in the backward instead of keeping those of all segments,
            `(P - 2) * B * N * K * K` float32 numbers a layer.
    """

    saved = (ALL_GATHER,)  # of the halo and of `[b | M]`

    def __init__(self, mesh: DeviceMesh, tp_mesh: DeviceMesh | None, regather: bool) -> None:
        super().__init__(tp_mesh)
        self.mesh = mesh
        self.regather = regather

    def convolve(self, convolution: "Convolution", x: Tensor, reach: int, sequence: SequenceLayout) -> Tensor:
        """One collective: the last `reach` tokens of every segment go before the one that follows it."""
        segments, width = sequence.segments, x.shape[-1]
        x_SlW = x.reshape(segments.first.shape[0], -1, width)
        length = x_SlW.shape[1]
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
        """What the segments before had last, 0 where that is another document."""
        reach = tails_ShW.shape[1]
        tails = gather_sequence(tails_ShW.flatten(0, 1).unsqueeze(0), self.mesh)
        tails = tails.view(-1, reach, tails_ShW.shape[2])
        batch = segments.gathered.shape[1]
        before = segments.gathered.flatten()[(segments.own - batch).clamp_min(0)]
        seen_Sh = torch.arange(reach, device=tails.device) >= reach - segments.history[:, None]
        return torch.where(seen_Sh.unsqueeze(-1), tails.index_select(0, before), 0)

    def recur(
        self, rule: "Rule", q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, sequence: SequenceLayout
    ) -> Tensor:
        """One collective each way: run the rule from the states that the segments before hand on."""
        segments = sequence.segments
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

    def _received(self, rule: "Rule", inputs: tuple[Tensor, ...], segments: Segments) -> Tensor:
        """The state that each own segment receives, `[S, N, K, V]`, float32.

        Of a segment the last fragment alone decides what it hands on. Its `[b | M]` is one run of the rule
        over values `[v | 0]` from the states `[0 | I]`, or `[0 | 0]` where a document begins in the segment.
        """
        k, v, g, beta = (x.index_select(1, segments.last_rows) for x in inputs)
        K, V = k.shape[-1], v.shape[-1]
        inner = segments.goes_on.shape[0] > 2  # else no segment receives a state and hands one on
        transitions = None
        if inner:
            v = torch.cat([v, v.new_zeros(*v.shape[:-1], K)], -1)
            through_S = segments.through.flatten()[segments.own]
            one = torch.eye(K, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
            one = torch.where(through_S.view(-1, 1, 1, 1), one, 0).expand(-1, v.shape[2], -1, -1)
            transitions = torch.nn.functional.pad(one, (V, 0))
        _, summary_SNKW = rule(
            k.detach(),  # no output is asked for
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


class _Link(torch.autograd.Function):
    """From the segments' `[b | M]` `[S, N, K, V + K]` to the states that they receive `[S, N, K, V]`.

    The forward folds what all segments hand on from the first to the last, the backward its gradient from
    the last to the first. Numbers of other documents are left out by selection, not by a product with 0,
    which would let one that is not finite through.
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
    """`x` `[n, N, K, V]` where it is chosen `[n]`, else 0."""
    return torch.where(chosen.view(-1, 1, 1, 1), x, 0)
