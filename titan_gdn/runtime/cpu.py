"""Makes the CPU the device of TorchTitan 0.3 on a machine without accelerators."""

import functools
import os
import resource
import time
import types

import torch

from titan_gdn.runtime import gloo


def enable() -> None:
    """Make the CPU TorchTitan's device and patch gloo; does nothing where there is an accelerator.

    TorchTitan takes "cuda" where it finds no accelerator. Call this before any module of TorchTitan except
    `torchtitan.tools.utils` is imported: they import the device by name from there.
    """
    if torch.accelerator.is_available():
        return
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", _CPU("titan_gdn.runtime.cpu.device")
    utils.get_peak_flops = lambda device_name: measure_peak_flops()
    gloo.patch()


class _CPU(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that TorchTitan calls."""

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
        """Do nothing: the kernel keeps one peak per process, which cannot be reset."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def memory_stats(self, device: object = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        stats = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak"), peak)
        return stats | {"num_alloc_retries": 0, "num_ooms": 0}


@functools.cache
def measure_peak_flops(size: int = 512, seconds: float = 0.05) -> float:
    """The speed of a matrix product on this process's threads, in FLOP/s: an MFU of 100%.

    TorchTitan knows GPUs by name, and assumes an A100 otherwise.
    """
    best = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size).to(dtype)
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            torch.mm(a, a)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
