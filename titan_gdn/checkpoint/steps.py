"""The folders of a run's steps: which of them are complete, and how one becomes incomplete or is purged.

A step is complete when a marker exists: `.metadata` of a distributed checkpoint (DCP), or the index of a
model directory. The marker is removed before anything else of the step changes, and written last, so that a
process may be killed at any moment.
"""

import os
import re
import shutil
from collections.abc import Iterable

from titan_gdn.checkpoint.model_directory import INDEX

METADATA = ".metadata"
"""The file that completes a distributed checkpoint. PyTorch writes it last."""
MARKERS = (METADATA, INDEX)
CHECKSUMS = "checksums.json"
"""How the name of a rank's file of checksums ends."""
DCP_FILES = (METADATA, CHECKSUMS, ".distcp")
STEP_FILES = (*MARKERS, CHECKSUMS, ".distcp", ".safetensors", "sharded")
"""The files that a save replaces, in the order in which they are removed: the markers first."""

_NAME = re.compile(r"step-(0|[1-9]\d*)")


class SaveError(RuntimeError):
    """A step could not be saved."""


def is_complete(folder: str) -> bool:
    """Whether a step was saved to the end."""
    return any(os.path.isfile(os.path.join(folder, marker)) for marker in MARKERS)


def complete_steps(folder: str) -> list[int]:
    """Returns the complete steps in the folder of a run, in ascending order."""
    return [step for step in _steps(folder) if is_complete(path_of(folder, step))]


def incomplete_steps(folder: str) -> list[int]:
    """Returns the steps in the folder of a run that have files of a distributed checkpoint, but no marker."""
    return [step for step in _steps(folder) if _is_begun(path_of(folder, step))]


def _is_begun(folder: str) -> bool:
    return not is_complete(folder) and any(name.endswith(".distcp") for name in os.listdir(folder))


def stale_steps(folder: str, keep: int) -> list[str]:
    """Returns the folders of the steps to purge, so that the newest complete ones remain.

    Args:
        folder: the folder of a run.
        keep: how many complete steps remain. A step that is not complete does not count, and is stale only
            if it is older than those that remain.
    """
    kept = complete_steps(folder)[-keep:]
    return [path_of(folder, step) for step in _steps(folder) if kept and step < kept[0]]


def path_of(folder: str, step: int) -> str:
    """Returns the folder of a step."""
    return os.path.join(folder, f"step-{step}")


def remove_files(folder: str, endings: Iterable[str]) -> None:
    """Removes from a folder the files and folders with these endings, in the order of the endings."""
    for ending in endings:
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            if name.endswith(ending):
                path = os.path.join(folder, name)
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


def _steps(folder: str) -> list[int]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
