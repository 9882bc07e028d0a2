"""The bytes of tensors that are alive, as the CPU allocator counts them."""

import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def recorded():
    """Yield a list; at the end it holds the largest growth, in bytes, of what this thread has allocated.

    Files that safetensors maps into memory do not count, although the profiler counts them.
    """
    peak, mapped, map_file = [], set(), torch.UntypedStorage.from_file

    def from_file(name, shared, nbytes, *args, **kwargs):
        mapped.add(nbytes)
        return map_file(name, shared, nbytes, *args, **kwargs)

    with (
        mock.patch.object(torch.UntypedStorage, "from_file", from_file),
        torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile,
    ):
        yield peak
    now = largest = 0
    for event in sorted(profile.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and abs(event.nbytes()) not in mapped:
            now += event.nbytes()
            largest = max(largest, now)
    peak.append(largest)
