"""Converts values to the types that dataclass fields are annotated with, and names the types in messages."""

import io
from contextlib import redirect_stderr, redirect_stdout, suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_gdn.config.source import COMMAND_LINE, SourcedValue, nearest

ConfigManager.register_tyro_rules(custom_registry)


def converted(given: SourcedValue, annotation: Any) -> Any:
    """The value of `given`, converted to `annotation`.

    Raises:
        ConfigError: The value does not have this type; the message describes the type.
    """
    value = given.plain
    if isinstance(value, dict) and COMMAND_LINE in given.sources:
        raise given.error("a table of free keys cannot be set on the command line; write it in the file")
    try:
        if given.source == COMMAND_LINE and isinstance(value, list):
            return _typed(_parsed(value, annotation), annotation)
        return _typed(value, annotation)
    except TypeError:
        choices = _choices(annotation)
        names = value if isinstance(value, list) else [value]
        wrong = next((str(name) for name in names if name not in choices), "")
        raise given.error(f"expected {described(annotation)}.{nearest(wrong, choices)}") from None


def _parsed(words: list[str], annotation: Any) -> Any:
    """Words of the command line, parsed for `annotation` by tyro, as TorchTitan does."""
    options = (annotation, *get_args(annotation))
    if get_origin(annotation) is list and (options[1] is str or get_origin(options[1]) is Literal):
        return [name for word in words for name in word.split(",") if name]  # TorchTitan's own syntax
    spellings = {"none": "None"} if NoneType in options else {}
    if bool in options:
        spellings |= {"true": "True", "false": "False"}
    words = [spellings.get(word, word) for word in words]
    try:
        # tyro prints its own message and exits; ours replaces it. After "--" tyro takes no word as an option.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return tyro.cli(annotation, args=["--", *words], registry=custom_registry)
    except SystemExit:
        raise TypeError from None


def _typed(value: Any, annotation: Any) -> Any:
    """`value`, checked against `annotation`. Converts int to float, list to tuple and "none" to None.

    Raises:
        TypeError: The value has another type. (typeguard is not used because it accepts True as an int.)
    """
    kind, args = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Any or (type(value) is kind and not args):
        return value
    if kind in (Union, UnionType):
        for option in sorted(args, key=lambda option: option is not NoneType):
            with suppress(TypeError):
                return _typed(value, option)
    elif kind is NoneType and value in (None, "none"):
        return None
    elif kind is Literal and value in args:
        return value
    elif kind is float and type(value) is int:
        return float(value)
    elif kind is list and isinstance(value, list):
        return [_typed(item, args[0]) for item in value]
    elif kind is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if args[-1] is ... else args
        if len(kinds) == len(value):
            return tuple(map(_typed, value, kinds))
    elif kind is dict and isinstance(value, dict):
        return {_typed(key, args[0]): _typed(item, args[1]) for key, item in value.items()}
    raise TypeError


def described(annotation: Any) -> str:
    """A type as error messages and the reference spell it."""
    kind, args = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return " or ".join(map(described, args))
    if kind is Literal:
        return " or ".join(f'"{choice}"' for choice in args)
    if kind in (NoneType, ...):
        return '"none"' if kind is NoneType else "..."
    return kind.__name__ + (f"[{', '.join(map(described, args))}]" if args else "")


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for option in get_args(annotation) for choice in _choices(option)]
