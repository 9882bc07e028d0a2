"""Reads the tensors of a model directory, under the names and in the shapes that a model expects."""

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from safetensors.torch import _getdtype
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from titan_gdn.checkpoint.accounting import Account
from titan_gdn.checkpoint.model_directory import TensorEntry


@dataclass(frozen=True, eq=False)
class Rows:
    """A parameter whose rows the files hold in another order, or in several tensors.

    Attributes:
        shape: the shape of the parameter.
        names: the tensors in the files, by their names in the account.
        order: returns an index tensor of shape `shape[:-1]`: which row of the concatenated tensors each row
            of the parameter is.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    order: Callable[[], Tensor]


class ModelDirectoryReader(HuggingFaceStorageReader):
    """Extends PyTorch's reader: it opens the files of an account alone, and reads rows in any order.

    The base class opens every `*.safetensors` file of the directory, and knows tensors by the names and
    shapes in the files only.

    Args:
        path: the directory.
        account: which of its tensors are loaded.
        shapes: the shapes that the model expects, by the names in the account.
        rows: parameters that can be read besides, by their names in the model.
    """

    def __init__(
        self,
        path: str,
        account: Account,
        shapes: Mapping[str, tuple[int, ...]],
        rows: Mapping[str, Rows],
    ) -> None:
        super().__init__(path)
        self.account = account
        self.shapes = shapes
        self.rows = rows

    def read_metadata(self) -> Metadata:
        """Returns the metadata of what can be loaded. No file is opened."""
        available = {key: (self.shapes[key], key) for key in self.account.loaded}
        available |= {key: (rows.shape, rows.names[0]) for key, rows in self.rows.items()}
        tensors = {}
        for key, (size, name) in available.items():
            shape, dtype = torch.Size(size), _getdtype(self.account.loaded[name][1].dtype)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            tensors[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [chunk])
        return Metadata(tensors, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies the parts of tensors that `plan` names from the files to this rank's shards."""
        for item in plan.items:
            part = tuple(
                slice(begin, begin + size)
                for begin, size in zip(item.storage_offsets, item.lengths, strict=True)
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item.storage_index.fqn, part))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, key: str, part: tuple[slice, ...]) -> Tensor:
        if key not in self.rows:
            return mapped(self.account.loaded[key][1]).view(self.shapes[key])[part]
        rows = self.rows[key]
        entries = [self.account.loaded[name][1] for name in rows.names]
        tensors = [mapped(entry).view(-1, rows.shape[-1])[:, part[-1]] for entry in entries]
        order = rows.order()[part[:-1]]
        dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])  # one that holds all values
        read = torch.empty(*order.shape, tensors[0].shape[-1], dtype=dtype)
        first = 0
        for tensor in tensors:
            inside = (order >= first) & (order < first + len(tensor))
            read[inside] = tensor[order[inside] - first].to(dtype)
            first += len(tensor)
        return read


def mapped(entry: TensorEntry) -> Tensor:
    """Returns a tensor whose memory is the file, mapped: what is not used is not read."""
    dtype, count = _getdtype(entry.dtype), math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    with open(entry.file, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)
