"""How the tables of a file change the sections of a `Trainer.Config`.

Most sections are dataclasses whose fields are the keys. Some are not: the checkpointing policy, the data set
and the converters are chosen by name, and `[optimizer]` has keys for all parameter groups.
"""

from collections.abc import Collection
from dataclasses import is_dataclass, replace
from functools import singledispatch
from types import NoneType
from typing import Any, Literal

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.components.validate import Validator
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from titan_gdn.config.fields import fields_of, values
from titan_gdn.config.optimizer import param_groups, shared_keys
from titan_gdn.config.source import SourcedValue, built
from titan_gdn.config.types import converted
from titan_gdn.data.text_files import TextFilesDataLoader
from titan_gdn.models.hybrid.activation_checkpoint import MemoryBudgetAC, SelectiveAC
from titan_gdn.models.hybrid.quantize import PARTS

SECTIONS = (
    "dataloader training optimizer lr_scheduler parallelism activation_checkpoint compile checkpoint "
    "metrics profiler validator comm debug"
).split()
"""Fields of `Trainer.Config` that are sections of a file."""

JOB = {"dump_folder": str, "description": str}
MODEL = {"name": str, "flavor": str, "hf_assets_path": str}
"""Keys of `[job]` and `[model]`, which are no sections of `Trainer.Config`, with their types."""

ALIASES = {"profiling": "profiler"}
"""Names that sections had in TorchTitan 0.2, with the same keys."""

POLICIES = {
    "none": NoneType,
    "selective": SelectiveAC.Config,
    "full": FullAC.Config,
    "memory_budget": MemoryBudgetAC.Config,
}
"""Checkpointing policies by the `mode` of `[activation_checkpoint]`."""


@singledispatch
def configured(current: Any, table: SourcedValue) -> Any:
    """`current`, the dataclass of a section, with the changes of `table`.

    Raises:
        ConfigError: A key or value is wrong, or the dataclass refuses the values.
    """
    return _replaced(current, table)


def _replaced(current: Any, table: SourcedValue, handled: Collection[str] = (), **changes: Any) -> Any:
    """`current` with `changes` and the fields in `table`, except those in `handled`, which changes cover.

    All are set at once because fields may be valid only together.
    """
    annotations = fields_of(type(current))
    for name, given in table.table.items():
        if name in handled:
            continue
        if name not in annotations:
            raise given.unknown([*handled, *annotations])
        value = getattr(current, name)
        # Not by the annotation: all data loaders are annotated as their base class.
        nested = is_dataclass(value)
        changes[name] = configured(value, given) if nested else converted(given, annotations[name])
    return built(table, replace, current, **changes)


@configured.register(NoneType)
@configured.register(ActivationCheckpointing.Config)
def _activation_checkpoint(
    current: ActivationCheckpointing.Config | None, table: SourcedValue
) -> ActivationCheckpointing.Config | None:
    if mode := table.table.get("mode"):
        policy = POLICIES[converted(mode, Literal[tuple(POLICIES)])]
        current = current if isinstance(current, policy) else policy()
    if current is not None:
        return _replaced(current, table, handled=["mode"])
    for name, given in table.table.items():
        if name != "mode":
            raise given.unknown(["mode"])
    return None


@configured.register
def _dataloader(current: BaseDataLoader.Config, table: SourcedValue) -> BaseDataLoader.Config:
    if dataset := table.table.get("dataset"):
        ours = converted(dataset, Literal["text_files", *DATASETS]) == "text_files"
        loader = TextFilesDataLoader.Config if ours else HuggingFaceTextDataLoader.Config
        if not isinstance(current, loader):
            current = loader(infinite=getattr(current, "infinite", True))
    return _replaced(current, table)


@configured.register
def _validator(current: Validator.Config, table: SourcedValue) -> Validator.Config:
    made = _replaced(current, table)
    given = table.table["dataloader"].table.get("infinite") if "dataloader" in table.table else None
    # TorchTitan's validator derives the key from its steps, whatever it says.
    if given is not None and converted(given, bool) != (made.steps != -1):
        does = "reads the data once" if made.steps == -1 else "starts over when the data end (-1 does not)"
        raise given.error(f"validator.steps = {made.steps} {does}")
    return made


@configured.register
def _optimizer(current: OptimizersContainer.Config, table: SourcedValue) -> OptimizersContainer.Config:
    groups = param_groups(current, table)
    handled = ["param_groups", *shared_keys(current, table)]
    return _replaced(current, table, handled=handled, param_groups=groups)


def converters(quantize: SourcedValue) -> list[QuantizationConverter.Config]:
    """The converters of `[quantize]`, one for each of its tables.

    Raises:
        ConfigError: There is no such table or converter, or a key or value of it is wrong.
    """
    made = []
    for part, table in quantize.table.items():
        if part not in PARTS:
            raise table.unknown(PARTS)
        converter = PARTS[part][required(table, "name", PARTS[part])]
        options = {key: given for key, given in table.table.items() if key != "name"}
        annotations = fields_of(converter)
        del annotations["model_compile_enabled"]  # follows from [compile]
        made.append(built(table, converter, **values(options, annotations, also=["name"])))
    return made


def required(table: SourcedValue, key: str, possible: Collection[str]) -> str:
    """The value of a key that must be set, one of `possible`.

    Raises:
        ConfigError: The key is missing, or its value is not possible.
    """
    if key not in table.table:
        raise table.error(f"{key} is missing. Possible: {', '.join(possible)}.")
    return converted(table.table[key], Literal[tuple(possible)])
