"""Checks the arguments of the delta rules and runs the operator of the chosen backend."""

from torch import Tensor
from torch.library import CustomOpDef

from titan_gdn.ops.backends import Backend, resolve
from titan_gdn.ops.documents import check_offsets

MAX_FLA_KEY_DIM = 256
"""The largest key dimension of FLA's kernels."""


def run(
    torch_rule: CustomOpDef,
    fla_rule: CustomOpDef,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    l2norm: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    backend: Backend,
    *fla_flags: bool,
    per_channel: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments, fill in defaults, and run the operator of the backend.

    Args:
        torch_rule: the forward operator from `titan_gdn.ops.chunked_operator.define`.
        fla_rule: the forward operator from `titan_gdn.ops.fla_operator.define`.
        fla_flags: the flags of `fla_rule`.
        per_channel: whether `g` is `[B, T, HV, K]` instead of `[B, T, HV]`.
        q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, cu_seqlens, cu_seqlens_cpu,
            backend: see `titan_gdn.ops.chunk_gated_delta_rule`, also for the results and the errors.
    """
    check_offsets(q.shape[0], cu_seqlens, cu_seqlens_cpu)
    _check(q, k, v, g, beta, initial_state, cu_seqlens, per_channel)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is not None and cu_seqlens_cpu is None:
        cu_seqlens_cpu = cu_seqlens.cpu()
    if resolve(backend, q.device) == "torch":
        out, final_state, _ = torch_rule(q, k, v, g, beta, scale, initial_state, cu_seqlens_cpu, l2norm)
    elif q.shape[-1] > MAX_FLA_KEY_DIM:
        raise ValueError(
            f"FLA's kernels support a key dimension of at most {MAX_FLA_KEY_DIM}, not {q.shape[-1]}; "
            "backend = 'torch' supports any"
        )
    else:
        documents = (cu_seqlens, cu_seqlens_cpu)
        out, final_state, *_ = fla_rule(
            q, k, v, g, beta, scale, initial_state, *documents, l2norm, *fla_flags
        )
    return out, final_state if output_final_state else None


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    per_channel: bool,
) -> None:
    """Check dtypes and shapes.

    Raises:
        ValueError: the message has the shapes that were given and those that are expected.
    """
    if not all(x.is_floating_point() for x in (q, k, v, g, beta)):
        dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, k, v, g, beta)]
        raise ValueError(f"q, k, v, g and beta must be floating point, not {', '.join(dtypes)}")
    if q.shape != k.shape or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must be [B, T, H, K] and v {tuple(v.shape)} "
            "[B, T, HV, V], where HV is a multiple of H"
        )
    per_head = tuple(v.shape[:3])
    decay = (*per_head, q.shape[3]) if per_channel else per_head
    if g.shape != decay or beta.shape != per_head:
        raise ValueError(
            f"g {tuple(g.shape)} must be {decay} and beta {tuple(beta.shape)} must be {per_head} "
            "to fit q and v"
        )
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = (documents, v.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != states:
        raise ValueError(
            f"initial_state {tuple(initial_state.shape)} must be {states}, one state per document"
        )
