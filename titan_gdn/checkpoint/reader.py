"""Reads the tensors of a model directory, under the names and in the shapes that a model expects."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import _getdtype
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from titan_gdn.checkpoint.accounting import Account


class ModelDirectoryReader(HuggingFaceStorageReader):
    """PyTorch's reader, which opens the files of an account alone.

    The base class opens every `*.safetensors` file of the directory, and knows tensors by the names and
    shapes in the files only.

    Args:
        path: the directory.
        account: which of its tensors are loaded.
        shapes: the shapes that the model expects, by the names in the account.
    """

    def __init__(self, path: str, account: Account, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__(path)
        self.account = account
        self.shapes = shapes

    def read_metadata(self) -> Metadata:
        """Returns the metadata of the tensors that are loaded. No file is opened."""
        tensors, storage = {}, {}
        for key, (_, entry) in self.account.loaded.items():
            shape, dtype = torch.Size(self.shapes[key]), _getdtype(entry.dtype)
            beginning = torch.Size([0] * len(shape))
            tensors[key] = TensorStorageMetadata(
                TensorProperties(dtype=dtype), shape, [ChunkStorageMetadata(beginning, shape)]
            )
            storage[MetadataIndex(key, beginning)] = _HFStorageInfo(entry.file, shape, dtype)
        return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        super()._process_read_request(_File(f, self), req, planner)


class _File:
    """An open safetensors file that knows its tensors by the names and shapes that a model expects."""

    def __init__(self, file: Any, reader: ModelDirectoryReader) -> None:
        self.file = file
        self.reader = reader

    def get_slice(self, key: str) -> Any:
        name, entry = self.reader.account.loaded[key]
        shape = self.reader.shapes[key]
        if entry.shape == shape:
            return self.file.get_slice(name)
        return self.file.get_tensor(name).view(shape)  # a vector, which is small
