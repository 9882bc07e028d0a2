"""What TorchTitan and torch need to train without an accelerator. Nothing where there is one."""

import functools
import os
import resource
import time
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh


def enable() -> None:
    """Make the CPU the device of TorchTitan, if there is no accelerator.

    Call it before anything of TorchTitan but `torchtitan.tools.utils` is imported: its modules take the
    device by name from there.
    """
    if torch.accelerator.is_available():
        return
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _CPU("titan_gdn.runtime.cpu.device")
    utils.get_peak_flops = lambda device_name: measure_peak_flops()
    _patch_process_groups()


class _CPU(types.ModuleType):
    """`torch.cpu`, completed by what TorchTitan asks of `torch.cuda`."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(total_memory=total, name="cpu")

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """The kernel keeps one peak per process; it cannot be reset."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def memory_stats(self, device: object = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        stats = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak"), peak)
        return stats | {"num_alloc_retries": 0, "num_ooms": 0}


@functools.cache
def measure_peak_flops(size: int = 512, seconds: float = 0.05) -> float:
    """The rate of a matrix product on this process's threads, in FLOP/s: the 100% of the MFU."""
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size).to(dtype)
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            a @ a
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _patch_process_groups() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import placement_types

    barrier: Callable = dist.barrier
    # TorchTitan names the device of its barrier, which gloo refuses to be told.
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)
    placement_types.shard_dim_alltoall = _shard_dim_alltoall
    dist.all_to_all = functools.partial(_all_to_all, dist.all_to_all)


def _all_to_all(
    of_any_backend: Callable,
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: "ProcessGroup | None" = None,
    async_op: bool = False,
) -> "Work | None":
    """gloo exchanges parts of one size only; routers send experts as many tokens as they like."""
    import torch.distributed as dist

    if dist.get_backend(group) != "gloo":
        return of_any_backend(outputs, inputs, group, async_op)
    received, sizes = torch.cat(outputs), [[len(part) for part in parts] for parts in (outputs, inputs)]
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part)
    return None


def _shard_dim_alltoall(
    input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: "DeviceMesh", mesh_dim: int
) -> torch.Tensor:
    """DTensor's all-to-all: gloo has one, DTensor says it has not and gathers, `n` times the bytes."""
    group = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(input, gather_dim, shard_dim, group)
