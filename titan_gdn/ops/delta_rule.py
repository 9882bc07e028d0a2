"""Checks the arguments of the delta rules and runs the operator of the chosen backend."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from titan_gdn.ops.arguments import check_tensors, dtype_of
from titan_gdn.ops.backends import Backend, resolve
from titan_gdn.ops.documents import check_offsets

MAX_FLA_KEY_DIM = 256
"""The largest key dimension of FLA's kernels."""

NOT_TAKEN = {
    "cp_context": "titan_gdn.parallel.exchange runs a rule over the ranks of context parallelism",
    "chunk_size": "the chunks of both backends have 64 tokens",
    "transpose_state_layout": "FLA has renamed it to state_v_first",
}
"""The arguments of FLA's functions that neither rule takes, and what to do instead."""


def too_wide(key_dim: int) -> str | None:
    """Return a sentence that says why FLA's kernels do not take keys of this width, or None if they do."""
    if key_dim <= MAX_FLA_KEY_DIM:
        return None
    return f"FLA's kernels support a key dimension of at most {MAX_FLA_KEY_DIM}, not {key_dim}."


def run(
    torch_rule: CustomOpDef,
    fla_rule: CustomOpDef,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *fla_flags: bool,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    backend: Backend,
    per_channel: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, fill in defaults, and run the operator of the backend.

    Args:
        torch_rule: the forward operator from `titan_gdn.ops.chunked_operator.define`.
        fla_rule: the forward operator from `titan_gdn.ops.fla_operator.define`.
        fla_flags: the flags of `fla_rule`.
        l2norm, beta_sigmoid: the arguments `use_qk_l2norm_in_kernel` and `use_beta_sigmoid_in_kernel`.
        per_channel: whether `g` is `[B, T, HV, K]` instead of `[B, T, HV]`.
        q, k, v, g, beta, scale, initial_state, output_final_state, allow_neg_eigval, state_v_first,
            cu_seqlens, cu_seqlens_cpu, backend: see `titan_gdn.ops.chunk_gated_delta_rule`, also for the
            results and the errors.
    """
    _check(q, k, v, g, beta, initial_state, per_channel)
    cu_seqlens_cpu = check_offsets(q, cu_seqlens, cu_seqlens_cpu)
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    initial_state = _key_first(q, v, initial_state, documents, state_v_first)
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError("allow_neg_eigval = True needs use_beta_sigmoid_in_kernel = True")
    if beta_sigmoid:
        beta = beta.to(torch.promote_types(beta.dtype, torch.float32)).sigmoid()
        beta = 2 * beta if allow_neg_eigval else beta
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernels = resolve(backend, q.device, too_wide(q.shape[-1]))
    if kernels == "torch" or q.shape[0] * q.shape[1] == 0:  # Triton launches no empty grid
        out, final_state, _ = torch_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens_cpu, l2norm)
    else:
        out, final_state, *_ = fla_rule(
            q, k, v, g, beta, scale, initial_state, cu_seqlens, cu_seqlens_cpu, l2norm, *fla_flags
        )
    if not output_final_state:
        return out, None
    return out, final_state.mT.contiguous() if state_v_first else final_state


def gate(
    function: Callable[..., Tensor], g: Tensor, use_gate_in_kernel: bool, A_log: Tensor | None, *others: Any
) -> Tensor:
    """Return `g`, or with `use_gate_in_kernel` what a gate of `titan_gdn.ops.gates` makes of it.

    Args:
        function: the gate.
        g: the log decay, or the argument of the gate.
        use_gate_in_kernel: whether to apply the gate.
        A_log: its second argument.
        others: the arguments after that.

    Raises:
        ValueError: the arguments of the gate are missing, or given although it is not applied.
    """
    if not use_gate_in_kernel and any(x is not None for x in (A_log, *others)):
        raise ValueError("A_log, dt_bias and lower_bound need use_gate_in_kernel = True")
    if use_gate_in_kernel and A_log is None:
        raise ValueError("use_gate_in_kernel = True needs A_log")
    return function(g, A_log, *others) if use_gate_in_kernel else g


def _check(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, per_channel: bool
) -> None:
    """Check dtypes, devices and shapes.

    Raises:
        ValueError: the message has what was given and what is expected.
    """
    check_tensors(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    if q.dtype != k.dtype or q.dtype != v.dtype:
        dtypes = ", ".join(dtype_of(x) for x in (q, k, v))
        raise ValueError(f"q, k and v must have one dtype, not {dtypes}")
    four = q.ndim == v.ndim == 4 and all(n > 0 for n in (*q.shape[2:], *v.shape[2:]))
    if not four or q.shape != k.shape or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must be [B, T, H, K] and v {tuple(v.shape)} "
            "[B, T, HV, V], where HV is a multiple of H, and H, HV, K and V are at least 1"
        )
    per_head = tuple(v.shape[:3])
    decay = (*per_head, q.shape[3]) if per_channel else per_head
    if g.shape != decay or beta.shape != per_head:
        raise ValueError(
            f"g {tuple(g.shape)} must be {decay} and beta {tuple(beta.shape)} must be {per_head} "
            "to fit q and v"
        )


def _key_first(
    q: Tensor, v: Tensor, state: Tensor | None, documents: int, state_v_first: bool
) -> Tensor | None:
    """Check the shape of the initial states and return them as `[N, HV, K, V]`."""
    if state is None:
        return None
    K, V = q.shape[3], v.shape[3]
    expected = (documents, v.shape[2], *((V, K) if state_v_first else (K, V)))
    if state.shape != expected:
        raise ValueError(f"initial_state {tuple(state.shape)} must be {expected}, one state per document")
    return state.mT if state_v_first else state
