"""What the chunked rules ask of their arguments."""

from torch import Tensor


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    per_channel: bool,
) -> None:
    """Refuse shapes that do not fit.

    Raises:
        ValueError: says which shapes were given, and which they must be.
    """
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
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(
            f"packed documents (cu_seqlens) need a batch of 1, not {q.shape[0]}: fold [B, T] to [1, B*T]"
        )
    documents = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    states = (documents, v.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != states:
        raise ValueError(f"initial_state {tuple(initial_state.shape)} must be {states}, one a document")
