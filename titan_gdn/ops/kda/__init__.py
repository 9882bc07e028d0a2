"""Kimi Delta Attention: one function, two backends."""

from typing import Any

from torch import Tensor

from titan_gdn.ops.arguments import refuse
from titan_gdn.ops.backends import Backend
from titan_gdn.ops.delta_rule import NOT_TAKEN, gate, run
from titan_gdn.ops.gates import kda_gate
from titan_gdn.ops.kda.fla_backend import fla_rule_forward
from titan_gdn.ops.kda.torch_backend import rule_forward

KDA_NOT_TAKEN = NOT_TAKEN | {
    "disable_recompute": "the backward recomputes what it needs",
    "return_intermediate_states": "it serves inference, and the operators train",
    "use_graph": "the offsets are needed on the host",
    "max_num_seqs": "it belongs to use_graph",
}
"""The arguments of FLA's function that `chunk_kda` does not take, and what to do instead."""


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
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    backend: Backend = "auto",
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule with a decay per key channel over a sequence.

    Kimi Linear (arXiv 2510.26692), equation 1. Names, shapes and dtypes are those of `fla.ops.kda.chunk_kda`
    (FLA 0.6), so that either function replaces the other, except that `backend` is ours, arguments after
    `use_qk_l2norm_in_kernel` are keywords, the gate needs `A_log` even with a `lower_bound`, and FLA's
    `cp_context`, `chunk_size`, `transpose_state_layout`, `disable_recompute`, `return_intermediate_states`,
    `use_graph` and `max_num_seqs` are not taken.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, cu_seqlens_cpu, backend:
            see `titan_gdn.ops.chunk_gated_delta_rule`.
        g: `[B, T, HV, K]` natural logarithm of the decay, at most 0, float32.
        use_gate_in_kernel: `g` is the argument `x` of `titan_gdn.ops.kda_gate`, which also takes `A_log`
            `[HV]`, `dt_bias` `[HV * K]` and `lower_bound`.
        safe_gate: the caller guarantees that `g` is at least -5, for which FLA has faster kernels. The
            "torch" backend ignores it and is exact for any `g`.

    Returns:
        The output and the final states, see `titan_gdn.ops.chunk_gated_delta_rule`.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit, the backend is unknown, or FLA's kernels cannot
            run on the device or with these keys.
        TypeError: the argument is not taken.
    """
    refuse("chunk_kda", others, KDA_NOT_TAKEN)
    g = gate(kda_gate, g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    return run(
        rule_forward,
        fla_rule_forward,
        q,
        k,
        v,
        g,
        beta,
        safe_gate,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        l2norm=use_qk_l2norm_in_kernel,
        beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        backend=backend,
        per_channel=True,
    )
