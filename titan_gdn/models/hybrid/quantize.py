"""Quantizes linears and experts to 8 or 4 bits with TorchTitan's converters.

A converter replaces configurations before the model is built. TorchTitan's converters check the sizes of
global weights, but the hardware multiplies a rank's shard. This module therefore shows a converter only the
linears and experts whose shards have suitable sizes: the shard of tensor parallelism and, if the exchange
slices weights (`Exchange.slices_weights`), the rows of the CP rank's heads. The shards are known once
exchanges are chosen and placements are set, at the end of `update_from_config`.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

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
"""TorchTitan's converters by table of the TOML section `[quantize]`, then by `name` in the table."""

# Both sizes of a shard must be a multiple of this: the 16 bytes of a float8 tensor core (module_filter_fn),
# the block of MXFP8 elements that share a scale, the tile of torchao's NVFP4 kernels.
MULTIPLE = {"float8": 16, "mxfp8": 32, "nvfp4": 128}

_FULL_PRECISION = {
    TokenChoiceTopKRouter.Config: {"gate": "routing"},
    SigmoidGatedFeedForward.Config: {"gate": "routing"},
}
"""Linears of TorchTitan's modules that are never quantized, each with the quantity that it computes.

The modules of this package declare their own as `full_precision`. Rounding errors of a decay, which is summed
over a document and exponentiated, and of a router's scores, which select experts, do not average out."""


class Candidate(NamedTuple):
    """A linear or experts that may be quantized, as `Module.Config.traverse` yields it.

    Attributes:
        fqn: fully qualified name.
        config: its configuration, of class `Linear.Config` or `GroupedExperts.Config`.
        parent: the configuration or list that holds it.
        attr: its attribute of `parent`, or its index in a list.
    """

    fqn: str
    config: Any
    parent: Any
    attr: Any


class Degrees(NamedTuple):
    """The degrees of parallelism that determine the sizes of a rank's shards."""

    tp: int
    cp: int


