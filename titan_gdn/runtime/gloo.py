"""Patches of torch.distributed for gloo, the backend of a machine without accelerators (torch 2.14)."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types

_all_to_all = dist.all_to_all  # torch's own, before the patch


def patch() -> None:
    """Replace the collectives below, in this process."""
    dist.all_to_all = all_to_all
    placement_types.shard_dim_alltoall = shard_dim_alltoall  # pyright: ignore[reportPrivateImportUsage]


def all_to_all(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """`torch.distributed.all_to_all` for parts of different sizes.

    gloo has no such collective, but exchanges the parts of a single tensor in any sizes. Expert parallelism
    needs it: a router sends each expert as many tokens as it likes.
    """
    if dist.get_backend(group) != "gloo":
        return _all_to_all(outputs, inputs, group, async_op)
    received, sizes = torch.cat(outputs), [[len(part) for part in parts] for parts in (outputs, inputs)]
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part)
    return None


def shard_dim_alltoall(
    input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """DTensor's all-to-all, as on a GPU.

    On a CPU, DTensor gathers the whole tensor on each rank and keeps a part, `n` times the bytes, because
    gloo once had no all-to-all. It has one now.
    """
    group = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(input, gather_dim, shard_dim, group)
