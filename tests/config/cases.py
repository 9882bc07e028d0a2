"""What the tests of the configuration share: a file's text, values as TOML, and parametrized cases."""

import dataclasses
import json
from typing import Any

import pytest

from titan_gdn.config.fields import fields_of
from titan_gdn.layers.linear_attention import LinearAttentionConfig

MODEL = '[model]\nname = "fake"\nflavor = "tiny"\n'


def named(arguments: str, cases: dict[str, tuple]):
    """Parametrize a test by cases whose keys are their names."""
    return pytest.mark.parametrize(arguments, [pytest.param(*case, id=name) for name, case in cases.items()])


def toml(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps("none" if value is None else value)


def section_of(config: Any, name: str) -> Any:
    """The dataclass of a section."""
    return LinearAttentionConfig() if name == "linear_attention" else getattr(config, name)


def settable(section: Any) -> list[str]:
    return list(fields_of(type(section)))
