"""Linears and experts in 8 and 4 bits, by TorchTitan's converters, where the widths on a rank allow it.

A converter replaces configurations before the model is built. TorchTitan's look at whole weights; what the
hardware multiplies is a rank's part of them, so here a converter sees of a model only what fits: the shard
of tensor parallelism, and of `in_proj_qkv` under the exchange `all_gather` the rows of this rank's heads.
That is known once the exchange is chosen and the placements are set, at the end of `update_from_config`.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import spmd_types as spmd
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
    NVFP4Linear,
    NVFP4LinearConverter,
    QuantizationConverter,
)
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.models.common import Linear, SigmoidGatedFeedForward
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from titan_gdn.layers.gated_attention import GatedAttention
from titan_gdn.layers.linear_attention import LinearAttention
from titan_gdn.parallel.exchange.registry import exchange_class

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

PARTS: dict[str, dict[str, type[QuantizationConverter.Config]]] = {
    "linear": {
        "float8": Float8LinearConverter.Config,
        "mxfp8": MXFP8LinearConverter.Config,
        "nvfp4": NVFP4LinearConverter.Config,
    },
    "experts": {"float8": Float8GroupedExpertsConverter.Config, "mxfp8": MXFP8GroupedExpertsConverter.Config},
}
"""TorchTitan's converters, by the tables of the TOML section `[quantize]` and the names in them."""

# What the products of a number format need each of their sizes to be a multiple of: a float8 tensor core's
# 16 bytes (module_filter_fn), MXFP8's blocks that share a scale, the tiles of torchao's NVFP4 kernels.
MULTIPLE = {"float8": 16, "mxfp8": 32, "nvfp4": 128}

_FULL_PRECISION = {
    TokenChoiceTopKRouter.Config: {"gate": "routing"},
    SigmoidGatedFeedForward.Config: {"gate": "routing"},
}
"""What modules of TorchTitan keep in full precision; ours declare it themselves (`full_precision`).

A decay is the argument of an exponential that is summed over a document, and a router's score decides which
expert a token goes to: rounding there does not average out."""

Found = tuple[str, Module.Config, object, str | int]
"""A configuration in a model, as `traverse` finds it: its name, itself, and where it is kept."""


class Placed(NamedTuple):
    """What the sizes of a rank's products depend on."""

    tp: int
    cp: int


if NVFP4Linear is not None:

    class LocalNVFP4Linear(NVFP4Linear):
        """The linear inside a region that is local already, as our layers that gather and exchange are.

        TorchTitan's makes a local region of its own, of inputs and outputs with declared placements.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(NVFP4Linear.Config):
            def build(self, **kwargs: object) -> "LocalNVFP4Linear":
                """As any linear's."""
                return Linear.Config.build(self, **kwargs)


def name_of(converter: QuantizationConverter.Config) -> tuple[str, str]:
    """Table and name of a converter in `[quantize]`, as in "linear" and "float8"."""
    return next(
        (part, name) for part, kinds in PARTS.items() for name in kinds if type(converter) is kinds[name]
    )


def check(
    model: Decoder.Config, converters: list[QuantizationConverter.Config], config: "Trainer.Config"
) -> None:
    """Refuse what no converter of the model can do, whatever the machine.

    Raises:
        ValueError: names the keys, and what to change.
    """
    for converter in converters:
        part, name = name_of(converter)
        (_check_linear if part == "linear" else _check_experts)(converter, name, model, config)


