"""Kimi Delta Attention with the kernels of `fla.ops.kda`."""

from typing import Any

from torch import Tensor

from titan_gdn.ops.fla_operator import define


def _forward(**arguments: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the output, the final state, the scores inside chunks and `(I + A)^-1`."""
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd

    out, final_state, _, scores, inverse, *_ = chunk_kda_fwd(**arguments)
    return out, final_state, scores, inverse


def _backward(scores: Tensor, inverse: Tensor, **arguments: Any) -> tuple[Tensor | None, ...]:
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd

    return chunk_kda_bwd(Aqk=scores, Akk=inverse, **arguments)


fla_rule_forward, fla_rule_backward = define(
    "fla_chunk_kda", _forward, _backward, kept=2, flags=("safe_gate",)
)
