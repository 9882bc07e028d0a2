"""The short causal convolution before the rule: one function, two backends."""

from typing import Any, Literal

from torch import Tensor

from titan_gdn.ops.arguments import check_tensors, refuse
from titan_gdn.ops.backends import Backend, resolve
from titan_gdn.ops.causal_conv1d.fla_backend import fla_conv_forward
from titan_gdn.ops.causal_conv1d.torch_backend import conv_forward
from titan_gdn.ops.documents import check_offsets

CONV_NOT_TAKEN = {
    "bias": "the layers have none",
    "residual": "add it to the result",
    "initial_state": "documents start from zeros",
    "output_final_state": "the result is y alone",
    "chunk_indices": "the operator computes them from cu_seqlens",
    "seq_idx": "cu_seqlens says where documents begin",
    "cp_context": "titan_gdn.parallel.exchange runs the convolution over the ranks of context parallelism",
}
"""The arguments of FLA's function that `causal_conv1d` does not take, and what to do instead."""


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    activation: Literal["silu", "swish"] = "silu",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    backend: Backend = "auto",
    **others: Any,
) -> Tensor:
    """Convolve every channel with its own kernel over the earlier tokens of its document, then apply `silu`.

    `y_t = silu(sum_j weight[C-1-j] * x_{t-j})`, where tokens before the start of the document are zero.

    This is not `fla.modules.causal_conv1d.causal_conv1d` (FLA 0.6), from which it differs in these points: it
    returns `y`, not `(y, final_state)`; it applies `silu` without being asked, and no other activation; the
    arguments after `weight` are keywords; `backend` is ours; and FLA's `bias`, `residual`, `initial_state`,
    `output_final_state`, `chunk_indices`, `seq_idx` and `cp_context` are not taken.

    Args:
        x: `[B, T, D]` channels.
        weight: `[D, C]` kernels. The weight of the current token is last, as in `torch.nn.Conv1d`.
        activation: "silu", or "swish", which is the same.
        cu_seqlens: `[N + 1]` int32 or int64 offsets of packed documents, on the device of `x`; requires
            `B = 1`. None makes every row one document.
        cu_seqlens_cpu: the same on the CPU, which saves a copy to the host.
        backend: "fla" (Triton, GPU), "torch" (any device), or "auto": "fla" for tensors on a GPU. Empty
            tensors (`B = 0` or `T = 0`) never reach FLA's kernels.

    Returns:
        `[B, T, D]` in the dtype of `x`. The sums are computed at least in float32.

    Raises:
        ValueError: the shapes, dtypes or devices do not fit, the backend or the activation is unknown, or
            FLA's kernels cannot run on the device.
        TypeError: the argument is not taken.
    """
    refuse("causal_conv1d", others, CONV_NOT_TAKEN)
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation = {activation!r} must be 'silu' or 'swish'")
    check_tensors(x=x, weight=weight)
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[0] or weight.numel() == 0:
        raise ValueError(
            f"x {tuple(x.shape)} must be [B, T, D] and weight {tuple(weight.shape)} [D, C], where D and C "
            "are at least 1"
        )
    cu_seqlens_cpu = check_offsets(x, cu_seqlens, cu_seqlens_cpu)
    if resolve(backend, x.device) == "torch" or x.numel() == 0:  # Triton launches no empty grid
        return conv_forward(x, weight, cu_seqlens_cpu)
    return fla_conv_forward(x, weight, cu_seqlens, cu_seqlens_cpu)
