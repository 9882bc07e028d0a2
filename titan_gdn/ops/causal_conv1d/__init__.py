"""The short causal convolution before the rule: one function, two backends."""

from torch import Tensor

from titan_gdn.ops.backends import Backend, resolve
from titan_gdn.ops.causal_conv1d.fla_backend import fla_conv_forward
from titan_gdn.ops.causal_conv1d.torch_backend import conv_forward
from titan_gdn.ops.documents import check_offsets


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Convolve every channel with its own kernel over the earlier tokens of its document, then apply `silu`.

    `y_t = silu(sum_j weight[C-1-j] * x_{t-j})`, where tokens before the start of the document are zero.

    Args:
        x: `[B, T, D]` channels.
        weight: `[D, C]` kernels. The weight of the current token is last, as in `torch.nn.Conv1d`.
        cu_seqlens: `[N + 1]` offsets of packed documents; requires `B = 1`. None makes every row one
            document.
        cu_seqlens_cpu: the same on the CPU, which saves a copy to the host.
        backend: "fla" (Triton, GPU), "torch" (any device), or "auto": "fla" for tensors on a GPU.

    Returns:
        `[B, T, D]` in the dtype of `x`. The sums are computed at least in float32.

    Raises:
        ValueError: the shapes do not fit, the backend is unknown, or FLA's kernels cannot run on the device.
    """
    check_offsets(x.shape[0], cu_seqlens, cu_seqlens_cpu)
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} must be [B, T, D] and weight {tuple(weight.shape)} [D, C]")
    if cu_seqlens is not None and cu_seqlens_cpu is None:
        cu_seqlens_cpu = cu_seqlens.cpu()
    if resolve(backend, x.device) == "torch":
        return conv_forward(x, weight, cu_seqlens_cpu)
    return fla_conv_forward(x, weight, cu_seqlens, cu_seqlens_cpu)
