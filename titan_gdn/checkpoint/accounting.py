"""Compares the tensors of a directory with those that a model expects, before anything is loaded.

Each tensor of the directory is either loaded, or kept as it is, or an error. Each tensor of the model comes
from exactly one in the directory.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_gdn.checkpoint.fused_experts import fused_name, holds_all_experts
from titan_gdn.checkpoint.model_directory import ModelDirectory, ModelDirectoryError, TensorEntry

DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes of the tensors that can be loaded."""
SHOWN = 3
"""The most tensors that a message names."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Expected:
    """What a model expects of a directory.

    Attributes:
        shapes: the model's tensors, by their names in the files, with their shapes there.
        vectors: those of `shapes` that files may also hold with other dimensions of 1, or without them.
        kept: beginnings of the names of tensors that are not trained.
        canonical: maps a name in a file to the name in `shapes`, for families with several spellings.
    """

    shapes: dict[str, tuple[int, ...]]
    vectors: frozenset[str] = frozenset()
    kept: tuple[str, ...] = ()
    canonical: Callable[[str], str] = str


@dataclass(frozen=True)
class Account:
    """What becomes of the tensors of a directory.

    Attributes:
        loaded: the model's tensors, by their names in `Expected.shapes`, with the names and the entries in
            the directory.
        kept: the tensors that are not trained, by their names in the directory.
    """

    loaded: dict[str, tuple[str, TensorEntry]]
    kept: dict[str, TensorEntry]

    @property
    def kept_bytes(self) -> int:
        """The size of the kept tensors."""
        return sum(entry.end - entry.begin for entry in self.kept.values())


def account(directory: ModelDirectory, expected: Expected) -> Account:
    """Finds each tensor of a model in a directory.

    Raises:
        ModelDirectoryError: tensors are missing, unknown, of another shape or of a dtype that cannot be
            loaded. The message has one sentence for each kind of problem.
    """
    kept = {name: entry for name, entry in directory.tensors.items() if name.startswith(expected.kept)}
    given: dict[str, tuple[str, TensorEntry]] = {}
    for name, entry in directory.tensors.items():
        if name in kept:
            continue
        key = expected.canonical(name)
        if key in given:
            raise ModelDirectoryError(
                f'"{directory.path}" holds one tensor of the model twice, as {given[key][0]} and as {name}'
            )
        given[key] = name, entry
    _refuse_formats(given)
    _refuse_fused(directory, expected)
    if problems := [*_names(given, expected.shapes), *_shapes_and_dtypes(given, expected)]:
        raise ModelDirectoryError(" ".join([f'"{directory.path}"{_model_type(directory)}:', *problems]))
    return Account(given, kept)


def _model_type(directory: ModelDirectory) -> str:
    """What config.json calls the model, for a message about a model that is not ours."""
    model_type = (directory.config or {}).get("model_type")
    return "" if model_type is None else f' (config.json: model_type = "{model_type}")'


def _refuse_formats(given: dict[str, tuple[str, TensorEntry]]) -> None:
    """Refuse ways to store a model that need a conversion."""
    quantized = [name for name, entry in given.values() if name.endswith("weight_scale_inv")]
    if quantized:
        raise ModelDirectoryError(
            f'"{_file_of(given, quantized[0])}" is quantized: {some(quantized)} hold scales of float8 '
            "weights, which are not applied when weights are loaded. Convert the files to bfloat16 first."
        )


def _refuse_fused(directory: ModelDirectory, expected: Expected) -> None:
    """Refuse tensors that hold all experts if the family's files have none."""
    if any(fused_name(name) for name in expected.shapes):
        return
    # A tensor of another shape than experts have is not split, and so is still among the tensors.
    fused = sorted(name for name in (*directory.fused, *directory.tensors) if holds_all_experts(name))
    if trained := [name for name in fused if not name.startswith(expected.kept)]:
        raise ModelDirectoryError(
            f'"{directory.path}" holds all experts of a layer in one tensor: {some(trained)}. '
            "Files need a tensor for each expert, as save_pretrained of transformers writes them: load the "
            "directory with from_pretrained and save it with save_pretrained."
        )


def _file_of(given: dict[str, tuple[str, TensorEntry]], name: str) -> str:
    return next(entry.file for own, entry in given.values() if own == name)


