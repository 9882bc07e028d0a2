"""Kimi Delta Attention: one function, two backends."""

from torch import Tensor

from titan_gdn.ops.backends import Backend
from titan_gdn.ops.delta_rule import run
from titan_gdn.ops.kda.fla_backend import fla_rule_forward
from titan_gdn.ops.kda.gate import kda_gate
from titan_gdn.ops.kda.torch_backend import rule_forward

__all__ = ["chunk_kda", "kda_gate"]


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    safe_gate: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule with a decay per key channel over a sequence.

    Kimi Linear (arXiv 2510.26692), equation 1. Names, shapes and dtypes are those of `fla.ops.kda.chunk_kda`,
    so that either function replaces the other.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
            cu_seqlens_cpu, backend: see `titan_gdn.ops.chunk_gated_delta_rule`.
        g: `[B, T, HV, K]` natural logarithm of the decay, at most 0, float32.
        safe_gate: the caller guarantees that `g` is at least -5, for which FLA has faster kernels. The
            "torch" backend ignores it and is exact for any `g`.

    Returns:
        The output and the final states, see `titan_gdn.ops.chunk_gated_delta_rule`.

    Raises:
        ValueError: the shapes do not fit, the backend is unknown, or FLA's kernels cannot run on the device.
    """
    return run(
        rule_forward, fla_rule_forward, q, k, v, g, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu, backend, safe_gate, per_channel=True,
    )  # fmt: skip
