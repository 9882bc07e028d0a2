"""The parameter groups of the `[optimizer]` section.

TorchTitan's optimizer takes a list of groups, each complete in itself: `[[optimizer.param_groups]]`. Keys of
`[optimizer]` itself (`name`, `lr`, `weight_decay`, ...) change all groups of the flavor instead.
"""

import inspect
import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from titan_gdn.config.fields import OptimizerName, fields_of, values
from titan_gdn.config.source import SourcedValue, built
from titan_gdn.config.types import converted

_TINY = torch.finfo(torch.float32).tiny


def shared_keys(optimizer: OptimizersContainer.Config, table: SourcedValue) -> dict[str, SourcedValue]:
    """The keys of `[optimizer]` that change all parameter groups: those that TorchTitan's section lacks."""
    own = fields_of(type(optimizer))
    return {name: given for name, given in table.table.items() if name not in own}


def param_groups(optimizer: OptimizersContainer.Config, table: SourcedValue) -> list[ParamGroupConfig]:
    """The parameter groups after the changes of the section `table`.

    Raises:
        ConfigError: A key or value is wrong, or the optimizer refuses a group's arguments.
    """
    shared = shared_keys(optimizer, table)
    if array := table.table.get("param_groups"):
        for given in shared.values():
            raise given.error("[[optimizer.param_groups]] replaces all groups: set this key in each of them")
        if not isinstance(array.value, list) or not all(
            isinstance(item, SourcedValue) for item in array.value
        ):
            raise array.error("expected an array of tables in the file, [[optimizer.param_groups]]")
        groups = [_param_group(item) for item in array.value]
    else:
        groups = _changed(optimizer.param_groups, shared, also=fields_of(type(optimizer)))
    for group in groups:
        built(table, _check_arguments, group)
    return groups


def _check_arguments(group: ParamGroupConfig) -> None:
    """Check the ranges of a group's arguments, then whether the optimizer can be built of them."""
    given = group.optimizer_kwargs
    for name, holds, expected in (
        ("lr", lambda lr: lr >= 0, "at least 0"),
        ("weight_decay", lambda decay: decay >= 0, "at least 0"),
        ("betas", lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1"),
        # Where all gradients have been 0, as those of a token that never occurred, Adam divides 0 by eps.
        ("eps", lambda eps: eps >= _TINY, f"at least {_TINY:.2g}, or 0 / 0 makes weights NaN"),
    ):
        if name in given and not holds(given[name]):
            raise ValueError(f"{name} = {given[name]}: expected {expected}")
    getattr(torch.optim, group.optimizer_name)([torch.zeros(1)], **given)


def optimizer_kwargs(name: str) -> dict[str, Any]:
    """Names and types of an optimizer's arguments, without the parameters, its first."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    arguments = inspect.signature(partial(getattr(torch.optim, name), None), eval_str=True).parameters
    return {key: _without_tensors(p.annotation) for key, p in arguments.items() if p.kind in by_name}


def _without_tensors(annotation: Any) -> Any:
    """`float | Tensor` as `float`, at any depth: a file cannot hold a tensor."""
    kind = get_origin(annotation)
    if kind is None:
        return annotation
    args = [_without_tensors(option) for option in get_args(annotation) if option is not torch.Tensor]
    return reduce(or_, args) if kind in (Union, UnionType) else kind[tuple(args)]


def _changed(
    groups: list[ParamGroupConfig], shared: dict[str, SourcedValue], also: Collection[str]
) -> list[ParamGroupConfig]:
    """`groups` with the optimizer's name and arguments replaced.

    A weight decay applies only to groups that decay; norms and decay rates keep a weight decay of 0.
    """
    if shared and not groups:
        first = next(iter(shared.values()))
        raise first.error("this flavor has no parameter groups; write [[optimizer.param_groups]]")
    changes = dict(shared)
    name = changes.pop("name", None) and converted(shared["name"], OptimizerName)
    kwargs = values(changes, optimizer_kwargs(name or "AdamW"), also=["name", *also])
    decays = [group.optimizer_kwargs.get("weight_decay") != 0 for group in groups]
    if "weight_decay" in kwargs and not any(decays):
        raise changes["weight_decay"].error(
            "no parameter group of this flavor decays; write [[optimizer.param_groups]]"
        )
    undecayed = {key: value for key, value in kwargs.items() if key != "weight_decay"}
    return [
        replace(
            group,
            optimizer_name=name or group.optimizer_name,
            optimizer_kwargs=group.optimizer_kwargs | (kwargs if decay else undecayed),
        )
        for group, decay in zip(groups, decays, strict=True)
    ]


def _param_group(table: SourcedValue) -> ParamGroupConfig:
    """One table of `[[optimizer.param_groups]]`."""
    given = table.table
    group = values(given, fields_of(ParamGroupConfig) | {"optimizer_name": OptimizerName})
    for name in fields_of(ParamGroupConfig):
        if name not in group:
            raise table.error(f"{name} is missing")
    kwargs = values(given["optimizer_kwargs"].table, optimizer_kwargs(group["optimizer_name"]))
    if "lr" not in kwargs:
        raise given["optimizer_kwargs"].error("lr is missing; a group inherits nothing from [optimizer]")
    try:
        re.compile(group["pattern"])
    except re.error as error:
        raise given["pattern"].error(f"expected a regular expression: {error}") from None
    return ParamGroupConfig(
        pattern=group["pattern"], optimizer_name=group["optimizer_name"], optimizer_kwargs=kwargs
    )
