"""Matrix FLOPs of the operators, registered with torch's flop counter.

A custom operator is a black box to `FlopCounterMode`, and so to what builds on it (the compiler's memory
budget, which recomputes first what costs least). Only matrix products count, as in torch's own formulas.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

import titan_gdn.ops.gated_delta_rule  # noqa: F401  (its operators are to exist)
from titan_gdn.ops.chunks import CHUNK


def chunked_rule_flops(
    tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[int, int]:
    """FLOPs of the chunked gated delta rule, forward and backward; full chunks are assumed."""
    pairs = 2 * CHUNK * key_dim  # q k^T or k k^T, and what has their gradients
    state = 2 * key_dim * value_dim  # a token's read from or write to a state
    rows = 2 * CHUNK * value_dim  # a token's row of a chunk's matrix times the chunk's values
    forward = key_heads * 2 * pairs + value_heads * (3 * state + 2 * rows + CHUNK**2)
    again = key_heads * 2 * pairs + value_heads * (2 * state + rows + CHUNK**2)
    backward = again + key_heads * 4 * pairs + value_heads * (6 * state + 4 * rows)
    return tokens * forward, tokens * backward


def _sizes(q: torch.Size, v: torch.Size) -> tuple[int, int, int, int, int]:
    return q[0] * q[1], q[2], v[2], q[3], v[3]


_ops = torch.ops.titan_gdn


@register_flop_formula([_ops.chunk_gated_delta_rule, _ops.fla_chunk_gated_delta_rule])
def _(q, k, v, *args, **kwargs) -> int:  # noqa: ANN001, ANN002, ANN003
    return chunked_rule_flops(*_sizes(q, v))[0]


@register_flop_formula([_ops.chunk_gated_delta_rule_backward, _ops.fla_chunk_gated_delta_rule_backward])
def _(q, k, v, *args, **kwargs) -> int:  # noqa: ANN001, ANN002, ANN003
    return chunked_rule_flops(*_sizes(q, v))[1]
