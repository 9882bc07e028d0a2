"""Checks of arguments that all operators share. They read no value, so that no GPU is waited for."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_tensors(**arguments: Tensor | None) -> None:
    """Check that arguments (None: left out) are floating-point tensors on one device.

    Raises:
        ValueError: the message names the arguments and what was given.
    """
    given = {name: x for name, x in arguments.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
    if not all(x.is_floating_point() for x in given.values()):
        dtypes = ", ".join(dtype_of(x) for x in given.values())
        raise ValueError(f"{_listed(given)} must be floating point, not {dtypes}")
    first, *others = given.values()
    if any(x.device != first.device for x in others):
        devices = ", ".join(str(x.device) for x in given.values())
        raise ValueError(f"{_listed(given)} must be on one device, not {devices}")


def dtype_of(x: Tensor) -> str:
    """The name of a tensor's dtype, as in a sentence."""
    return str(x.dtype).removeprefix("torch.")


def refuse(operator: str, arguments: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Refuse the arguments that an operator does not take, unless they ask for nothing (None or False).

    Args:
        operator: the name of the operator.
        arguments: the arguments that it was called with and does not know.
        instead: for each argument of FLA's function that it does not take, what to do instead.

    Raises:
        TypeError: the message names the arguments and says what to do instead.
    """
    for name, value in arguments.items():
        if name not in instead:
            raise TypeError(f"{operator} has no argument {name!r}, and neither has FLA's function")
        if value is not None and value is not False:
            raise TypeError(f"{operator} does not take FLA's argument {name!r}: {instead[name]}")


def _listed(names: Mapping[str, Any]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
