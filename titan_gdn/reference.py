"""Every key of a run's TOML file, with its default, type and meaning: `python -m titan_gdn.reference`.

It is read off the dataclasses that the keys set, and is itself a file that runs: a flavour's defaults.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NoReturn

from titan_gdn.runtime import cpu
from titan_gdn.runtime.silence import silence_libraries

silence_libraries()
cpu.enable()  # before anything of TorchTitan is imported

from titan_gdn import models  # noqa: E402
from titan_gdn.config.load import (  # noqa: E402
    OPTIMIZER_NAME,
    POLICIES,
    SECTIONS,
    ConfigError,
    defaults,
    fields_of,
    optimizer_kwargs,
)
from titan_gdn.config.source import described  # noqa: E402
from titan_gdn.models.hybrid.block import linear_layers  # noqa: E402
from titan_gdn.models.hybrid.quantize import PARTS  # noqa: E402

USAGE = "usage: python -m titan_gdn.reference MODEL FLAVOR, such as qwen3_next debug"
WIDTH = 110

Key = tuple[str, Any, Any, str]
"""Name, type, default and meaning."""


def main(argv: list[str] | None = None) -> None:
    """Print the reference of a flavour.

    Args:
        argv: the command line, `sys.argv[1:]` by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2:
        _refuse("expected a model and a flavour")
    try:
        config = defaults(*argv)
    except ConfigError as error:
        _refuse(str(error).removeprefix(": "))
    for line in lines(config, *argv):
        print(line)


def _refuse(reason: str) -> NoReturn:
    print(f"titan_gdn: {reason}\n{USAGE}", file=sys.stderr)
    sys.exit(2)


def lines(config: Any, model: str, flavor: str) -> Iterator[str]:
    """The reference, line by line.

    Args:
        config: a `Trainer.Config`, the defaults of a flavour.
        model: name of the model.
        flavor: name of the flavour.
    """
    yield from _table("job", [("dump_folder", str, config.dump_folder, "Where everything is written.")])
    package = models.load(model)
    yield from _table(
        "model",
        [
            ("name", str, model, f"One of {', '.join(models.MODELS)}."),
            ("flavor", str, flavor, f"One of {', '.join(package.flavors)}."),
            (
                "hf_assets_path",
                str,
                config.hf_assets_path,
                "Folder of the tokenizer, and of weights to load.",
            ),
        ],
    )
    yield from _table("model.overrides", _keys(package.flavors[flavor].arguments))
    yield from _dataclass("linear_attention", linear_layers(config.model_spec.model.layers)[0].run)
    yield from _quantize()
    for name in SECTIONS:
        section = getattr(config, name)
        if name == "optimizer":
            yield from _table(name, _of_all_groups(section) + _keys(section, without=("param_groups",)))
        elif name == "activation_checkpoint":
            yield from _checkpointing(section)
        else:
            yield from _dataclass(name, section)


def _table(name: str, keys: list[Key]) -> list[str]:
    """A table of the file, each key below what it means."""
    lines = [f"[{name}]"]
    for key, annotation, value, doc in keys:
        told = f"{doc} ({described(annotation)})" if doc else f"({described(annotation)})"
        lines += textwrap.wrap(told, WIDTH, initial_indent="# ", subsequent_indent="# ")
        lines += [f"{key} = {_toml(value)}", ""]
    return lines


def _dataclass(name: str, section: Any) -> Iterator[str]:
    """A section, and the tables in it."""
    yield from _table(name, _keys(section))
    for key in fields_of(type(section)):
        if is_dataclass(value := getattr(section, key)):
            yield from _dataclass(f"{name}.{key}", value)


def _keys(section: Any, without: tuple[str, ...] = ()) -> list[Key]:
    docs = _docs(type(section))
    return [
        (key, annotation, value, docs.get(key, ""))
        for key, annotation in fields_of(type(section)).items()
        if key not in without and not is_dataclass(value := getattr(section, key))
    ]


def _checkpointing(policy: Any) -> Iterator[str]:
    """The mode of the flavour with its keys, and in comments the others with theirs."""
    mode = next(mode for mode, kind in POLICIES.items() if isinstance(policy, kind))
    chosen = ("mode", Literal[tuple(POLICIES)], mode, "Each mode has keys of its own.")
    yield from _table("activation_checkpoint", [chosen] + ([] if policy is None else _keys(policy)))
    for other, kind in POLICIES.items():
        if other not in (mode, "none"):
            yield from _commented([f'mode = "{other}"', *_table("", _keys(kind()))[1:]])


def _quantize() -> Iterator[str]:
    """In comments, for no flavour quantizes."""
    for part, converters in PARTS.items():
        for name, kind in converters.items():
            keys = _keys(kind(), without=("model_compile_enabled",))  # which follows from [compile]
            yield from _commented([f"[quantize.{part}]", f'name = "{name}"', *_table("", keys)[1:]])


def _commented(lines: Iterable[str]) -> Iterator[str]:
    return (f"# {line}".rstrip() for line in lines)


def _docs(config: type) -> dict[str, str]:
    """What stands as a string below each field of a dataclass, its first paragraph."""
    docs: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if not is_dataclass(kind):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[field.target.id] = _first_paragraph(ast.literal_eval(below.value))
    return docs


def _first_paragraph(doc: str) -> str:
    return " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())


def _arguments(builder: Callable[..., Any]) -> list[Key]:
    """The arguments of a flavour's builder, `[model.overrides]`, as its docstring explains them."""
    function, given = (builder.func, builder.keywords) if isinstance(builder, partial) else (builder, {})
    doc = inspect.getdoc(function)
    docs = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", doc, re.MULTILINE))
    return [
        (name, p.annotation, given.get(name, p.default), " ".join(docs[name].split()))
        for name, p in inspect.signature(function, eval_str=True).parameters.items()
    ]


def _of_all_groups(section: Any) -> list[Key]:
    """The optimizer and its arguments, which `[optimizer]` gives to all parameter groups alike."""
    group = section.param_groups[-1]
    arguments = optimizer_kwargs(group.optimizer_name)
    name = ("name", OPTIMIZER_NAME, group.optimizer_name, "Of all parameter groups.")
    return [
        name,
        *(
            (key, arguments[key], value, f"Argument of {group.optimizer_name}.")
            for key, value in group.optimizer_kwargs.items()
        ),
    ]


def _toml(value: Any) -> str:
    """A value as the file writes it; None is "none"."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps("none" if value is None else value)


if __name__ == "__main__":
    main()
