"""A gradient that torch 2.14 loses.

TorchTitan's modules redistribute their inputs with `async_op=True`. Where such an input goes straight into
a `local_map` region (its experts, for one), `local_map` waits for it with `AsyncCollectiveTensor.wait`,
which returns the collective's result without its history: the forward is right, and no gradient reaches
what came before. It happens under DTensor (`partial_dtensor`) with batches of one row, whose gathered
sequence needs no copy that would wait on the way.
"""

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: AsyncCollectiveTensor) -> Tensor:  # noqa: ANN001
        return wait_tensor(x.elem)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # noqa: ANN001
        return gradient


def keep_gradients() -> None:
    """Let `AsyncCollectiveTensor.wait` hand gradients through, in this process."""
    AsyncCollectiveTensor.wait = _wait


def _wait(x: AsyncCollectiveTensor) -> Tensor:
    return _Wait.apply(x) if torch.is_grad_enabled() and x.requires_grad else wait_tensor(x.elem)
