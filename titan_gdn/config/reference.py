"""The reference of a run's TOML file: every key with its type, default and meaning.

It is generated from the dataclasses that the keys set, and is itself a valid file: the defaults of a flavor.
"""

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, Literal

from titan_gdn import models
from titan_gdn.config.fields import Key, OptimizerName, fields_of, keys_of
from titan_gdn.config.model_file import flavors_of
from titan_gdn.config.optimizer import optimizer_kwargs
from titan_gdn.config.sections import POLICIES, SECTIONS
from titan_gdn.config.types import described
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.block import linear_layers
from titan_gdn.models.hybrid.quantize import PARTS

WIDTH = 110


def lines(config: Any, model: str, flavor: str) -> Iterator[str]:
    """The reference, line by line.

    Args:
        config: A `Trainer.Config`, the defaults of a flavor.
        model: Name of the model.
        flavor: Name of the flavor.
    """
    package = models.load(model)
    yield from _table("job", [Key("dump_folder", str, config.dump_folder, "Folder of all outputs.")])
    keys = [
        Key("name", str, model, f"One of {', '.join(models.MODELS)}."),
        Key("flavor", str, flavor, f"One of {', '.join(flavors_of(package))}."),
        Key("hf_assets_path", str, config.hf_assets_path, "Folder of the tokenizer and of initial weights."),
    ]
    yield from _table("model", keys)
    yield from _table("model.overrides", keys_of(config.model_spec.model.arguments))
    layers = linear_layers(config.model_spec.model.layers)
    yield from _dataclass("linear_attention", layers[0].run if layers else LinearAttentionConfig())
    yield from _quantize()
    for name in SECTIONS:
        section = getattr(config, name)
        if name == "optimizer":
            own = [key for key in keys_of(section) if key.name != "param_groups"]
            yield from _table(name, _of_all_groups(section) + own)
        elif name == "activation_checkpoint":
            yield from _checkpointing(section)
        else:
            yield from _dataclass(name, section)


def _table(name: str, keys: list[Key]) -> list[str]:
    """A table of the file; a comment above each key says what it means."""
    lines = [f"[{name}]"]
    for key in keys:
        comment = f"{key.doc} ({described(key.annotation)})".strip()
        lines += textwrap.wrap(comment, WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines += [f"{key.name} = {_toml(key.default)}", ""]
    return lines


def _dataclass(name: str, section: Any) -> Iterator[str]:
    """A section and the sections nested in it."""
    yield from _table(name, keys_of(section))
    for key in fields_of(type(section)):
        if is_dataclass(value := getattr(section, key)):
            yield from _dataclass(f"{name}.{key}", value)


def _checkpointing(policy: Any) -> Iterator[str]:
    """The flavor's mode and its keys; the other modes with their keys are commented out."""
    mode = next(mode for mode, kind in POLICIES.items() if isinstance(policy, kind))
    chosen = Key("mode", Literal[tuple(POLICIES)], mode, "Each mode has its own keys.")
    yield from _table("activation_checkpoint", [chosen] + ([] if policy is None else keys_of(policy)))
    for other, kind in POLICIES.items():
        if other not in (mode, "none"):
            yield from _commented([f'mode = "{other}"', *_table("", keys_of(kind()))[1:]])


def _quantize() -> Iterator[str]:
    """All converters and their keys, commented out because no flavor quantizes."""
    for part, converters in PARTS.items():
        for name, kind in converters.items():
            keys = [key for key in keys_of(kind()) if key.name != "model_compile_enabled"]  # from [compile]
            yield from _commented([f"[quantize.{part}]", f'name = "{name}"', *_table("", keys)[1:]])


def _commented(lines: Iterable[str]) -> Iterator[str]:
    return (f"# {line}".rstrip() for line in lines)


def _of_all_groups(section: Any) -> list[Key]:
    """The optimizer's name and arguments, which `[optimizer]` sets for all parameter groups."""
    group = section.param_groups[-1]
    arguments = optimizer_kwargs(group.optimizer_name)
    name = Key("name", OptimizerName, group.optimizer_name, "Optimizer of all parameter groups.")
    return [name] + [
        Key(key, arguments[key], value, f"Argument of {group.optimizer_name}.")
        for key, value in group.optimizer_kwargs.items()
    ]


def _toml(value: Any) -> str:
    """A value in TOML; None is written as "none"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps("none" if value is None else value)