def _check_linear(
    converter: QuantizationConverter.Config, name: str, model: Decoder.Config, config: "Trainer.Config"
) -> None:
    parallelism, seq_len, multiple = config.parallelism, config.training.seq_len, MULTIPLE[name]
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    tokens = seq_len // (cp * tp if parallelism.enable_sequence_parallel else cp)
    if tokens % multiple:
        raise ValueError(
            f'training.seq_len = {seq_len} leaves {tokens} tokens on a rank: quantize.linear.name = "{name}" '
            f"needs a multiple of {multiple} (gradients of weights are sums over tokens) times "
            f"parallelism.context_parallel_degree = {cp}, and with sequence parallelism times "
            f"parallelism.tensor_parallel_degree = {tp}"
        )
    if name == "nvfp4" and tp > 1 and parallelism.spmd_backend != "spmd_types":
        raise ValueError(
            'quantize.linear.name = "nvfp4" with parallelism.tensor_parallel_degree > 1 needs '
            'parallelism.spmd_backend = "spmd_types": its kernels take plain tensors'
        )
    if name != "float8":
        return
    if converter.emulate and _compiled(config):
        raise ValueError("quantize.linear.emulate runs eagerly: set compile.enable = false, or leave it out")
    if converter.emulate and converter.recipe_name != Float8LinearConverter.Config().recipe_name:
        raise ValueError(
            f'quantize.linear.recipe_name = "{converter.recipe_name}": TorchTitan emulates one recipe only, '
            "a scale a tensor; leave out recipe_name, or emulate"
        )
    if "auto_filter_small_kn" in converter.filter_fqns:
        # torchao's filter asks for modules (isinstance(mod, nn.Linear)), TorchTitan 0.3 hands it configs.
        raise ValueError(
            'quantize.linear.filter_fqns = "auto_filter_small_kn" leaves out every linear in TorchTitan 0.3; '
            "name those to leave out"
        )


def _check_experts(
    converter: QuantizationConverter.Config, name: str, model: Decoder.Config, config: "Trainer.Config"
) -> None:
    if not any(layer.moe is not None for layer in model.layers):
        raise ValueError(f'quantize.experts.name = "{name}": the model has no experts; leave the table out')
    if config.training.mixed_precision_param != "bfloat16":
        raise ValueError(
            f'quantize.experts.name = "{name}" needs training.mixed_precision_param = "bfloat16", the dtype '
            "that quantized grouped products return"
        )
    if name == "mxfp8" and (converter.pad_multiple < 1 or converter.pad_multiple % MULTIPLE[name]):
        raise ValueError(
            f"quantize.experts.pad_multiple = {converter.pad_multiple}: expected a multiple of "
            f"{MULTIPLE[name]}, the tokens that share a scale"
        )


def _compiled(config: "Trainer.Config") -> bool:
    return config.compile.enable and "model" in config.compile.components


def check_device(converters: list[QuantizationConverter.Config]) -> None:
    """Refuse converters that TorchTitan refuses on this machine.

    Raises:
        ValueError: why, and which are possible here.
    """
    for converter in converters:
        if reason := _refusal(converter):
            part, name = name_of(converter)
            possible = [f'"{other}"' for other, kind in PARTS[part].items() if not _refusal(kind())]
            if part == "linear" and not _refusal(Float8LinearConverter.Config(emulate=True)):
                possible.append('"float8" with emulate = true')
            here = f"Possible here: {', '.join(possible)}." if possible else "Here none is possible."
            raise ValueError(f'quantize.{part}.name = "{name}": {reason} {here}')


def _refusal(converter: QuantizationConverter.Config) -> str | None:
    """What TorchTitan says against a converter on this machine, None if nothing."""
    with _hushed():
        try:
            converter.build()
        except (ImportError, ValueError) as error:
            return str(error).rstrip(".") + "."
    return None


@contextmanager
def _hushed() -> Iterator[None]:
    """Without TorchTitan's lines below errors: it is only asked."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def quantize(
    model: Decoder.Config, converters: list[QuantizationConverter.Config], config: "Trainer.Config"
) -> None:
    """Let the model's converters convert what fits, and log what was left and why.

    Args:
        model: with its exchanges chosen and its placements set; changed in place.
        config: the run.
    """
    parallelism = config.parallelism
    placed = Placed(parallelism.tensor_parallel_degree, parallelism.context_parallel_degree)
    for converter in converters:
        part, name = name_of(converter)
        found = list(model.traverse(Linear.Config if part == "linear" else GroupedExperts.Config))
        reasons = {place[0]: why_not(*place, MULTIPLE[name], placed) for place in found}
        _Fitting(model, reasons).let(replace(converter, model_compile_enabled=_compiled(config)))
        left, converted = defaultdict(Counter), Counter()
        for fqn, before, parent, attr in found:
            after = parent[attr] if isinstance(parent, list) else getattr(parent, attr)
            if after is before:
                left[reasons[fqn] or "by its name"][attr] += 1
                continue
            converted[attr] += 1
            after.sharding_config = before.sharding_config
            if name == "nvfp4" and before.sharding_config.out_src_shardings is None:
                setattr(parent, attr, _local(after))
        logger.info(_said(converter, converted, left, placed))


class _Fitting:
    """What a converter sees of a model: the configurations that nothing speaks against."""

    def __init__(self, model: Decoder.Config, reasons: dict[str, str | None]) -> None:
        self.model = model
        self.reasons = reasons

    def let(self, converter: QuantizationConverter.Config) -> None:
        """Have it convert them."""
        converter.build().convert(self)

    def traverse(self, kind: type) -> Iterator[Found]:
        """As the model's, without the rest."""
        return (place for place in self.model.traverse(kind) if not self.reasons[place[0]])


