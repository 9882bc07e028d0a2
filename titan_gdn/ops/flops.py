"""FLOPs of the operators' matrix products, registered with torch's FLOP counter.

`FlopCounterMode` does not see inside a custom operator. Without these formulas the compiler's memory budget,
which recomputes the cheapest operators first, would consider the rules free. Only matrix products count, as
in torch's own formulas.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

import titan_gdn.ops.gated_delta_rule
import titan_gdn.ops.kda  # noqa: F401  (the import registers the operators)
from titan_gdn.ops.chunk_plan import CHUNK


def chunked_rule_flops(
    tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, per_channel: bool = False
) -> tuple[int, int]:
    """Count the FLOPs of a chunked rule, forward and backward, if all chunks are full.

    With a decay per channel, each value head has keys of its own, and only the pairs below the diagonal are
    computed (by halving, see `titan_gdn.ops.kda.torch_backend`).
    """
    if per_channel:
        key_heads, pairs = value_heads, (CHUNK - 1) * key_dim
    else:
        pairs = 2 * CHUNK * key_dim
    pairs *= key_heads  # q k^T or k k^T, or a product with their gradients
    state = 2 * key_dim * value_dim  # a token reads from or writes to a state
    rows = 2 * CHUNK * value_dim  # a token's row of a chunk's matrix times the chunk's values
    forward = 2 * pairs + value_heads * (3 * state + 2 * rows + CHUNK**2)
    again = 2 * pairs + value_heads * (2 * state + rows + CHUNK**2)
    backward = again + 4 * pairs + value_heads * (6 * state + 4 * rows)
    return tokens * forward, tokens * backward


def _flops(q: torch.Size, v: torch.Size, g: torch.Size) -> tuple[int, int]:
    return chunked_rule_flops(q[0] * q[1], q[2], v[2], q[3], v[3], per_channel=len(g) == 4)


_FORWARD = [
    getattr(torch.ops.titan_gdn, prefix + rule)
    for prefix in ("", "fla_")
    for rule in ("chunk_gated_delta_rule", "chunk_kda")
]
_BACKWARD = [getattr(torch.ops.titan_gdn, f"{operator.__name__}_backward") for operator in _FORWARD]


@register_flop_formula(_FORWARD)
def _(q, k, v, g, *args, **kwargs) -> int:  # noqa: ANN001, ANN002, ANN003
    return _flops(q, v, g)[0]


@register_flop_formula(_BACKWARD)
def _(q, k, v, g, *args, **kwargs) -> int:  # noqa: ANN001, ANN002, ANN003
    return _flops(q, v, g)[1]
