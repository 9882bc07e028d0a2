"""Calls modules on local tensors, although their parameters may be DTensors on the TP sub-mesh."""

from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.func import functional_call


def local(parameter: Tensor, partial_grad: bool = False) -> Tensor:
    """Returns this rank's shard of a parameter.

    Args:
        parameter: a plain tensor, or a DTensor on the TP sub-mesh.
        partial_grad: whether the gradients of the TP ranks are partial sums. This is so if the parameter is
            replicated and each rank applies it to different tokens or heads.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] if partial_grad else None)


def apply(module: nn.Module, *args: Tensor, rows: slice | None = None, partial_grad: bool = False) -> Tensor:
    """Calls a module whose only parameter is `weight` with this rank's shard of it.

    The module's own forward runs, so that quantized linears work too.

    Args:
        module: a linear or a norm.
        *args: local tensors, or DTensors that the module's own `sharding_config` makes local.
        rows: the rows of the shard to use, None for all.
        partial_grad: see `local`.

    Returns:
        What the module returns.
    """
    weight = local(cast(Tensor, module.weight), partial_grad)
    if rows is not None and (rows.start, rows.stop) != (0, weight.shape[0]):
        weight = weight[rows]
    if weight is module.weight:
        return module(*args)
    return functional_call(module, {"weight": weight}, args)
