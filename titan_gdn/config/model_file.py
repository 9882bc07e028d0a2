"""The `config.json` beside the weights: it builds the model, or the model is compared with it.

The directory that gives the weights is `checkpoint.initial_load_path` if Hugging Face files are loaded and it
is set, and `model.hf_assets_path` otherwise.
"""

import json
import os
from types import ModuleType
from typing import Any, NamedTuple

from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_gdn.config.checkpoint_checks import starts_from_hugging_face
from titan_gdn.config.source import ConfigError
from titan_gdn.models.hybrid.hf_config import FROM_HF, ConfigJson, ConfigJsons, Difference, Fields, text


class ModelFile(NamedTuple):
    """A `config.json`.

    Attributes:
        key: the key of the run that names its folder.
        path: the file.
        fields: its content.
    """

    key: str
    path: str
    fields: dict[str, Any]


def flavors_of(package: ModuleType) -> list[str]:
    """The possible values of `model.flavor` for a family."""
    return [*package.flavors, *([FROM_HF] if hasattr(package, "config_json") else [])]


def read_model_file(
    hf_assets_path: str, initial_load_path: str | None, initial_load_in_hf: bool
) -> ModelFile:
    """Read the `config.json` beside the weights.

    Raises:
        ConfigError: There is none, or it is not JSON.
    """
    key, folder = "model.hf_assets_path", hf_assets_path
    if initial_load_in_hf and initial_load_path:
        key, folder = "checkpoint.initial_load_path", initial_load_path
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise ConfigError(
            f'{key} = "{folder}": there is no config.json, which says what model the weights are of; put the '
            "one of the published model there, or set checkpoint.initial_load_path or model.hf_assets_path "
            "to a folder that has it"
        )
    try:
        with open(path, encoding="utf-8") as stream:
            fields = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f'{key} = "{folder}": config.json cannot be read: {error}') from error
    if not isinstance(fields, dict):
        raise ConfigError(f'{key} = "{folder}": config.json is not a table of fields')
    return ModelFile(key, path, fields)


def arguments_of(file: ModelFile, config_json: ConfigJson | ConfigJsons) -> Any:
    """The arguments of the model that a `config.json` describes.

    Raises:
        ConfigError: The model is of another family, or the file says what is not supported.
    """
    try:
        arguments = config_json.arguments_of(file.fields)
    except ValueError as error:
        raise ConfigError(f"{file.path} ({file.key}): {error}") from error
    logger.info(f"The model is that of {file.path} ({file.key})")
    _warn_of_unknown(file, config_json)
    return arguments


def check_model_file(config: Trainer.Config, package: ModuleType, overridden: set[str]) -> None:
    """Check that a run starts with weights of its own model, according to the `config.json` beside them.

    Args:
        config: The run.
        package: The family of its model.
        overridden: Names of the arguments in `[model.overrides]`, which win over the file.

    Raises:
        ConfigError: The model differs from the file in an argument that is not overridden.
    """
    checkpoint, spec = config.checkpoint, config.model_spec
    if not hasattr(package, "config_json") or spec is None or not starts_from_hugging_face(config):
        return
    flavor, config_json = spec.flavor, package.config_json
    file = read_model_file(config.hf_assets_path, checkpoint.initial_load_path, checkpoint.initial_load_in_hf)
    model: Any = spec.model
    try:
        differences = config_json.differences(model.arguments, file.fields)
        theirs = Fields(config_json.fields_of(file.fields))
    except ValueError as error:
        raise ConfigError(f"{file.path} ({file.key}): {error}") from error
    if (
        "n_layers" in overridden
    ):  # which cuts the lists of layers; the tensors of each layer are compared later
        overridden = overridden | {"layer_types", "mlp_only_layers"}
    changed = set() if flavor == FROM_HF else set(package.flavors[flavor].changes)
    wrong = [one for one in differences if not {*one.decided_by} & (overridden | changed)]
    if wrong:
        listed = "; ".join(
            f"{one.argument} = {text(one.ours)} in the flavor, {_theirs(one, theirs)} in the file"
            for one in wrong
        )
        raise ConfigError(
            f'model.flavor = "{flavor}" differs from {file.path} ({file.key}): {listed}. To train the model '
            f'of the file, set model.flavor = "{FROM_HF}"; to change it on purpose, write the value in '
            "[model.overrides]."
        )
    for one in differences:
        where = "[model.overrides]" if {*one.decided_by} & overridden else f'model.flavor = "{flavor}"'
        logger.warning(
            f"{one.argument} = {text(one.ours)} in {where} wins over {_theirs(one, theirs)} in {file.path}"
        )
    if flavor != FROM_HF:
        _warn_of_unknown(file, config_json)


def _theirs(one: Difference, fields: Fields) -> str:
    """The value of an argument according to the file, with the field that says so."""
    if one.path not in fields:
        return f"{text(one.theirs)} ({one.path} is not set)"
    return f"{text(one.theirs)} ({one.path} = {text(fields[one.path])})"


def _warn_of_unknown(file: ModelFile, config_json: ConfigJson | ConfigJsons) -> None:
    if unknown := config_json.unknown_fields(file.fields):
        logger.warning(
            f"{file.path}: unknown fields, which are ignored: {', '.join(unknown)}. If one of them changes "
            "the model, this run trains another one"
        )
