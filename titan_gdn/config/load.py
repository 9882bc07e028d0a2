"""Reads a TOML file and a command line into TorchTitan's `Trainer.Config`.

TorchTitan 0.3 is configured by Python functions. Here a run is a TOML file with TorchTitan's own field names,
and the command line overrides single keys. The order of precedence is: command line, file, defaults of the
model's flavor. Names and values are checked against TorchTitan's dataclasses before any process group or
weight exists. No key is silently ignored: TorchTitan gave up TOML because misspelled keys were (its pull
request 2386).

A value passes through the modules of this package in this order: `source` reads it and remembers where it was
written, `types` converts it, `fields` knows the keys of a section, `sections` and `optimizer` apply it, and
`run_checks` and `checkpoint_checks` check the whole configuration.
"""

import importlib
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from torchtitan.trainer import Trainer

from titan_gdn import models
from titan_gdn.assets import BYTE_TOKENIZER
from titan_gdn.config.fields import fields_of, values
from titan_gdn.config.key_places import with_places
from titan_gdn.config.model_file import arguments_of, check_model_file, flavors_of, read_model_file
from titan_gdn.config.run_checks import check, check_run
from titan_gdn.config.sections import ALIASES, JOB, MODEL, SECTIONS, configured, converters, required
from titan_gdn.config.source import ConfigError, SourcedValue, UnknownKeyError, built, read
from titan_gdn.config.types import converted
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.hf_config import FROM_HF

__all__ = ["ConfigError", "defaults", "load_config"]

OWN_SECTIONS = ("job", "model", "linear_attention", "quantize")
"""Sections that are not fields of `Trainer.Config`."""


def load_config(argv: list[str], world_size: int, here: bool = True) -> Trainer.Config:
    """The configuration of a run, from `--job.config_file FILE.toml [--section.key value ...]`.

    The sections are `[job]` (`dump_folder`; `description`, a string for the reader, which is dropped),
    `[model]` (`name`, `flavor`, `hf_assets_path`, and `[model.overrides]`, arguments of the flavor's
    builder; the flavor "from_hf" takes the others from the `config.json` beside the weights),
    `[linear_attention]`, `[quantize.linear]` and `[quantize.experts]` (`name`, and the fields of that
    TorchTitan converter), and the fields of `Trainer.Config` by their names. `[optimizer]` also takes
    `name` and the optimizer's own arguments (`lr`, `weight_decay`, ...) for all parameter groups, and
    `[activation_checkpoint]` takes a `mode`. In the file and on the command line, "none" is the value None.

    Args:
        argv: The command line without the program's name. `--help` prints the usage and exits.
        world_size: Number of ranks.
        here: Whether the run starts on this machine, so that its files and devices are checked. If not, the
            run is only planned.

    Raises:
        ConfigError: The command line, the file, a name or a value is wrong, or values contradict each other.
    """
    root = read(argv)
    try:
        config = _configured(root)
    except UnknownKeyError as error:
        raise _with_places(error, root) from None
    try:
        # Before the tensors are looked at: a field says more than the shape that follows from it.
        model = root.table["model"]
        package = models.load(required(model, "name", models.MODELS))
        overrides = model.table["overrides"].table if "overrides" in model.table else {}
        check_model_file(config, package, {*overrides})
        (check if here else check_run)(config, world_size)
    except ConfigError as error:
        raise root.error(str(error)) from error
    return config


def _configured(root: SourcedValue) -> Trainer.Config:
    """The configuration that the tables of a file make of the flavor's."""
    sections = dict(root.table)
    for name, table in sections.items():
        if name not in (*OWN_SECTIONS, *SECTIONS, *ALIASES):
            raise table.unknown([*OWN_SECTIONS, *SECTIONS])
    job, model, linear_attention, quantize = (
        sections.pop(name, SourcedValue({}, root.source, (name,))) for name in OWN_SECTIONS
    )
    checkpoint = sections.get("checkpoint", SourcedValue({}, root.source))
    config = _defaults(model, linear_attention, quantize, checkpoint)
    changes = values(job.table, JOB)
    changes.pop("description", None)
    for name, table in sections.items():
        field = ALIASES.get(name, name)
        if field in changes:
            alias = next(alias for alias, section in ALIASES.items() if section == field)
            raise table.error(f"[{alias}] and [{field}] are the same section: write one of them")
        changes[field] = configured(getattr(config, field), table)
    return built(root, replace, config, **changes)


def _with_places(error: UnknownKeyError, root: SourcedValue) -> ConfigError:
    """The error of an unknown key, with the sections that have it; not if the model is unknown, too."""
    with suppress(ConfigError):
        name = required(root.table.get("model", SourcedValue({}, root.source)), "name", models.MODELS)
        return with_places(error, defaults(name, next(iter(models.load(name).flavors))))
    return error


def defaults(name: str, flavor: str, hf_assets_path: str | None = None) -> Trainer.Config:
    """The configuration of a model's flavor before any file changes it.

    Args:
        name: Name of the model.
        flavor: Name of the flavor.
        hf_assets_path: The folder whose `config.json` describes the model, for the flavor "from_hf".

    Raises:
        ConfigError: There is no such model or flavor.
    """
    own = {"name": name, "flavor": flavor}
    if hf_assets_path is not None:
        own["hf_assets_path"] = hf_assets_path
    model = {key: SourcedValue(value, "", ("model", key)) for key, value in own.items()}
    empty = SourcedValue({}, "")
    return _defaults(SourcedValue(model, "", ("model",)), empty, empty, empty)


def _defaults(
    model: SourcedValue, linear_attention: SourcedValue, quantize: SourcedValue, checkpoint: SourcedValue
) -> Trainer.Config:
    """The flavor's configuration, with the sections that the model is built from applied."""
    own = {key: given for key, given in model.table.items() if key != "overrides"}
    own = values(own, MODEL, also=["overrides"])
    package = models.load(required(model, "name", models.MODELS))
    flavor = required(model, "flavor", flavors_of(package))
    if flavor == FROM_HF:
        arguments = _arguments(model, package, own.get("hf_assets_path", BYTE_TOKENIZER), checkpoint)
        given = {"arguments": arguments}
    else:
        arguments, given = package.flavors[flavor].arguments, {}
    overrides = model.table.get("overrides", SourcedValue({}, model.source, ("model", "overrides")))
    registry = importlib.import_module(f"{package.__name__}.config_registry")
    config = built(
        overrides,
        registry.trainer_config,
        flavor,
        linear_attention=configured(LinearAttentionConfig(), linear_attention),
        converters=converters(quantize),
        **given,
        **values(overrides.table, fields_of(type(arguments))),
    )
    return replace(config, hf_assets_path=own.get("hf_assets_path", config.hf_assets_path))


def _arguments(
    model: SourcedValue, package: ModuleType, hf_assets_path: str, checkpoint: SourcedValue
) -> Any:
    """The arguments of the flavor "from_hf": those of the `config.json` beside the weights."""
    kinds = {"initial_load_path": str | None, "initial_load_in_hf": bool}
    loaded = {key: converted(given, kinds[key]) for key, given in checkpoint.table.items() if key in kinds}
    file = built(
        model,
        read_model_file,
        hf_assets_path,
        loaded.get("initial_load_path"),
        loaded.get("initial_load_in_hf", False),
    )
    return built(model, arguments_of, file, package.config_json)