def why_not(
    fqn: str, config: Module.Config, parent: object, attr: str | int, multiple: int, placed: Placed
) -> str | None:
    """What speaks against quantizing a linear or experts, None if nothing does."""
    if reason := _full_precision(parent).get(attr):
        return reason
    sizes = _experts(config) if isinstance(config, GroupedExperts.Config) else _linear(config)
    rows, columns = (size // (placed.tp if split else 1) for size, split in sizes)
    if isinstance(parent, GatedAttention.Config) and attr in ("wk", "wv"):
        rows = config.out_features // min(placed.tp, parent.n_key_value_heads)  # see `GatedAttention`
    if isinstance(parent, LinearAttention.Config) and attr in parent._owner.exchanged:
        rows //= placed.cp if exchange_class(parent.run.exchange, placed.cp).slices_weights else 1
    if rows % multiple or columns % multiple:
        return f"{rows} x {columns} on a rank, no multiples of {multiple}"
    return None


def _full_precision(parent: object) -> dict[str, str]:
    """The linears of a module that are never quantized, and what each one makes."""
    declared = getattr(getattr(parent, "_owner", None), "full_precision", {})
    return _FULL_PRECISION.get(type(parent), declared)


def _linear(config: Linear.Config) -> tuple[tuple[int, bool], ...]:
    """Rows and columns of a weight, and which of them TP splits."""
    split = _split(config, "weight")
    return (config.out_features, split == 0), (config.in_features, split == 1)


def _experts(config: GroupedExperts.Config) -> tuple[tuple[int, bool], ...]:
    """As `_linear`, of `w1_EFD` `[E, F, D]`, which `w2_EDF` and `w3_EFD` follow."""
    return (config.hidden_dim, _split(config, "w1_EFD") == 1), (config.dim, False)


def _split(config: Module.Config, parameter: str) -> int | None:
    """The dimension of a parameter that TP splits."""
    types = config.sharding_config.state_shardings[parameter].per_axis_spmd_types()
    placement = types.get(MeshAxisName.TP)
    return placement.dim if isinstance(placement, spmd.Shard) else None


def _local(config: "NVFP4Linear.Config") -> "LocalNVFP4Linear.Config":
    return LocalNVFP4Linear.Config(
        in_features=config.in_features,
        out_features=config.out_features,
        bias=config.bias,
        param_init=config.param_init,
        sharding_config=config.sharding_config,
    )


def _said(
    converter: QuantizationConverter.Config,
    converted: Counter[str],
    left: dict[str, Counter[str]],
    placed: Placed,
) -> str:
    """The line that says how many were converted, and which were left out and why."""
    part, name = name_of(converter)
    options = {key: value for key, value in asdict(converter).items() if value and "compile" not in key}
    if options.get("emulate"):
        options["recipe_name"] = "tensorwise"  # the one that TorchTitan emulates
    options = "".join(f", {key} = {value}" for key, value in options.items())
    kept = "; ".join(f"{_counted(names)} ({reason})" for reason, names in left.items()) or "nothing"
    return (
        f"Quantized to {name}{options} at TP {placed.tp}, CP {placed.cp}: {converted.total()} of "
        f"{converted.total() + sum(names.total() for names in left.values())} {part.rstrip('s')}s"
        f"{': ' if converted else ''}{_counted(converted)}; left as they are: {kept}"
    )


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
