"""Where a key belongs that was written in another section."""

from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from types import NoneType
from typing import Any

from torchtitan.trainer import Trainer

from titan_gdn import models
from titan_gdn.config.fields import fields_of
from titan_gdn.config.optimizer import optimizer_kwargs
from titan_gdn.config.sections import JOB, MODEL, POLICIES, SECTIONS
from titan_gdn.config.source import ConfigError, UnknownKeyError
from titan_gdn.layers.linear_attention import LinearAttentionConfig
from titan_gdn.models.hybrid.quantize import PARTS


def with_places(error: UnknownKeyError, config: Trainer.Config) -> ConfigError:
    """The error of an unknown key, with the sections that have a key of this name.

    Args:
        error: The error without them.
        config: The defaults of the model that is configured.
    """
    *section, key = error.given.path
    found = [name for name, keys in _sections(config) if key in keys]
    if not found or ".".join(section) in found:  # the latter: it is a key of another mode of its section
        return error
    places = " or ".join(f"{name}.{key}" for name in dict.fromkeys(found))
    return error.given.error(f'unknown {"key" if section else "section"} "{key}". Did you mean {places}?')


def _sections(config: Trainer.Config) -> Iterator[tuple[str, Collection[str]]]:
    """Every section of a file, nested ones too, with its keys."""
    assert config.model_spec is not None
    flavors = models.load(config.model_spec.name).flavors
    yield "job", JOB
    yield "model", MODEL
    yield "model.overrides", fields_of(type(next(iter(flavors.values())).arguments))
    yield from _nested("linear_attention", LinearAttentionConfig())
    yield "optimizer", ["name", *optimizer_kwargs("AdamW")]
    for policy in POLICIES.values():
        yield "activation_checkpoint", ["mode", *(() if policy is NoneType else fields_of(policy))]
    for part, kinds in PARTS.items():
        for kind in kinds.values():
            yield f"quantize.{part}", ["name", *fields_of(kind)]
    for name in SECTIONS:
        yield from _nested(name, getattr(config, name))


def _nested(name: str, section: Any) -> Iterator[tuple[str, Collection[str]]]:
    """A section and those inside it, which are its dataclasses."""
    if section is None:  # no activation checkpointing
        return
    keys = fields_of(type(section))
    yield name, keys
    for key in keys:
        if is_dataclass(value := getattr(section, key)):
            yield from _nested(f"{name}.{key}", value)
