"""The chunked rules as layers declare them: the function, its counterpart in FLA, and what it costs."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.library import CustomOpDef

from titan_gdn.ops.flops import chunked_rule_flops
from titan_gdn.ops.gated_delta_rule import chunk_gated_delta_rule
from titan_gdn.ops.gated_delta_rule import fla_rule_forward as fla_gated_delta_rule
from titan_gdn.ops.kda import chunk_kda
from titan_gdn.ops.kda import fla_rule_forward as fla_kda

Flops = Callable[[int, int, int, int, int], tuple[int, int]]
"""From tokens, key heads, value heads, `K` and `V` to the FLOPs of a forward and of a backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FLAOperator:
    """A rule's operator of flash-linear-attention's kernels.

    Attributes:
        forward: the operator, as `titan_gdn.ops.fla_operator.define` returns it.
        flags: its boolean arguments beyond those that all rules share, as memory is planned with them.
        kept: how many tensors `[B, T, HV, FLA_CHUNK]` it keeps for the backward.
    """

    forward: CustomOpDef
    flags: tuple[bool, ...] = ()
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A recurrence over tokens that is affine in its `[K, V]` state.

    Attributes:
        run: a function with the signature of `titan_gdn.ops.chunk_gated_delta_rule`.
        per_channel: the decay is `[B, T, HV, K]`, one number per key channel, not `[B, T, HV]`.
        flops: the matrix FLOPs of `run`.
        fla: the operator that `run` calls with FLA's kernels; None if it runs PyTorch everywhere.
    """

    run: Callable[..., tuple[Tensor, Tensor | None]]
    per_channel: bool
    flops: Flops
    fla: FLAOperator | None = None


def _flops_per_head(tokens: int, key_heads: int, value_heads: int, K: int, V: int) -> tuple[int, int]:
    return chunked_rule_flops(tokens, key_heads, value_heads, K, V, per_channel=False)


def _flops_per_channel(tokens: int, key_heads: int, value_heads: int, K: int, V: int) -> tuple[int, int]:
    return chunked_rule_flops(tokens, key_heads, value_heads, K, V, per_channel=True)


GATED_DELTA_RULE = Rule(
    run=chunk_gated_delta_rule,
    per_channel=False,
    flops=_flops_per_head,
    fla=FLAOperator(forward=fla_gated_delta_rule, kept=1),
)
KIMI_DELTA_RULE = Rule(
    run=chunk_kda,
    per_channel=True,
    flops=_flops_per_channel,
    fla=FLAOperator(forward=fla_kda, flags=(False,), kept=2),
)
