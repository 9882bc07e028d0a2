"""What a run begins from: whether it is there, and is what the run wants.

As TorchTitan's `DCPCheckpointManager.load` looks for it: the newest step of the run's own folder, or the one
that is named; else `initial_load_path`, or Hugging Face files. Folders that are no local paths are not looked
into.
"""

import os
import re

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.components.checkpointer import TRAIN_STATE
from torchtitan.trainer import Trainer

DCP, HUGGING_FACE = ".metadata", "model.safetensors.index.json"


def check_checkpoint(config: Trainer.Config) -> None:
    """Refuse the run that would not find what it is to begin from.

    Raises:
        ValueError: names the key, and what is there.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    own = os.path.join(config.dump_folder, checkpoint.folder)
    if "://" in own:
        return
    steps = _steps(own)
    if checkpoint.load_step != -1 and checkpoint.load_step not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(
            f"[checkpoint] load_step = {checkpoint.load_step}: no such step was saved in {own!r}; possible "
            f"are -1, for the newest, and {there}"
        )
    if steps:
        _check_step(own, max(steps) if checkpoint.load_step == -1 else checkpoint.load_step, config)
    else:
        _check_initial(config)


def _steps(folder: str) -> set[int]:
    """The steps that were saved whole."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {
        int(match[1])
        for name in names
        if (match := re.search(r"step-(\d+)", name))
        and any(os.path.isfile(os.path.join(folder, name, file)) for file in (DCP, HUGGING_FACE))
    }


def _check_step(own: str, step: int, config: Trainer.Config) -> None:
    """What was saved last may be the model alone."""
    folder = os.path.join(own, f"step-{step}")
    if step == 0 or config.checkpoint.exclude_from_loading:
        return
    if not os.path.isfile(os.path.join(folder, DCP)):
        what = "Hugging Face files"
    else:
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        if any(key.startswith(TRAIN_STATE) for key in saved):
            return
        what = "the model alone"
    raise ValueError(
        f"[checkpoint] folder: {folder!r} holds {what} (last_save_model_only), with which no run goes on. "
        "Name an earlier step as load_step, or another folder; a run that begins with these weights names "
        "them as initial_load_path."
    )


def _check_initial(config: Trainer.Config) -> None:
    """Weights that a run begins with."""
    checkpoint = config.checkpoint
    key = "[checkpoint] initial_load_path" if checkpoint.initial_load_path else "[model] hf_assets_path"
    folder = checkpoint.initial_load_path or config.hf_assets_path
    if "://" in folder:
        return
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if checkpoint.initial_load_in_hf:
        if not any(name.endswith(".safetensors") for name in names):
            raise ValueError(
                f'{key} = "{folder}": [checkpoint] initial_load_in_hf wants *.safetensors files there'
            )
    elif checkpoint.initial_load_path and DCP not in names:
        raise ValueError(
            f'{key} = "{folder}": expected the folder of a step, with {DCP} in it, or *.safetensors files '
            "and initial_load_in_hf = true"
        )
