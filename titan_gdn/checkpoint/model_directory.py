"""Reads what a directory of safetensors files holds: names, dtypes, shapes and byte ranges of tensors.

Only headers are read, so 50 files take less than a second. Every later step takes its tensors from here, so
a file that the index does not name never counts.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from titan_gdn.checkpoint.fused_experts import matrices

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LFS_POINTER = b"version https://git-lfs"

BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of an element, by the dtype's name in safetensors files."""


class ModelDirectoryError(ValueError):
    """A directory that is not a whole model. The message names the file and what is wrong with it."""


class TensorEntry(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        file: path of the file.
        dtype: as the file names it, such as "BF16" or "F8_E4M3".
        shape: the whole tensor's shape.
        begin: first byte of the data, counted from the beginning of the file.
        end: the byte after the last.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ModelDirectory:
    """What a directory of safetensors files holds.

    Attributes:
        path: the directory.
        config: the contents of `config.json`, None without such a file.
        tensors: the tensors that the index names; without an index, those of the only file. Tensors that
            hold all experts are replaced by one for each expert (see `fused_experts`).
        fused: the names of the tensors that hold all experts.
    """

    path: str
    config: dict[str, Any] | None
    tensors: dict[str, TensorEntry]
    fused: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: str) -> "ModelDirectory":
        """Reads the index and the header of each file that it names.

        Raises:
            ModelDirectoryError: a file is missing, incomplete or contradicts the index.
        """
        if not os.path.isdir(path):
            raise ModelDirectoryError(f'"{path}" is not a directory')
        config = os.path.join(path, "config.json")
        index = os.path.join(path, INDEX)
        read = _json_file(config) if os.path.lexists(config) else None
        tensors = _indexed(path, index) if os.path.lexists(index) else dict(_header(_only_file(path)))
        return cls(path, read, *_split(tensors))


def _split(tensors: dict[str, TensorEntry]) -> tuple[dict[str, TensorEntry], frozenset[str]]:
    """Returns tensors with one for each expert, and the names of those that held all experts."""
    result: dict[str, TensorEntry] = {}
    fused = set()
    for name, entry in tensors.items():
        parts = matrices(name, entry.shape, entry.end - entry.begin)
        if not parts:
            result[name] = entry
        for part in parts:
            if part.name in tensors:
                raise ModelDirectoryError(
                    f'"{entry.file}" holds all experts in {name}, and {part.name} is there, too'
                )
            begin, end = entry.begin + part.begin, entry.begin + part.end
            result[part.name] = TensorEntry(entry.file, entry.dtype, part.shape, begin, end)
            fused.add(name)
    return result, frozenset(fused)


def _only_file(path: str) -> str:
    """The file that holds the whole model of a directory without an index."""
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if SINGLE in names:
        return os.path.join(path, SINGLE)
    if len(names) == 1:
        return os.path.join(path, names[0])
    if names:
        raise ModelDirectoryError(
            f'"{path}" has {len(names)} *.safetensors files but no {INDEX}, which says which of them belong '
            "to the model"
        )
    raise ModelDirectoryError(f'"{path}" has no {INDEX} and no *.safetensors files')


def _indexed(path: str, index: str) -> dict[str, TensorEntry]:
    """The tensors that an index names."""
    names_of_file = _names_of_files(index)
    files = {name: os.path.join(path, name) for name in names_of_file}
    if missing := [name for name, file in files.items() if not os.path.isfile(file)]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelDirectoryError(f'"{index}" names {missing[0]}{more}, which the directory does not have')
    tensors: dict[str, TensorEntry] = {}
    listed = {key: name for name, keys in names_of_file.items() for key in keys}
    for name, file in files.items():
        for key, entry in _header(file):
            if listed.get(key) == name:
                tensors[key] = entry
            elif key in listed:
                raise ModelDirectoryError(
                    f'tensor {key} is in two files, "{file}" and "{files[listed[key]]}"; "{index}" names the '
                    "latter"
                )
    if lacking := [key for key in listed if key not in tensors]:
        more = f" (and {len(lacking) - 1} more such tensors)" if len(lacking) > 1 else ""
        raise ModelDirectoryError(
            f'"{index}" says that tensor {lacking[0]} is in {listed[lacking[0]]}, but it is not{more}'
        )
    return {key: tensors[key] for key in listed}