if NVFP4Linear is not None:

    class LocalNVFP4Linear(NVFP4Linear):
        """An NVFP4 linear for layers that compute on local tensors.

        TorchTitan's linear enters a local region itself, which needs inputs and outputs with declared
        placements. Layers that do their own communication are in a local region already.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(NVFP4Linear.Config):
            def build(self, **kwargs: object) -> "LocalNVFP4Linear":
                """Builds the linear without the local region that `NVFP4Linear.Config.build` adds."""
                return Linear.Config.build(self, **kwargs)


def table_and_name(converter: QuantizationConverter.Config) -> tuple[str, str]:
    """Returns the table and the name of a converter in `[quantize]`, for example "linear" and "float8"."""
    return next(
        (table, name) for table, kinds in PARTS.items() for name in kinds if type(converter) is kinds[name]
    )


def check(
    model: Decoder.Config, converters: list[QuantizationConverter.Config], config: "Trainer.Config"
) -> None:
    """Checks that a model's converters fit the run, on any machine.

    Args:
        model: the model.
        converters: what is quantized, and how.
        config: the run.

    Raises:
        ValueError: names the keys that contradict each other, and what to change.
    """
    for converter in converters:
        table, name = table_and_name(converter)
        (_check_linear if table == "linear" else _check_experts)(converter, name, model, config)


def _check_linear(
    converter: QuantizationConverter.Config, name: str, model: Decoder.Config, config: "Trainer.Config"
) -> None:
    parallelism, seq_len, multiple = config.parallelism, config.training.seq_len, MULTIPLE[name]
    tp, cp = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    sp = tp if parallelism.enable_sequence_parallel else 1
    tokens = seq_len // (cp * sp)
    if tokens % multiple:
        raise ValueError(
            f"training.seq_len = {seq_len} gives each rank {tokens} tokens, but quantize.linear.name = "
            f'"{name}" needs a multiple of {multiple} per rank, because gradients of weights are sums over '
            f"tokens: choose a multiple of {multiple} * parallelism.context_parallel_degree = {multiple * cp}"
            + (f" times parallelism.tensor_parallel_degree = {tp} (sequence parallelism)" if sp > 1 else "")
        )
    if name == "nvfp4" and tp > 1 and parallelism.spmd_backend != "spmd_types":
        raise ValueError(
            'quantize.linear.name = "nvfp4" with parallelism.tensor_parallel_degree > 1 needs '
            'parallelism.spmd_backend = "spmd_types": its kernels take plain tensors'
        )
    if not isinstance(converter, Float8LinearConverter.Config):
        return
    if converter.emulate and _compiled(config):
        raise ValueError(
            "quantize.linear.emulate = true does not support torch.compile: set compile.enable = false, or "
            "remove emulate"
        )
    if converter.emulate and converter.recipe_name != Float8LinearConverter.Config().recipe_name:
        raise ValueError(
            f'quantize.linear.recipe_name = "{converter.recipe_name}": TorchTitan emulates only the '
            "recipe with one scale per tensor: remove recipe_name, or remove emulate"
        )
    if "auto_filter_small_kn" in converter.filter_fqns:
        # torchao's filter expects modules (isinstance(mod, nn.Linear)), but TorchTitan 0.3 passes configs.
        raise ValueError(
            'quantize.linear.filter_fqns = "auto_filter_small_kn" excludes every linear in TorchTitan 0.3: '
            "list the linears to exclude by name"
        )


def _check_experts(
    converter: QuantizationConverter.Config, name: str, model: Decoder.Config, config: "Trainer.Config"
) -> None:
    if not any(layer.moe is not None for layer in model.layers):
        raise ValueError(f'quantize.experts.name = "{name}": the model has no experts; remove the table')
    if config.training.mixed_precision_param != "bfloat16":
        raise ValueError(
            f'quantize.experts.name = "{name}" needs training.mixed_precision_param = "bfloat16", the dtype '
            "of the results of quantized grouped products"
        )
    if not isinstance(converter, MXFP8GroupedExpertsConverter.Config):
        return
    if converter.pad_multiple < 1 or converter.pad_multiple % MULTIPLE[name]:
        raise ValueError(
            f"quantize.experts.pad_multiple = {converter.pad_multiple}: expected a multiple of "
            f"{MULTIPLE[name]}, the number of tokens that share a scale"
        )


def _compiled(config: "Trainer.Config") -> bool:
    return config.compile.enable and "model" in config.compile.components


def check_device(converters: list[QuantizationConverter.Config]) -> None:
    """Checks that TorchTitan supports the converters on this machine.

    Raises:
        ValueError: says why a converter is not supported, and which ones are.
    """
    for converter in converters:
        if reason := _unsupported(converter):
            table, name = table_and_name(converter)
            possible = [f'"{other}"' for other, kind in PARTS[table].items() if not _unsupported(kind())]
            if table == "linear" and not _unsupported(Float8LinearConverter.Config(emulate=True)):
                possible.append('"float8" with emulate = true')
            here = f"Possible here: {', '.join(possible)}." if possible else "No format is possible here."
            raise ValueError(f'quantize.{table}.name = "{name}": {reason} {here}')


def _unsupported(converter: QuantizationConverter.Config) -> str | None:
    """Returns TorchTitan's reason for not supporting a converter on this machine, None if it does."""
    with _only_errors_logged():
        try:
            converter.build()
        except (ImportError, ValueError) as error:
            return str(error).rstrip(".") + "."
    return None


