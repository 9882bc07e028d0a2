"""Modules inside a region of local tensors, where their parameters may be DTensors on the TP sub-mesh."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.func import functional_call


def local(parameter: Tensor, summed: bool = False) -> Tensor:
    """This rank's shard of a parameter.

    Args:
        parameter: plain, or a DTensor on the TP sub-mesh.
        summed: the parameter is whole on every TP rank and each uses it for something else, so that its
            gradient is the sum over them.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] if summed else None)


def apply(module: nn.Module, *args: Tensor, rows: slice | None = None, summed: bool = False) -> Tensor:
    """Call a module that has one parameter, `weight`, with this rank's shard of it.

    The module's own forward runs, so that a quantized linear stays one.

    Args:
        module: a linear or a norm.
        *args: local tensors, or what the module's own `sharding_config` makes local.
        rows: use these rows of the weight only.
        summed: see `local`.
    """
    weight = local(module.weight, summed)
    if rows is not None and (rows.start, rows.stop) != (0, weight.shape[0]):
        weight = weight[rows]
    if weight is module.weight:
        return module(*args)
    return functional_call(module, {"weight": weight}, args)