def _names_of_files(index: str) -> dict[str, list[str]]:
    """The names of the files that an index names, each with the names of its tensors."""
    weight_map = _json_file(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelDirectoryError(f'"{index}" has no weight_map, which says which file holds which tensor')
    files: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or os.path.basename(name) != name:
            raise ModelDirectoryError(
                f'"{index}": tensor {key}: expected the name of a *.safetensors file in the same directory, '
                f"got {json.dumps(name)}"
            )
        files.setdefault(name, []).append(key)
    return files


def _json_file(path: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise ModelDirectoryError(f'"{path}" cannot be read: {error.strerror}') from error
    return _json_object(path, text, "the file")


def _json_object(path: str, text: bytes, what: str) -> dict[str, Any]:
    _refuse_empty_or_pointer(path, text)

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ModelDirectoryError(f'"{path}" names {next(k for k in keys if keys.count(k) > 1)} twice')
        return table

    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelDirectoryError(f'"{path}": {what} is not JSON: {error}') from error
    if not isinstance(value, dict):
        raise ModelDirectoryError(f'"{path}": {what} is not a JSON object')
    return value


def _refuse_empty_or_pointer(path: str, beginning: bytes) -> None:
    if not beginning:
        raise ModelDirectoryError(f'"{path}" is empty')
    if beginning.startswith(LFS_POINTER):
        raise ModelDirectoryError(
            f'"{path}" is a Git LFS pointer and not the file itself: run "git lfs pull" in its repository'
        )


def _header(path: str) -> Iterator[tuple[str, TensorEntry]]:
    """Yields the tensors of a safetensors file, after checking that the file is as long as they need."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            beginning = file.read(len(LFS_POINTER))
            _refuse_empty_or_pointer(path, beginning)
            start = 8 + int.from_bytes(beginning[:8], "little")
            if size < start or size < 8:
                raise ModelDirectoryError(
                    f'"{path}" is truncated or no safetensors file: it has {size} bytes, and its header '
                    f"alone would end at byte {start}"
                )
            file.seek(8)
            text = file.read(start - 8)
    except OSError as error:
        raise ModelDirectoryError(f'"{path}" cannot be read: {error.strerror}') from error
    header = _json_object(path, text, "the header")
    header.pop("__metadata__", None)
    entries = {key: _entry(path, key, value, start) for key, value in header.items()}
    end = start
    for key, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
        if entry.begin != end:
            raise ModelDirectoryError(
                f'"{path}": tensor {key} begins at byte {entry.begin}; expected {end}, where the data before '
                "it end"
            )
        end = entry.end
    if size != end:
        problem = "is truncated" if size < end else "has data that its header does not name"
        raise ModelDirectoryError(f'"{path}" {problem}: it has {size} bytes, its header describes {end}')
    yield from entries.items()


def _entry(path: str, key: str, value: Any, start: int) -> TensorEntry:
    """The entry of a tensor in a header; `start` is the position of the first byte after the header."""
    invalid = ModelDirectoryError(
        f'"{path}": tensor {key} has no valid dtype, shape and data_offsets in the header'
    )
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise invalid from None
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or not all(type(number) is int and number >= 0 for number in numbers):
        raise invalid
    if dtype not in BITS:
        raise ModelDirectoryError(f'"{path}": tensor {key} has dtype "{dtype}". Possible: {", ".join(BITS)}.')
    if 8 * (end - begin) != math.prod(shape) * BITS[dtype]:
        raise ModelDirectoryError(
            f'"{path}": tensor {key} has {end - begin} bytes, which is not the size of {list(shape)} '
            f"in {dtype}"
        )
    return TensorEntry(path, dtype, shape, start + begin, start + end)
