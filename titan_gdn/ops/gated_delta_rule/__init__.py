"""The gated delta rule: one function, two backends."""

from typing import Any

from torch import Tensor

from titan_gdn.ops.arguments import refuse
from titan_gdn.ops.backends import Backend
from titan_gdn.ops.delta_rule import NOT_TAKEN, gate, run
from titan_gdn.ops.gated_delta_rule.fla_backend import fla_rule_forward
from titan_gdn.ops.gated_delta_rule.torch_backend import rule_forward
from titan_gdn.ops.gates import gdn_gate

GDN_NOT_TAKEN = NOT_TAKEN | {
    "chunk_indices": "the operator computes them from cu_seqlens",
    "head_first": "tensors are [B, T, H, ...]",
}
"""The arguments of FLA's function that `chunk_gated_delta_rule` does not take, and what to do instead."""


def chunk_gated_delta_rule(
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
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    backend: Backend = "auto",
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule over a sequence.

    Gated Delta Networks (arXiv 2412.06464), equation 10. Names, shapes and dtypes are those of
    `fla.ops.gated_delta_rule.chunk_gated_delta_rule` (FLA 0.6), so that either function replaces the other,
    except that `backend` is ours, arguments after `use_qk_l2norm_in_kernel` are keywords, and FLA's
    `cp_context`, `chunk_size`, `chunk_indices`, `head_first` and `transpose_state_layout` are not taken.

    Args:
        q: `[B, T, H, K]` queries; `K` is at most 256 in the "fla" backend.
        k: `[B, T, H, K]` keys, of norm 1 or normalized by `use_qk_l2norm_in_kernel`.
        v: `[B, T, HV, V]` values. `HV` is a multiple of `H`; key head `h` belongs to the value heads from
            `h*HV/H` to `(h+1)*HV/H - 1`. `q`, `k` and `v` have one dtype, the others any.
        g: `[B, T, HV]` natural logarithm of the decay, at most 0, float32.
        beta: `[B, T, HV]` strength of the write, in (0, 1).
        scale: factor of the queries, `K ** -0.5` by default.
        initial_state: `[N, HV, K, V]` one state per document, zeros by default.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: normalize `q` and `k` to norm 1 (with 1e-6 added to the sum of squares).
        use_beta_sigmoid_in_kernel: take the sigmoid of `beta`.
        allow_neg_eigval: take twice the sigmoid; needs `use_beta_sigmoid_in_kernel`.
        state_v_first: states are `[N, HV, V, K]`.
        use_gate_in_kernel: `g` is the argument `x` of `titan_gdn.ops.gdn_gate`, which also takes `A_log`
            `[HV]` and `dt_bias` `[HV]`.
        cu_seqlens: `[N + 1]` int32 or int64 offsets of packed documents, on the device of `q`; requires
            `B = 1`. None makes every row one document.
        cu_seqlens_cpu: the same on the CPU, which saves a copy to the host.
        backend: "fla" (Triton, GPU), "torch" (any device), or "auto": "fla" for tensors on a GPU if its
            kernels take them. Empty tensors (`B = 0` or `T = 0`) never reach FLA's kernels.

    Returns:
        `[B, T, HV, V]` output in the dtype of `q`, and `[N, HV, K, V]` float32 states or None. The
        "torch" backend computes in float32, or in float64 for float64 inputs.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit, the backend is unknown, or FLA's kernels cannot
            run on the device or with these keys.
        TypeError: the argument is not taken.
    """
    refuse("chunk_gated_delta_rule", others, GDN_NOT_TAKEN)
    g = gate(gdn_gate, g, use_gate_in_kernel, A_log, dt_bias)
    return run(
        rule_forward,
        fla_rule_forward,
        q,
        k,
        v,
        g,
        beta,
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
        per_channel=False,
    )
