"""Redistributions of local tensors over a one-dimensional sub-mesh, and the order of rows after them."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_gdn.parallel.sequence import SequenceLayout

ALL_TO_ALL = torch.ops._dtensor.shard_dim_alltoall.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def group_name(args: tuple) -> str:
    """Of a collective's arguments, whose last is its process group or that one's name."""
    return args[-1] if isinstance(args[-1], str) else args[-1].group_name


def exchange(x: Tensor, mesh: DeviceMesh, src: int, dst: int) -> Tensor:
    """One all-to-all: `x` is a shard of dimension `src`, the result one of `dst`."""
    return (
        DTensor.from_local(x, mesh, [Shard(src)], run_check=False)
        .redistribute(placements=[Shard(dst)])
        .to_local()
    )


def gather_sequence(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """All ranks' tokens `[B, n * tokens, ...]`. Each rank uses them differently: gradients are summed."""
    if mesh is None:
        return x
    whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def gather_all(x: Tensor, mesh: DeviceMesh, tp_mesh: DeviceMesh | None) -> Tensor:
    """All tokens of what lies as hidden states do between layers; rows stand `[tp][cp][tokens]`.

    Over CP first, so that over CP go `1/tp` of the bytes, then over TP.
    """
    return gather_sequence(gather_sequence(x, mesh), tp_mesh)


def in_shards(x: Tensor, mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> Tensor:
    """Put what `gather_all` gathered, or was made of it, in the order of CP shards, `[cp][tp][tokens]`."""
    if mesh is None or tp_mesh is None:
        return x
    return x.unflatten(1, (tp_mesh.size(), mesh.size(), -1)).transpose(1, 2).flatten(1, 3)


def in_order(x: Tensor, mesh: DeviceMesh, tp_mesh: DeviceMesh | None, sequence: SequenceLayout) -> Tensor:
    """The same in the natural order."""
    return reorder(in_shards(x, mesh, tp_mesh), sequence.from_shards)


def reorder(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows of dimension 1 by `index`; None leaves them."""
    return x if index is None else x.index_select(1, index)
