"""Reads a distributed checkpoint (DCP) without running what it says.

DCP's `.metadata` is a pickle, and PyTorch reads the values that are no tensors with `weights_only=False`: a
checkpoint from elsewhere may call any function. Here a name is resolved only if DCP itself writes it.
"""

import io
import os
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from titan_gdn.checkpoint.steps import METADATA

_DCP = "torch.distributed.checkpoint"
_NAMES = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""What a `.metadata` of torch 2.14 refers to, by module, besides dtypes."""


class StepError(ValueError):
    """A step that cannot be read, or that holds another model."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise StepError(
            f"it refers to {module}.{name}, which no distributed checkpoint does: do not trust it"
        )


class StepReader(FileSystemReader):
    """Extends PyTorch's reader: `.metadata` may refer to DCP's own classes alone, and to files of its folder.

    Args:
        path: The folder of the step.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read which tensors a step holds.

        Raises:
            StepError: `.metadata` cannot be read, or refers to something else.
        """
        path = os.path.join(self.path, METADATA)
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise StepError(f"it holds a {type(metadata).__name__}")
            for place in (metadata.storage_data or {}).values():
                if os.path.basename(place.relative_path) != place.relative_path:
                    raise StepError(f'it refers to "{place.relative_path}", a file outside of its folder')
        except StepError as error:
            raise StepError(f'"{path}" is refused: {error}') from None
        except Exception as error:  # whatever a damaged pickle raises
            raise StepError(f'"{path}" cannot be read: {type(error).__name__}: {error}') from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class StepPlanner(DefaultLoadPlanner):
    """Extends PyTorch's planner: values other than tensors are what `weights_only` allows, such as numbers.

    Args:
        path: The folder of the step.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a value.

        Raises:
            StepError: It is something else.
        """
        key = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:
            reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
            reason = reason.strip().splitlines()[0] if reason.strip() else type(error).__name__
            raise StepError(f'"{self.path}": the value "{key}" is refused: {reason}') from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded
