"""The keys of a section: the fields of its dataclass, with their types, defaults and documentation."""

import ast
import inspect
import textwrap
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_type_hints

import tyro

from titan_gdn.config.source import SourcedValue
from titan_gdn.config.types import converted
from titan_gdn.models.hybrid.pipeline import SCHEDULES, SPLIT_BACKWARD

# Not DistMuon: its arguments are Python objects (buckets and shardings), which a file cannot hold.
OptimizerName = Literal["Adam", "AdamW"]

# TorchTitan annotates these fields with wider types than it supports, and ignores the values beyond.
_NARROWED: dict[str, Any] = {
    "components": list[Literal["model", "loss"]],
    "context_parallel_load_balancer": Literal["headtail", "ptrr"] | None,
    "determinism_check": Literal["default", "none"],
    "exclude_from_loading": list[Literal["optimizer", "lr_scheduler", "dataloader", "train_state"]],
    "pipeline_parallel_schedule": Literal[*SCHEDULES, *SPLIT_BACKWARD],
    "optimizer_factory_kwargs_by_name": dict[OptimizerName, dict[str, Any]],
}


class Key(NamedTuple):
    """A key of a section."""

    name: str
    annotation: Any
    default: Any
    doc: str


def fields_of(config: type) -> dict[str, Any]:
    """Names and types of the fields of a dataclass that a file may set.

    A field with `metadata={"choices": function}` takes one of the strings that `function()` returns; it is
    called here, so that names registered after the import count. Fields that are hidden from tyro hold
    Python objects and are left out.
    """
    hints = get_type_hints(config, include_extras=True)
    annotations = {}
    for field in fields(config):
        if choices := field.metadata.get("choices"):
            annotations[field.name] = Literal[tuple(choices())]
        elif tyro.conf.Suppress not in getattr(hints[field.name], "__metadata__", ()):
            annotations[field.name] = _NARROWED.get(field.name, hints[field.name])
    return annotations


def docs_of(config: type) -> dict[str, str]:
    """The first paragraph of the docstring below each field of a dataclass."""
    docs: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if not is_dataclass(kind):
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(definition, ast.ClassDef)
        for statements in pairwise(definition.body):
            match statements:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=doc):
                    docs[name] = _first_paragraph(ast.literal_eval(doc))
    return docs


def _first_paragraph(doc: str) -> str:
    return " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())


def keys_of(section: Any) -> list[Key]:
    """The keys of a section, a dataclass instance, with its values as defaults; nested sections left out."""
    docs = docs_of(type(section))
    return [
        Key(name, annotation, value, docs.get(name, ""))
        for name, annotation in fields_of(type(section)).items()
        if not is_dataclass(value := getattr(section, name))
    ]


def values(
    table: dict[str, SourcedValue], annotations: dict[str, Any], also: Collection[str] = ()
) -> dict[str, Any]:
    """Convert the values of `table` to their types.

    Args:
        table: Values by key.
        annotations: Types by key.
        also: Other keys that the section has, for the message.

    Raises:
        ConfigError: A key is not in `annotations`, or a value does not have the key's type.
    """
    for name, given in table.items():
        if name not in annotations:
            raise given.unknown([*also, *annotations])
    return {name: converted(given, annotations[name]) for name, given in table.items()}
