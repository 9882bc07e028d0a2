"""What both delta rules do with their arguments before a backend computes."""

from torch import Tensor
from torch.library import CustomOpDef

from titan_gdn.ops.backends import Backend, resolve
from titan_gdn.ops.documents import check_offsets

MAX_FLA_KEY_DIM = 256
"""Channels of a key in FLA's kernels."""


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
    """Check the arguments, complete them, and run the operator of the backend.

    Args:
        torch_rule: forward operator of `titan_gdn.ops.chunked_operator`.
        fla_rule: forward operator of `titan_gdn.ops.fla_operator`.
        fla_flags: its flags.
        per_channel: `g` is `[B, T, HV, K]`, not `[B, T, HV]`.
        q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, cu_seqlens, cu_seqlens_cpu,
            backend: as in `titan_gdn.ops.chunk_gated_delta_rule`, as are results and errors.
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
            f"FLA's kernels take keys of at most {MAX_FLA_KEY_DIM} channels, not {q.shape[-1]}; "
            "backend = 'torch' takes any"
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
    """Refuse shapes that do not fit.

    Raises:
        ValueError: says which shapes were given, and which they must be.
    """
    if not all(x.is_floating_point() for x in (q, k, v, g, beta)):
        dtypes = [str(x.dtype).removeprefix("torch.") for x in (q, k, v, g, beta)]
        raise ValueError(f"q, k, v, g and beta must be floating point, not {', '.join(dtypes)}")
    if q.shape != k.shape or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must be [B, T, H, K] and v {tuple(v.shape)} "
            "[B, T, HV, V] with H dividing HV"
        )
    per_head = tuple(v.shape[:3])
    decay = (*per_head, q.shape[3]) if per_channel else per_head
    if g.shape != decay or beta.shape != per_head:
        raise ValueError(
            f"g {tuple(g.shape)} must be {decay} and beta {tuple(beta.shape)} {per_head}, as q and v say"
        )
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = (documents, v.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != states:
        raise ValueError(f"initial_state {tuple(initial_state.shape)} must be {states}, one a document")
