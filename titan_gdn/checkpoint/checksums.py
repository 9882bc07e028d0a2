"""Checksums beside a distributed checkpoint: written with each file of a step, compared before it is loaded.

The checksum is the CRC-32 of `zlib`, which finds damage, not malice. A second thread computes it while the
same bytes are written.
"""

import io
import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titan_gdn.checkpoint.steps import CHECKSUMS

_PIECE = 4 << 20
_INLINE = 1 << 16
"""Up to this number of bytes a checksum takes less time than to start a thread's work."""


class StepWriter(FileSystemWriter):
    """Extends PyTorch's writer: a rank also writes the checksums of its files, before the step is complete.

    Args:
        path: The folder of the step.
        single_file_per_rank: Whether a rank writes one file, not one for each tensor.
    """

    def __init__(self, path: str, single_file_per_rank: bool = True) -> None:
        super().__init__(path, single_file_per_rank)
        self.fs = _Summed()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, then their checksums."""
        results = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in results.wait()}
        sums = {name: self.fs.sums.pop(name) for name in sorted(names)}
        if sums:
            with open(os.path.join(self.path, f"{plan.storage_data.prefix}{CHECKSUMS}"), "w") as file:
                json.dump(sums, file)
        return results


class _Summed(FileSystem):
    """Computes the checksum of each file that it writes.

    Attributes:
        sums: The checksums by the names of the files.
    """

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            with ThreadPoolExecutor(1) as thread:
                summed = _Stream(stream, thread)
                yield cast(io.IOBase, summed)
            self.sums[os.path.basename(path)] = summed.sum


class _Stream:
    """A file that is written from its beginning to its end."""

    def __init__(self, stream: io.IOBase, thread: ThreadPoolExecutor) -> None:
        self.stream, self.thread, self.sum = stream, thread, 0

    def write(self, data: Any) -> int:
        if memoryview(data).nbytes <= _INLINE:
            self.sum = zlib.crc32(data, self.sum)
            return self.stream.write(data)  # pyright: ignore
        computed = self.thread.submit(zlib.crc32, data, self.sum)
        written = self.stream.write(data)  # pyright: ignore
        self.sum = computed.result()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def has_checksums(step: str) -> bool:
    """Whether a step has checksums. Those that TorchTitan or torch alone saved have none."""
    return any(name.endswith(CHECKSUMS) for name in os.listdir(step))


def damaged(step: str, part: int = 0, parts: int = 1) -> str | None:
    """Compare a part of a step's files with their checksums.

    Args:
        step: The folder of the step.
        part: Which files to read: every `parts`-th one from this number.
        parts: Number of parts, one for each rank.

    Returns:
        A sentence that names the damaged file; None if there is none.
    """
    sums: dict[str, int] = {}
    for name in sorted(os.listdir(step)):
        if name.endswith(CHECKSUMS):
            try:
                with open(os.path.join(step, name)) as file:
                    sums |= json.load(file)
            except (ValueError, TypeError) as error:
                return f'"{os.path.join(step, name)}" cannot be read: {error}'
    for name in sorted(sums)[part::parts]:
        path = os.path.join(step, name)
        try:
            found = _sum(path)
        except OSError as error:
            return f'"{path}" cannot be read: {error.strerror}'
        if found != sums[name]:
            return f'"{path}" is damaged: its checksum is {found:08x}, and it was saved with {sums[name]:08x}'
    return None


def _sum(path: str) -> int:
    total = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            total = zlib.crc32(piece, total)
    return total
