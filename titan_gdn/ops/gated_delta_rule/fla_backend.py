"""The gated delta rule by flash-linear-attention's Triton kernels."""

from torch import Tensor


def fla_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    l2norm: bool,
) -> tuple[Tensor, Tensor]:
    """As `chunk_gated_delta_rule`, on a GPU, with FLA's public function."""
    # `import fla` takes 6 to 19 s: only those who run a kernel pay for it.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    if cu_seqlens is not None:
        # FLA caches index helpers by the identity of this tensor; a fresh one makes a recomputation
        # under activation checkpointing take the same path as the forward did.
        cu_seqlens = cu_seqlens.clone()
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=l2norm,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
    )
