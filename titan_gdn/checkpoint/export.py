"""Writes a model directory: what the model holds, what its source holds beside the model, and small files.

The ranks first write their parts of the tensors with PyTorch's `HuggingFaceStorageWriter`, then each of them
assembles some of the files. PyTorch's own consolidation is not used: it writes headers without `format: pt`,
writes scalars as zeros, and reads whatever a folder holds. A directory is complete when its index exists: the
index is removed first and written last. A distributed checkpoint in the same folder is removed after that.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, BinaryIO, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan

from titan_gdn.checkpoint.fused_experts import fused_groups, fused_shape
from titan_gdn.checkpoint.model_directory import BITS, INDEX, TensorEntry
from titan_gdn.checkpoint.steps import DCP_FILES, SaveError, remove_files

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that a model may have, by their names in safetensors files."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FILE_BYTES = 5_000_000_000
"""The size up to which a file is filled, unless a single tensor is larger."""
PIECE_BYTES = 16 << 20
"""The size of the pieces in which tensors are copied from file to file."""

_SHARDED = "sharded"
_PART = ".part"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp")
_TOKENIZER = re.compile(
    r"(tokenizer.*|vocab\..*|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template\..*)"
)


class ExportError(SaveError):
    """An export that failed on some rank. Every rank raises it."""


class ExportedTensor(NamedTuple):
    """A tensor of the export.

    Attributes:
        dtype: as safetensors files name it.
        shape: the whole tensor's shape.
        kept: where its bytes are, if they are copied from another file.
    """

    dtype: str
    shape: tuple[int, ...]
    kept: TensorEntry | None = None

    @property
    def n_bytes(self) -> int:
        """The number of bytes of the data."""
        return torch.Size(self.shape).numel() * BITS[self.dtype] // 8


File = dict[str, ExportedTensor]
"""The tensors of a file in the order of their data."""


@dataclass(frozen=True)
class Beside:
    """What an export holds beside the tensors of the model.

    Attributes:
        kept: tensors that are copied from other files as they are.
        source: the directory whose small files (configuration, tokenizer, license, ...) are copied.
        assets: the directory of the tokenizer, which is copied if `source` has none.
        config: what `config.json` holds; None copies that of `source`.
        fused: names of tensors that hold all experts of a layer (see `fused_experts`).
    """

    kept: Mapping[str, TensorEntry]
    source: str | None = None
    assets: str | None = None
    config: dict[str, Any] | None = None
    fused: frozenset[str] = frozenset()


def export(
    state_dict: dict[str, Tensor],
    folder: str,
    beside: Beside,
    file_bytes: int = FILE_BYTES,
    keeps_step: bool = False,
) -> None:
    """Writes a model directory. Every rank of the default process group, if there is one, calls it.

    Args:
        state_dict: the tensors of the model that this rank has, by the names in the files. DTensors are
            written whole; a plain tensor on several ranks is the same on all of them.
        folder: where to write. Weights that it holds are removed.
        beside: what the directory holds beside these tensors.
        file_bytes: the size up to which a file is filled.
        keeps_step: whether the training state of a step in the folder stays.

    Raises:
        ExportError: the directory could not be written by some rank.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group = _patient_group()
    sharded = os.path.join(folder, _SHARDED)
    _together(folder, lambda: _clear(folder, beside.source) if rank == 0 else None, group)
    writer = _PartsWriter(sharded, beside, file_bytes)
    dcp.save(state_dict, storage_writer=writer, process_group=group, no_dist=world == 1)
    files = _from_first_rank(writer.files, group)
    names = file_names(len(files))

    def write_files() -> None:
        for i in range(rank, len(files), world):
            parts = _parts(sharded, names[i])
            _write_file(os.path.join(folder, names[i]), files[i], parts, beside.fused)

    def complete() -> None:
        _complete(folder, dict(zip(names, files, strict=True)), beside)
        if not keeps_step:
            remove_files(folder, DCP_FILES)

    _together(folder, write_files, group)
    _together(folder, lambda: complete() if rank == 0 else None, group)


