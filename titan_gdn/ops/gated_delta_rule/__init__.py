"""The gated delta rule: one function, two backends."""

from torch import Tensor

from titan_gdn.ops.backends import Backend
from titan_gdn.ops.delta_rule import run
from titan_gdn.ops.gated_delta_rule.fla_backend import fla_rule_forward
from titan_gdn.ops.gated_delta_rule.torch_backend import rule_forward


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
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule over a sequence.

    Gated Delta Networks (arXiv 2412.06464), equation 10. Names, shapes and dtypes are those of
    `fla.ops.gated_delta_rule.chunk_gated_delta_rule`, so that either function replaces the other.

    Args:
        q: `[B, T, H, K]` queries; `K` is at most 256 in the "fla" backend.
        k: `[B, T, H, K]` keys, of norm 1 or normalized by `use_qk_l2norm_in_kernel`.
        v: `[B, T, HV, V]` values. `HV` is a multiple of `H`; key head `h` belongs to the value heads from
            `h*HV/H` to `(h+1)*HV/H - 1`.
        g: `[B, T, HV]` natural logarithm of the decay, at most 0, float32.
        beta: `[B, T, HV]` strength of the write, in (0, 1).
        scale: factor of the queries, `K ** -0.5` by default.
        initial_state: `[N, HV, K, V]` one state per document, zeros by default.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: normalize `q` and `k` to norm 1 (with 1e-6 added to the sum of squares).
        cu_seqlens: `[N + 1]` offsets of packed documents; requires `B = 1`. None makes every row one
            document.
        cu_seqlens_cpu: the same on the CPU, which saves a copy to the host.
        backend: "fla" (Triton, GPU), "torch" (any device), or "auto": "fla" for tensors on a GPU.

    Returns:
        `[B, T, HV, V]` output in the dtype of `q`, and `[N, HV, K, V]` float32 states or None. The
        "torch" backend computes in float32, or in float64 for float64 inputs.

    Raises:
        ValueError: the shapes do not fit, the backend is unknown, or FLA's kernels cannot run on the device.
    """
    return run(
        rule_forward, fla_rule_forward, q, k, v, g, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu, backend, per_channel=False,
    )  # fmt: skip
