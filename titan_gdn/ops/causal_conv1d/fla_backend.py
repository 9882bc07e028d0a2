"""The short causal convolution with FLA's Triton kernels, as PyTorch custom operators."""

import torch
from torch import Tensor

from titan_gdn.ops.fla_documents import fla_documents


@torch.library.custom_op("titan_gdn::fla_causal_conv1d", mutates_args=())
def fla_conv_forward(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> Tensor:
    """See `causal_conv1d`."""
    from fla.modules.causal_conv1d import causal_conv1d_fwd

    y, _ = causal_conv1d_fwd(
        x,
        weight,  # pyright: ignore[reportCallIssue] (FLA's decorator hides the signature)
        bias=None,
        residual=None,
        activation="silu",
        **fla_documents(x.shape[1], cu_seqlens, cu_seqlens_cpu),
    )
    return y


@fla_conv_forward.register_fake
def _(x, weight, cu_seqlens, cu_seqlens_cpu):  # noqa: ANN001, ANN202
    return x.new_empty(x.shape)


@torch.library.custom_op("titan_gdn::fla_causal_conv1d_backward", mutates_args=())
def fla_conv_backward(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` and `weight`. FLA recomputes the sum inside `silu`."""
    from fla.modules.causal_conv1d import causal_conv1d_bwd

    with torch.cuda.device_of(x):
        dx, dweight, *_ = causal_conv1d_bwd(
            x.contiguous(),
            dy.contiguous(),  # pyright: ignore[reportCallIssue] (FLA's decorator hides the signature)
            dht=None,  # pyright: ignore[reportArgumentType] (FLA's annotation leaves None out)
            weight=weight.contiguous(),
            activation="silu",
            **fla_documents(x.shape[1], cu_seqlens, cu_seqlens_cpu),
        )
    return dx, dweight  # pyright: ignore[reportReturnType] (None only without a weight)


@fla_conv_backward.register_fake
def _(x, weight, cu_seqlens, cu_seqlens_cpu, dy):  # noqa: ANN001, ANN202
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output) -> None:  # noqa: ANN001
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):  # noqa: ANN001, ANN202
    return *fla_conv_backward(*ctx.saved_tensors, dy), None, None


fla_conv_forward.register_autograd(_backward, setup_context=_setup_context)
