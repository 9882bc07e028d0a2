"""The gated delta rule with the kernels of `fla.ops.gated_delta_rule.chunk`."""

from typing import Any

from torch import Tensor

from titan_gdn.ops.fla_operator import define


def _forward(**arguments: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the output, the final state and `(I + A)^-1`."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    _, out, inverse, final_state, *_ = chunk_gated_delta_rule_fwd(**arguments)
    return out, final_state, inverse


def _backward(inverse: Tensor, **arguments: Any) -> tuple[Tensor | None, ...]:
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    return chunk_gated_delta_rule_bwd(A=inverse, **arguments)


fla_rule_forward, fla_rule_backward = define("fla_chunk_gated_delta_rule", _forward, _backward, kept=1)
