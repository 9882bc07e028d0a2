"""Checks the checkpoint that a run resumes from, or the weights that it starts with.

The order is that of TorchTitan's `DCPCheckpointManager.load`: the newest step in the run's own folder, or the
step that is named; without a step, `initial_load_path` or Hugging Face files. Remote folders are not checked.
"""

import os

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components.checkpointer import TRAIN_STATE
from torchtitan.trainer import Trainer

from titan_gdn.checkpoint.export import recorded_source
from titan_gdn.checkpoint.model_directory import ModelDirectory
from titan_gdn.checkpoint.step_accounting import StepError, account_step, read_metadata
from titan_gdn.checkpoint.steps import METADATA, complete_steps, incomplete_steps, path_of
from titan_gdn.config.source import ConfigError
from titan_gdn.models.hybrid.model import HybridModel
from titan_gdn.models.hybrid.state_dict_adapter import HybridStateDictAdapter


def check_checkpoint(config: Trainer.Config) -> None:
    """Check that the checkpoint or weights which a run would load exist and suit it.

    Raises:
        ConfigError: They do not; the message names the key and what the folder holds.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    own = os.path.join(config.dump_folder, checkpoint.folder)
    if "://" in own:  # whether it holds a step is not known
        if checkpoint.last_save_in_hf:
            raise ConfigError(
                f'checkpoint.last_save_in_hf = true: "{own}" is remote, but Hugging Face files are written '
                "to local folders only"
            )
        _check_initial(config)
        return
    steps = complete_steps(own)
    if checkpoint.load_step != -1 and checkpoint.load_step not in steps:
        possible = ", ".join(["-1 (the newest)", *map(str, steps)])
        raise ConfigError(
            f'checkpoint.load_step = {checkpoint.load_step}: no such step was saved in "{own}". '
            f"Possible: {possible}."
        )
    if steps:
        step = max(steps) if checkpoint.load_step == -1 else checkpoint.load_step
        _check_step(own, step, config)
        _check_export(path_of(own, step), config)
    else:
        _check_incomplete(own)
        _check_initial(config)
        _check_export(None if checkpoint.initial_load_in_hf else checkpoint.initial_load_path, config)


def _check_incomplete(own: str) -> None:
    """Check that a folder without a complete step has at most one other, whose save was interrupted."""
    begun = incomplete_steps(own)
    if len(begun) > 1:
        names = ", ".join(f"step-{step}" for step in begun)
        raise ConfigError(
            f'checkpoint.folder: none of the steps in "{own}" is complete ({names}): their {METADATA} is '
            "missing. Restore these files, or remove the folders to start a new run."
        )


def starts_from_hugging_face(config: Trainer.Config) -> bool:
    """Whether a run starts with Hugging Face weights of a local folder, not with a step of its own."""
    checkpoint = config.checkpoint
    own = os.path.join(config.dump_folder, checkpoint.folder)
    folder = checkpoint.initial_load_path or config.hf_assets_path
    if not checkpoint.enable or not checkpoint.initial_load_in_hf or "://" in folder:
        return False
    names = os.listdir(folder) if os.path.isdir(folder) else []
    resumes = "://" not in own and complete_steps(own)
    return any(".safetensors" in name for name in names) and not resumes


def _check_step(own: str, step: int, config: Trainer.Config) -> None:
    """Check that a step holds this model, and the training state: the last step of a run may hold no more."""
    folder = path_of(own, step)
    if step > config.training.steps and not config.checkpoint.load_only:
        raise ConfigError(
            f'training.steps = {config.training.steps}: "{folder}" has taken {step} already. Set more steps, '
            "checkpoint.load_step to an earlier step, or checkpoint.folder to another folder."
        )
    if not os.path.isfile(os.path.join(folder, METADATA)):
        what = "Hugging Face files"
    else:
        saved = _account_step(f'checkpoint.folder = "{config.checkpoint.folder}"', folder, config)
        if step != 0:  # of which TorchTitan loads the model alone
            _check_data_set(folder, saved, config)
        state_is_loaded = step != 0 and not config.checkpoint.exclude_from_loading
        if not state_is_loaded or any(key.startswith(TRAIN_STATE) for key in saved.state_dict_metadata):
            return
        what = "the model alone"
    raise ConfigError(
        f'checkpoint.folder = "{config.checkpoint.folder}": "{folder}" holds {what} '
        "(checkpoint.last_save_model_only), from which a run cannot resume. Set checkpoint.load_step to an "
        "earlier step, or checkpoint.folder to another folder; to start a new run with these weights, set "
        "checkpoint.initial_load_path to theirs."
    )


def _check_data_set(folder: str, saved: Metadata, config: Trainer.Config) -> None:
    """Check that the saved position in the data is one of the data set that the run reads."""
    keys = [key for key in saved.state_dict_metadata if key.startswith("dataloader.")]
    excluded = "dataloader" in config.checkpoint.exclude_from_loading
    dataset = config.dataloader.dataset
    if keys and not excluded and (keys == ["dataloader.stream"]) != (dataset == "text_files"):
        raise ConfigError(
            f'dataloader.dataset = "{dataset}": "{folder}" was saved by a run of another data set, whose '
            "position does not apply. Set its data set, or start with the first row: "
            'checkpoint.exclude_from_loading = ["dataloader"].'
        )


def _check_initial(config: Trainer.Config) -> None:
    """Check the weights that a new run starts with."""
    checkpoint = config.checkpoint
    key = "checkpoint.initial_load_path" if checkpoint.initial_load_path else "model.hf_assets_path"
    folder = checkpoint.initial_load_path or config.hf_assets_path
    if "://" in folder:
        return
    if checkpoint.initial_load_in_hf_quantized:
        raise ConfigError(
            "checkpoint.initial_load_in_hf_quantized = true is not supported: quantized weights are not "
            "dequantized. Convert the files to bfloat16 and remove the key."
        )
    names = os.listdir(folder) if os.path.isdir(folder) else []
    if checkpoint.initial_load_in_hf:
        _account(f'{key} = "{folder}"', folder, config)
    elif checkpoint.initial_load_path and METADATA not in names:
        raise ConfigError(
            f'{key} = "{folder}": expected the folder of a step, with {METADATA} in it, or *.safetensors '
            "files and checkpoint.initial_load_in_hf = true"
        )
    elif checkpoint.initial_load_path:
        _account_step(f'{key} = "{folder}"', folder, config)


def _check_export(step: str | None, config: Trainer.Config) -> None:
    """Check that the last save can write a model directory, before the run rather than at its end.

    Args:
        step: the folder of the step that the run starts from, None if from none.
        config: the configuration.
    """
    checkpoint = config.checkpoint
    if not checkpoint.last_save_in_hf or checkpoint.load_only:
        return
    initial = checkpoint.initial_load_path or config.hf_assets_path if checkpoint.initial_load_in_hf else None
    source = initial if step is None else recorded_source(step, initial)
    if source is not None and step is not None:  # without a step, `_check_initial` has looked at the files
        key = (
            "checkpoint.last_save_in_hf = true copies config.json, tokenizer files and kept tensors from the "
            f'directory that the weights of "{step}" came from (if it was moved, set '
            "checkpoint.initial_load_in_hf = true and checkpoint.initial_load_path to its new place)"
        )
        _account(key, source, config)
    adapter = _adapter(config)
    try:
        if adapter is not None:
            if source is None:  # else the account of its tensors has asked for the names
                adapter.hf_shapes()
            adapter.beside(None if source is None else ModelDirectory.read(source))
    except ValueError as error:
        raise ConfigError(f"checkpoint.last_save_in_hf = true: {error}") from error


def _account_step(key: str, step: str, config: Trainer.Config) -> Metadata:
    """Check that a step holds each tensor of the model, and nothing unknown. Return what it holds."""
    spec = config.model_spec
    assert spec is not None
    try:
        if not isinstance(spec.model, HybridModel.Config):
            return read_metadata(step)
        with torch.device("meta"):
            state = spec.model.build().state_dict()
        shapes = {name: tuple(x.shape) for name, x in state.items()}
        return account_step(step, shapes, spec.model.enable_weight_tying)
    except StepError as error:
        raise ConfigError(f"{key}: {error}") from error


def _account(key: str, folder: str, config: Trainer.Config) -> None:
    """Check that Hugging Face files hold each tensor of the model, and nothing unknown."""
    adapter = _adapter(config)
    try:
        directory = ModelDirectory.read(folder)
        if adapter is not None:
            adapter.account(directory)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


def _adapter(config: Trainer.Config) -> HybridStateDictAdapter | None:
    """The adapter of the model to Hugging Face files, None if it has none of ours."""
    spec = config.model_spec
    assert spec is not None
    if spec.state_dict_adapter is None or not issubclass(spec.state_dict_adapter, HybridStateDictAdapter):
        return None
    return spec.state_dict_adapter(spec.model, None)
