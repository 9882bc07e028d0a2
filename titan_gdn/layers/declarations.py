"""Checks what a linear attention layer declares, before anything is built from it."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from titan_gdn.ops.rules import Rule

ROW_PARALLEL = "out_proj"
"""The linear whose columns belong to heads. TP shards it over dimension 1."""


def check_declarations(layer: type[Any], config: Any) -> None:
    """Checks that the class of a layer and its configuration agree, and that every linear has a placement.

    Args:
        layer: the class, a subclass of `titan_gdn.layers.linear_attention.LinearAttention`.
        config: its configuration.

    Raises:
        ValueError: names the class, the declaration or the linear, and what is expected.
    """
    # Lazily: later checks rely on earlier ones.
    for problem in chain(_of_class(layer, config), _of_names(layer, config), _of_sizes(layer, config)):
        raise ValueError(f"{layer.__name__}{problem}")


def _of_class(layer: type[Any], config: Any) -> Iterator[str]:
    if config.layer_class is not layer:
        yield (
            f" has no Config of its own, so that {config.layer_class.__name__} would be built: add "
            "'@dataclass(kw_only=True, slots=True) class Config' to it, derived from its parent's Config"
        )
    if not isinstance(getattr(layer, "title", None), str):
        yield ".title is missing: expected the name of the layer in logs and tables"
    if not isinstance(getattr(layer, "rule", None), Rule):
        yield ".rule is missing: expected a titan_gdn.ops.rules.Rule"
    for name in ("gates", "output_gate"):
        if getattr(getattr(layer, name), "__isabstractmethod__", False):
            yield f".{name} is missing: the layer has to implement it"


def _of_names(layer: type[Any], config: Any) -> Iterator[str]:
    for declaration in ("per_head", "replicated", "exchanged"):
        if not isinstance(getattr(layer, declaration), tuple):
            yield f".{declaration} = {getattr(layer, declaration)!r}: expected a tuple of names"
    if not isinstance(layer.full_precision, dict):
        yield f".full_precision = {layer.full_precision!r}: expected a dict, names to what they compute"
    for name in sorted(set(layer.per_head) & set(layer.replicated)):
        yield f".{name} is in both per_head and replicated: keep one"
    modules = {f.name for f in fields(config) if isinstance(getattr(config, f.name), Module.Config)}
    linears = {name for name in modules if isinstance(getattr(config, name), Linear.Config)}
    for fqn, *_ in config.traverse(Linear.Config):
        if "." in fqn:
            yield (
                f".{fqn} has no placement: make the linear a field of {layer.__name__}.Config, and add it to "
                f"{layer.__name__}.per_head or .replicated"
            )
    declared = {
        "per_head": (layer.per_head, modules - {ROW_PARALLEL, "decay"}),
        "replicated": (layer.replicated, modules - {ROW_PARALLEL, "decay"}),
        "exchanged": (layer.exchanged, linears & set(layer.per_head)),
        "low_rank": (() if layer.low_rank is None else (layer.low_rank,), linears & set(layer.replicated)),
        "full_precision": (layer.full_precision, linears),
    }
    for declaration, (names, possible) in declared.items():
        for name in sorted(set(names) - possible):
            yield f".{declaration} names {name!r}: expected names among {', '.join(sorted(possible))}"
    for name in sorted(modules - {*layer.per_head, *layer.replicated, ROW_PARALLEL, "decay"}):
        yield (
            f".{name} has no placement: add it to {layer.__name__}.per_head (sharded over TP by heads) or "
            ".replicated (replicated over TP)"
        )
    if layer.exchanged[:1] != ("in_proj_qkv",) or len(set(layer.exchanged)) < len(layer.exchanged):
        yield f".exchanged = {layer.exchanged}: expected 'in_proj_qkv' first, and each name once"


def _of_sizes(layer: type[Any], config: Any) -> Iterator[str]:
    groups = config.n_key_heads
    for name in layer.per_head:
        part = getattr(config, name)
        if isinstance(part, Linear.Config) and part.out_features % groups:
            yield f".{name} has {part.out_features} rows: expected a multiple of the {groups} key heads"
    for fqn, linear, *_ in config.traverse(Linear.Config):
        if linear.bias:
            yield f".{fqn} has a bias, which is not supported: set bias = False"
    channels = config.key_head_dim if layer.rule.per_channel else 1
    if config.decay.channels != channels:
        yield (
            f".decay has {config.decay.channels} channels per value head: expected {channels}, because "
            f"{layer.__name__}.rule.per_channel is {layer.rule.per_channel}"
        )