@contextmanager
def _only_errors_logged() -> Iterator[None]:
    """Hides TorchTitan's log lines below errors, because nothing is converted here."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def quantize(
    model: Decoder.Config, converters: list[QuantizationConverter.Config], config: "Trainer.Config"
) -> None:
    """Quantizes the linears and experts of a model whose shards have suitable sizes.

    Logs how many were quantized, and which were not and why.

    Args:
        model: the model, with its exchanges chosen and its placements set. Changed in place.
        converters: what is quantized, and how.
        config: the run.
    """
    parallelism = config.parallelism
    degrees = Degrees(parallelism.tensor_parallel_degree, parallelism.context_parallel_degree)
    for converter in converters:
        table, name = table_and_name(converter)
        kind = Linear.Config if table == "linear" else GroupedExperts.Config
        candidates = [Candidate(*found) for found in model.traverse(kind)]
        reasons = {x.fqn: _reason_not_to_quantize(x, MULTIPLE[name], degrees) for x in candidates}
        view = _QuantizableView(model, reasons)
        replace(converter, model_compile_enabled=_compiled(config)).build().convert(view)
        skipped, converted = defaultdict(Counter), Counter()
        for fqn, before, parent, attr in candidates:
            after = parent[attr] if isinstance(parent, list) else getattr(parent, attr)
            if after is before:
                skipped[reasons[fqn] or "excluded by name"][attr] += 1
                continue
            converted[attr] += 1
            after.sharding_config = before.sharding_config
            if name == "nvfp4" and before.sharding_config.out_src_shardings is None:
                setattr(parent, attr, _local_nvfp4(after))
        logger.info(_summary(converter, converted, skipped, degrees))


class _QuantizableView:
    """A model as a converter sees it: without the linears and experts that must not be quantized."""

    def __init__(self, model: Decoder.Config, reasons: dict[str, str | None]) -> None:
        self.model = model
        self.reasons = reasons

    def traverse(self, kind: type) -> Iterator[Candidate]:
        """Yields the configurations of the class `kind` that may be quantized."""
        candidates = (Candidate(*found) for found in self.model.traverse(kind))
        return (candidate for candidate in candidates if not self.reasons[candidate.fqn])


def _reason_not_to_quantize(candidate: Candidate, multiple: int, degrees: Degrees) -> str | None:
    """Returns why a linear or experts are not quantized, None if they may be."""
    _, config, parent, attr = candidate
    if reason := _full_precision(parent).get(attr):
        return reason
    sizes = _expert_sizes(config) if isinstance(config, GroupedExperts.Config) else _linear_sizes(config)
    rows, columns = (size // (degrees.tp if sharded else 1) for size, sharded in sizes)
    if isinstance(parent, GatedAttention.Config) and attr in ("wk", "wv"):
        # With more TP ranks than key-value heads, a rank multiplies the rows of one head (`GatedAttention`).
        rows = parent.n_key_value_heads * parent.head_dim // min(degrees.tp, parent.n_key_value_heads)
    if isinstance(parent, LinearAttention.Config) and attr in parent.layer_class.exchanged:
        rows //= degrees.cp if exchange_class(parent.run.exchange, degrees.cp).slices_weights else 1
    if rows % multiple or columns % multiple:
        return f"{rows} x {columns} per rank is not divisible by {multiple}"
    return None


def _full_precision(parent: object) -> dict[str, str]:
    """Returns the linears of a module that are never quantized, each with the quantity that it computes."""
    declared = getattr(getattr(parent, "_owner", None), "full_precision", {})
    return _FULL_PRECISION.get(type(parent), declared)


def _linear_sizes(config: Linear.Config) -> tuple[tuple[int, bool], ...]:
    """Returns rows and columns of a weight, each with whether it is sharded over TP."""
    dim = _sharded_dim(config, "weight")
    return (config.out_features, dim == 0), (config.in_features, dim == 1)


def _expert_sizes(config: GroupedExperts.Config) -> tuple[tuple[int, bool], ...]:
    """Returns rows and columns of one expert, each with whether it is sharded over TP.

    They are those of `w1_EFD` `[E, F, D]`. `w2_EDF` and `w3_EFD` have the same sizes and are sharded alike.
    """
    return (config.hidden_dim, _sharded_dim(config, "w1_EFD") == 1), (config.dim, False)


def _sharded_dim(config: Module.Config, parameter: str) -> int | None:
    """Returns the dimension of a parameter that is sharded over TP, None if there is none."""
    assert config.sharding_config is not None  # set by `set_hybrid_sharding`
    types = config.sharding_config.state_shardings[parameter].per_axis_spmd_types()
    placement = types.get(MeshAxisName.TP)
    return placement.dim if isinstance(placement, spmd.Shard) else None


def _local_nvfp4(config: "NVFP4Linear.Config") -> "LocalNVFP4Linear.Config":
    return LocalNVFP4Linear.Config(
        in_features=config.in_features,
        out_features=config.out_features,
        bias=config.bias,
        param_init=config.param_init,
        sharding_config=config.sharding_config,
    )


def _summary(
    converter: QuantizationConverter.Config,
    converted: Counter[str],
    skipped: dict[str, Counter[str]],
    degrees: Degrees,
) -> str:
    """Returns the log line that counts what was quantized, and what was not, grouped by reason."""
    table, name = table_and_name(converter)
    options = {key: value for key, value in asdict(converter).items() if value and "compile" not in key}
    if options.get("emulate"):
        options["recipe_name"] = "tensorwise"  # the only recipe that TorchTitan emulates
    listed = "".join(f", {key} = {value}" for key, value in options.items())
    total = converted.total() + sum(names.total() for names in skipped.values())
    rest = "; ".join(f"{_counts(names)} ({reason})" for reason, names in skipped.items()) or "none"
    return (
        f"Quantized to {name}{listed} at TP {degrees.tp}, CP {degrees.cp}: {converted.total()} of {total} "
        f"{table.rstrip('s')}s{': ' if converted else ''}{_counts(converted)}; not quantized: {rest}"
    )


def _counts(names: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
