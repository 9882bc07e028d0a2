"""Compares the model in a step (DCP) with the one that a run has, from the step's `.metadata` alone.

DCP loads whatever the model asks for: a step with more layers loads without a word, one with fewer or wider
ones fails on every rank after the model is built.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titan_gdn.checkpoint.accounting import compare_names, some
from titan_gdn.checkpoint.export import recorded_tying
from titan_gdn.checkpoint.steps import METADATA
from titan_gdn.checkpoint.trusted import StepError, StepReader

_OPTIMIZER = "optimizer."
_NOT_MODEL = (_OPTIMIZER, "lr_scheduler.", "dataloader.", "train_state.")
_HEAD, _EMBEDDING = "lm_head.weight", "tok_embeddings.weight"


def read_metadata(step: str) -> Metadata:
    """Reads which tensors a step holds, and checks that their files are there.

    Raises:
        StepError: `.metadata` cannot be read, or a file is missing or too short.
    """
    metadata = StepReader(step).read_metadata()
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = os.path.join(step, name)
        if not os.path.isfile(path):
            raise StepError(f'"{path}" is missing, and {METADATA} says that the step needs it')
        if (size := os.path.getsize(path)) < end:
            raise StepError(f'"{path}" is truncated: {size} bytes, and {METADATA} says at least {end}')
    return metadata


def account_step(step: str, shapes: dict[str, tuple[int, ...]], tied: bool) -> Metadata:
    """Finds each tensor of a model in a step.

    Args:
        step: the folder of the step.
        shapes: the names and shapes of the model's tensors.
        tied: whether the model's output layer is its embedding.

    Returns:
        The metadata of the step.

    Raises:
        StepError: the step holds another model, or cannot be read.
    """
    metadata = read_metadata(step)
    saved = _Saved.of(step, metadata)
    if problems := [*_tying(saved, tied), *_differences(saved.shapes, shapes)]:
        raise StepError(" ".join([f'"{step}":', *problems]))
    return metadata


class _Saved(NamedTuple):
    """The model in a step.

    Attributes:
        shapes: the names and shapes of its tensors.
        tied: whether its output layer is its embedding, None if nothing says so.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: bool | None

    @classmethod
    def of(cls, step: str, metadata: Metadata) -> "_Saved":
        entries: dict[str, Any] = metadata.state_dict_metadata
        shapes = {
            key: tuple(entry.size)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(_NOT_MODEL)
        }
        # Both names are in the state dict of a tied model, but the optimizer has one parameter.
        if any(key.startswith(f"{_OPTIMIZER}state.{_EMBEDDING}") for key in entries):
            return cls(shapes, not any(key.startswith(f"{_OPTIMIZER}state.{_HEAD}") for key in entries))
        return cls(shapes, recorded_tying(step))


def _tying(saved: _Saved, tied: bool) -> Iterator[str]:
    if saved.tied is not None and saved.tied != tied:
        of_step, of_model = ("tied", "untied") if saved.tied else ("untied", "tied")
        yield (
            f"the step has {of_step} embeddings, the model has {of_model} ones: set "
            f"model.overrides.tie_word_embeddings = {str(saved.tied).lower()}."
        )


def _differences(saved: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yields a sentence for each way in which names or shapes differ."""
    missing, unknown, layers = compare_names(saved, shapes)
    if layers:
        yield f"the step has {layers}"
    if missing:
        yield f"tensors of the model are missing in the step: {some(missing)}."
    if unknown:
        yield f"tensors of the step are unknown to the model: {some(unknown)}."
    other = [
        f"{key}: the model has {list(shape)}, the step has {list(saved[key])}"
        for key, shape in shapes.items()
        if key in saved and saved[key] != shape
    ]
    if other:
        yield f"{some(other, '; ')}."
