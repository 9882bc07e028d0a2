"""Redistributions of local tensors over a one-dimensional sub-mesh, and the order of rows after them."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titan_gdn.parallel.sequence import SequenceLayout

ALL_TO_ALL = torch.ops._dtensor.shard_dim_alltoall.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def group_name(args: tuple) -> GroupName:
    """The name of a collective's process group, given its arguments: the last is the group or its name."""
    group = args[-1]
    return GroupName(group) if isinstance(group, str) else group.group_name


def all_to_all(x: Tensor, mesh: DeviceMesh, src: int, dst: int) -> Tensor:
    """One all-to-all: `x` is sharded along dimension `src`, the result along dimension `dst`."""
    return (
        DTensor.from_local(x, mesh, [Shard(src)], run_check=False)
        .redistribute(placements=[Shard(dst)])
        .to_local()
    )


def gather_sequence(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Gather the tokens of all ranks, `[B, n * tokens, ...]`. Returns `x` if there is no mesh.

    Ranks use the gathered tokens differently, so the backward sums their gradients (reduce-scatter).
    """
    if mesh is None:
        return x
    whole = DTensor.from_local(x, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def gather_all(x: Tensor, mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> Tensor:
    """Gather all tokens of what is sharded as hidden states are between layers. Rows: `[tp][cp][tokens]`.

    CP comes first, so that only `1 / tp` of the bytes cross it; then TP.
    """
    return gather_sequence(gather_sequence(x, mesh), tp_mesh)


def in_shards(x: Tensor, mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> Tensor:
    """Reorder the rows that `gather_all` returns to those of concatenated CP shards, `[cp][tp][tokens]`."""
    if mesh is None or tp_mesh is None:
        return x
    return x.unflatten(1, (tp_mesh.size(), mesh.size(), -1)).transpose(1, 2).flatten(1, 3)


def in_order(x: Tensor, mesh: DeviceMesh, tp_mesh: DeviceMesh | None, sequence: SequenceLayout) -> Tensor:
    """Reorder the rows that `gather_all` returns to natural order."""
    return reorder(in_shards(x, mesh, tp_mesh), sequence.from_shards)


def reorder(x: Tensor, index: Tensor | None) -> Tensor:
    """Select rows of dimension 1 by `index`. None leaves them as they are."""
    return x if index is None else x.index_select(1, index)
