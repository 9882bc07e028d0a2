"""Converts values to the types that dataclass fields are annotated with, and names the types in messages."""

import io
import math
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from titan_gdn.config.source import COMMAND_LINE, SourcedValue, nearest

ConfigManager.register_tyro_rules(custom_registry)

LARGEST_FLOAT = torch.finfo(torch.float32).max
MAY_BE_INFINITE = [("training", "max_norm")]
"""Keys whose `inf` has a meaning: here, that gradients are not clipped."""


def converted(given: SourcedValue, annotation: Any) -> Any:
    """The value of `given`, converted to `annotation`.

    Raises:
        ConfigError: The value does not have this type, which the message describes; or it is a number that
            the run cannot compute with.
    """
    value = given.plain
    if isinstance(value, dict) and COMMAND_LINE in given.sources:
        raise given.error("a table of free keys cannot be set on the command line; write it in the file")
    try:
        if given.source == COMMAND_LINE and isinstance(value, list):
            value = _parsed(value, annotation)
        result = _typed(value, annotation)
        for single in _singles(value):
            if expected := _outside(single, infinite=given.path in MAY_BE_INFINITE):
                raise given.error(f"expected {expected}")
        return result
    except (TypeError, OverflowError):
        choices = _choices(annotation)
        names = value if isinstance(value, list) else [value]
        wrong = next((str(name) for name in names if name not in choices), "")
        raise given.error(f"expected {described(annotation)}.{nearest(wrong, choices)}") from None


def _singles(value: Any) -> Iterator[Any]:
    """The numbers and strings in a value, at any depth."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *_singles(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _singles(item)
    else:
        yield value


def _outside(single: Any, infinite: bool) -> str:
    """What is expected instead of a number or string that no key can have; empty if some key can."""
    if isinstance(single, int) and not -(2**63) <= single < 2**63:
        return "an integer of 64 bits"
    if isinstance(single, float) and not (abs(single) <= LARGEST_FLOAT or infinite and single == math.inf):
        return f"a finite number, at most {LARGEST_FLOAT:.4g}"
    if isinstance(single, str) and "\0" in single:
        return "text without the character NUL"
    return ""


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
