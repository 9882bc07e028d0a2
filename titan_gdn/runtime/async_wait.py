"""A patch of `AsyncCollectiveTensor.wait`, which drops the gradient (torch 2.14).

TorchTitan's modules redistribute their inputs with `async_op=True`. Where such an input goes straight into a
`local_map` region (TorchTitan's experts, for example), `local_map` calls `AsyncCollectiveTensor.wait`. The
method returns the result of the collective without its autograd history: the forward is correct, but no
gradient reaches the modules before. It happens with DTensor (`partial_dtensor`) and batches of one row, whose
gathered sequence needs no copy that would wait earlier.
"""

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: AsyncCollectiveTensor) -> Tensor:  # noqa: ANN001
        return wait_tensor(x.elem)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Tensor:  # noqa: ANN001
        return grad_outputs[0]


def keep_gradients() -> None:
    """Let `AsyncCollectiveTensor.wait` pass gradients through, in this process."""
    AsyncCollectiveTensor.wait = _wait


def _wait(self: AsyncCollectiveTensor) -> Tensor:
    return _Wait.apply(self) if torch.is_grad_enabled() and self.requires_grad else wait_tensor(self.elem)