def write_one_by_one(
    folder: str,
    tensors: Mapping[str, ExportedTensor],
    values: Iterable[tuple[str, Tensor]],
    beside: Beside,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a model directory from one process, and never holds more than one tensor.

    Args:
        folder: where to write. Weights that it holds are removed.
        tensors: all tensors of the model, by their names in the files.
        values: the same tensors with their values, in any order.
        beside: what the directory holds beside them.
        file_bytes: the size up to which a file is filled.
    """
    _clear(folder, beside.source)
    kept = {name: ExportedTensor(entry.dtype, entry.shape, entry) for name, entry in beside.kept.items()}
    files = filled(kept | dict(tensors), file_bytes, beside.fused)
    names = file_names(len(files))
    places: dict[str, tuple[str, int]] = {}
    for name, file in zip(names, files, strict=True):
        path = os.path.join(folder, name + _PART)  # its header is valid long before its values are
        with open(path, "wb") as out:
            out.write(_header(file, beside.fused))
            for key, tensor in file.items():
                places[key] = path, out.tell()
                if tensor.kept is not None:
                    _copy_bytes(tensor.kept, out)
                else:
                    out.truncate(out.seek(tensor.n_bytes, os.SEEK_CUR))
    missing = set(tensors)
    for key, value in values:
        path, place = places[key]
        with open(path, "r+b") as out:
            out.seek(place)
            out.write(_bytes(value))
            out.flush()
            os.fsync(out.fileno())
        missing.remove(key)
    if missing:
        raise ExportError(
            f'the export to "{folder}" lacks {min(missing)} and {len(missing) - 1} more tensors'
        )
    for name in names:
        os.replace(os.path.join(folder, name + _PART), os.path.join(folder, name))
    _complete(folder, dict(zip(names, files, strict=True)), beside)


def file_names(n: int) -> list[str]:
    """The names of the files of a model directory."""
    return [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]


class _PartsWriter(HuggingFaceStorageWriter):
    """Writes the parts of tensors that each rank has, apart for each file of the export.

    Attributes:
        files: the files of the export; known after saving, on the coordinator.
    """

    def __init__(self, path: str, beside: Beside, file_bytes: int) -> None:
        super().__init__(path, save_distributed=True)
        self.files: list[File] = []
        self._beside = beside
        self._file_bytes = file_bytes

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decides which file holds which tensor: only here the tensors of all ranks are known."""
        tensors = {
            name: ExportedTensor(kept.dtype, kept.shape, kept) for name, kept in self._beside.kept.items()
        }
        for item in (item for plan in plans for item in plan.items):
            data = item.tensor_data
            assert data is not None, "the state dict of a model holds tensors only"
            tensors[item.index.fqn] = ExportedTensor(DTYPE_NAMES[data.properties.dtype], tuple(data.size))
        self.files = filled(tensors, self._file_bytes, self._beside.fused)
        self.fqn_to_index_mapping = {name: i for i, file in enumerate(self.files, 1) for name in file}
        return super().prepare_global_plan(plans)


def filled(
    tensors: Mapping[str, ExportedTensor], file_bytes: int, fused: frozenset[str] = frozenset()
) -> list[File]:
    """Distributes tensors over files of at most `file_bytes`, in the order of their names.

    Numbers in names are compared as numbers, so the files follow the layers and are the same on every mesh.
    The matrices of a tensor in `fused` follow each other.
    """
    files: list[list[str]] = [[]]
    size = 0
    for _, names in fused_groups(sorted(tensors, key=_natural), fused):
        added = sum(tensors[name].n_bytes for name in names)
        size += added
        if files[-1] and size > file_bytes:
            files.append([])
            size = added
        files[-1] += names
    # Wider dtypes first, so that every tensor is aligned.
    return [
        {name: tensors[name] for name in sorted(names, key=lambda name: -BITS[tensors[name].dtype])}
        for names in files
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _clear(folder: str, source: str | None) -> None:
    """Makes `folder` an incomplete directory without weights. The index, which completes it, goes first.

    A distributed checkpoint of the same step stays usable until the index is written.
    """
    os.makedirs(folder, exist_ok=True)
    if source is not None and os.path.realpath(source) == os.path.realpath(folder):
        raise ExportError(f'"{folder}" holds the weights that the run began with: they are not overwritten')
    remove_files(folder, (INDEX, ".safetensors", _SHARDED))
    os.makedirs(os.path.join(folder, _SHARDED))


Part = tuple[str, list[int]]
"""A file that holds a part of a tensor, and the position of the part in the tensor."""


def _parts(sharded: str, name: str) -> dict[str, list[Part]]:
    """The parts of each tensor of the file `name`, as `_PartsWriter` wrote them."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for shard in sorted(os.listdir(sharded)):
        if shard.endswith("-" + name):
            path = os.path.join(sharded, shard)
            with safe_open(path, "pt") as file:
                for key, where in json.loads(file.metadata()["DCP_SHARDING_INFO"]).items():
                    parts[key].append((path, where["saved_offsets"]))
    return parts


def _write_file(path: str, tensors: File, parts: Mapping[str, list[Part]], fused: frozenset[str]) -> None:
    """Writes a safetensors file, one tensor after the other."""
    with open(path, "wb") as file:
        file.write(_header(tensors, fused))
        for name, tensor in tensors.items():
            if tensor.kept is not None:
                _copy_bytes(tensor.kept, file)
            else:
                file.write(_bytes(_whole(name, tensor, parts.get(name, []))))
        file.flush()
        os.fsync(file.fileno())


def _header(tensors: File, fused: frozenset[str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, members in fused_groups(list(tensors), fused):
        first = tensors[members[0]]
        begin, end = end, end + sum(tensors[member].n_bytes for member in members)
        shape = fused_shape(first.shape, members) if name in fused else first.shape
        header[name] = {"dtype": first.dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _copy_bytes(entry: TensorEntry, to: BinaryIO) -> None:
    """Copies the bytes of a tensor, piece by piece."""
    left = entry.end - entry.begin
    with open(entry.file, "rb") as file:
        file.seek(entry.begin)
        while left:
            piece = file.read(min(left, PIECE_BYTES))
            if not piece:
                raise OSError(f'"{entry.file}" became shorter during the run: {left} bytes are missing')
            to.write(piece)
            left -= len(piece)


def _whole(name: str, tensor: ExportedTensor, parts: list[Part]) -> Tensor:
    """Puts a tensor together from its parts."""
    whole = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    left = whole.numel()
    for path, offsets in parts:
        with safe_open(path, "pt") as file:
            part = file.get_tensor(name)
        place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape, strict=True))
        whole[place] = part
        left -= part.numel()
    if left:
        raise OSError(
            f"{left} of {whole.numel()} elements of {name} are not in the files that the ranks wrote"
        )
    return whole


def _bytes(value: Tensor) -> memoryview:
    """The bytes of a tensor, as safetensors files hold them."""
    return value.contiguous().flatten().view(torch.uint8).numpy().data


def _complete(folder: str, files: Mapping[str, File], beside: Beside) -> None:
    """Writes what makes files of tensors a model directory."""
    shutil.rmtree(os.path.join(folder, _SHARDED))
    _copy_small_files(folder, beside)
    _write_index(folder, files, beside.fused)


def _write_index(folder: str, files: Mapping[str, File], fused: frozenset[str]) -> None:
    """Writes the index, which completes the directory, in one step."""
    size = sum(tensor.n_bytes for file in files.values() for tensor in file.values())
    names = {tensor: name for name, file in files.items() for tensor, _ in fused_groups(list(file), fused)}
    write_json(
        os.path.join(folder, INDEX),
        {"metadata": {"total_size": size}, "weight_map": {key: names[key] for key in sorted(names)}},
    )


def write_json(path: str, content: Any) -> None:
    """Writes a JSON file that is whole or absent, whenever the process is killed."""
    with open(path + ".tmp", "w") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def _copy_small_files(folder: str, beside: Beside) -> None:
    """Copies what belongs to a model directory beside its weights."""
    copied = {name: beside.source for name in _small_files(beside.source)}
    if not any(name.startswith("tokenizer") for name in copied):
        copied |= {name: beside.assets for name in _small_files(beside.assets) if _TOKENIZER.fullmatch(name)}
    for name, where in copied.items():
        assert where is not None
        shutil.copyfile(os.path.join(where, name), os.path.join(folder, name))
    if beside.config is not None:
        write_json(os.path.join(folder, "config.json"), beside.config)


def _small_files(folder: str | None) -> Iterator[str]:
    """The names of the files in a model directory that are not weights."""
    for name in sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else ():
        weights = name.endswith(_WEIGHTS) or name.endswith(".index.json")
        if not (weights or name.startswith(".") or name == RECORD):
            if os.path.isfile(os.path.join(folder or "", name)):
                yield name


def _patient_group() -> dist.ProcessGroup | None:
    """A group that waits for ranks which write large files; the trainer's groups give up after 100 s."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(hours=12)))


def _together(folder: str, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Runs `work` and waits for the other ranks. If it fails on one, all raise its error."""
    error: Exception | None = None
    try:
        work()
    except Exception as raised:
        error = raised
    told = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, told[0], group=group)
        told = gathered
    if failed := [text for text in told if text]:
        raise ExportError(f'the export to "{folder}" failed: {failed[0]}') from error


def _from_first_rank(value: Any, group: dist.ProcessGroup | None) -> Any:
    """The value that the first rank has."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


RECORD = "source.json"
"""The file in the folder of a step that says what its tensors do not: where they came from, and whether
embeddings are tied."""


def record_source(step: str, source: str | None, tied: bool | None) -> None:
    """Writes beside a step what its tensors do not say.

    Args:
        step: the folder of the step.
        source: the model directory that its weights came from, None if from none.
        tied: whether the output layer is the embedding, None if that is unknown.
    """
    os.makedirs(step, exist_ok=True)
    record = {"model_directory": source and os.path.abspath(source), "tie_word_embeddings": tied}
    write_json(os.path.join(step, RECORD), record)


def recorded_tying(step: str) -> bool | None:
    """Returns whether the output layer of a step is the embedding, None if the step has no record of it."""
    try:
        with open(os.path.join(step, RECORD)) as file:
            return json.load(file).get("tie_word_embeddings")
    except FileNotFoundError:
        return None


def recorded_source(step: str, otherwise: str | None) -> str | None:
    """Returns the model directory that the weights of a step came from, None if from none.

    Args:
        step: the folder of the step.
        otherwise: the directory to return for a step without a record, or if the recorded one is gone.
    """
    try:
        with open(os.path.join(step, RECORD)) as file:
            recorded = json.load(file)["model_directory"]
    except FileNotFoundError:
        return otherwise
    if recorded is not None and not os.path.isdir(recorded) and otherwise is not None:
        return otherwise
    return recorded