def compare_names(
    given: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[list[str], list[str], str | None]:
    """Compares the names of the tensors that a checkpoint has with those that a model expects.

    Returns:
        The missing names and the unknown ones, without those of layers that only one side has; and what to
        say of these layers, None if both sides have the same.
    """
    missing = [key for key in expected if key not in given]
    unknown = [key for key in given if key not in expected]
    theirs, ours = layers_of(given), layers_of(expected)
    if theirs == ours or not theirs or not ours:
        return missing, unknown, None
    differ = theirs ^ ours
    missing = [key for key in missing if not layers_of([key]) & differ]
    unknown = [key for key in unknown if not layers_of([key]) & differ]
    layers = f"layers {numbers(theirs)}, the model has layers {numbers(ours)} (model.overrides.n_layers)."
    return missing, unknown, layers


def _names(given: dict[str, tuple[str, TensorEntry]], shapes: dict[str, tuple[int, ...]]) -> Iterable[str]:
    """Yields a sentence for each way in which names differ."""
    missing, unknown, layers = compare_names(given, shapes)
    if layers:
        yield f"The files have {layers}"
    if _HEAD in unknown and any(key.endswith(_EMBEDDING) for key in shapes):
        yield (
            f"The files have {_HEAD}, but the model uses its embedding in place of it: set "
            "model.overrides.tie_word_embeddings = false."
        )
        unknown.remove(_HEAD)
    if _HEAD in missing and any(key.endswith(_EMBEDDING) for key in given):
        yield (
            f"The model's {_HEAD} is missing: in files of a model with tied embeddings there is none, so set "
            "model.overrides.tie_word_embeddings = true."
        )
        missing.remove(_HEAD)
    if missing:
        yield f"{_count(missing)} of the model {_are(missing)} missing: {some(missing)}."
    if unknown:
        names = [given[key][0] for key in unknown]
        where = os.path.basename(given[unknown[0]][1].file)
        yield (
            f"{_count(unknown)} of the files {_are(unknown)} unknown to the model: {some(names)} ({where})."
        )


def _shapes_and_dtypes(given: dict[str, tuple[str, TensorEntry]], expected: Expected) -> Iterable[str]:
    """Yields a sentence about shapes and one about dtypes, if they differ from what is possible."""
    shapes, dtypes = [], []
    for key, shape in expected.shapes.items():
        if key not in given:
            continue
        name, entry = given[key]
        where = f"{name} ({os.path.basename(entry.file)})"
        if not _fits(entry.shape, shape, key in expected.vectors):
            shapes.append(f"{where} has {list(entry.shape)}, the model needs {list(shape)}")
        if entry.dtype not in DTYPES:
            dtypes.append(f"{where} has {entry.dtype}")
    if shapes:
        yield f"{_count(shapes)} {_have(shapes)} another shape than the model needs: {some(shapes, '; ')}."
    if dtypes:
        yield (
            f"{_count(dtypes)} {_have(dtypes)} a dtype that cannot be trained: {some(dtypes, '; ')}. "
            f"Possible: {', '.join(DTYPES)}."
        )


def _fits(given: tuple[int, ...], wanted: tuple[int, ...], vector: bool) -> bool:
    """Whether a shape in a file is the one that is wanted; that of a vector may differ in dimensions of 1."""

    def without_1(shape: tuple[int, ...]) -> list[int]:
        return [size for size in shape if size != 1]

    return given == wanted or (vector and without_1(given) == without_1(wanted))


def layers_of(names: Iterable[str]) -> set[int]:
    """The numbers of the layers to which tensors belong."""
    return {int(found[1]) for name in names if (found := _LAYER.search(name))}


def numbers(given: set[int]) -> str:
    """`0 to 3` for 0, 1, 2 and 3; otherwise the numbers themselves."""
    first, last = min(given), max(given)
    whole = len(given) == last - first + 1
    return f"{first} to {last}" if whole else ", ".join(map(str, sorted(given)))


def some(items: list[str], separator: str = ", ") -> str:
    """The first of many."""
    more = f"{separator}and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return separator.join(items[:SHOWN]) + more


def _count(items: list[str]) -> str:
    return f"{len(items)} tensor{'' if len(items) == 1 else 's'}"


def _are(items: list[str]) -> str:
    return "is" if len(items) == 1 else "are"


def _have(items: list[str]) -> str:
    return "has" if len(items) == 1 else "have"
